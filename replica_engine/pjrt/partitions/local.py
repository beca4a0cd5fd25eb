"""Computations that each device makes with its own part of the values, in place of an operation of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.mlir import reduced, splat
from replica_engine.pjrt.partitions.layout import MESH, Entry, Layout, dimensions
from replica_engine.pjrt.partitions.propagation import Divided


class Devices:
    """The devices of a replica, as a manual computation sees them.

    Attributes:
        layout: the layout of the program.
        channels: numbers of channels that no other collective of the module has.
    """

    def __init__(self, layout: Layout, channels: Iterator[int]):
        self.layout = layout
        self.channels = channels
        self._sizes = dict(layout.mesh.axes)

    def count(self, axes: Sequence[str]) -> int:
        """Into how many parts some axes divide a dimension."""
        return math.prod(self._sizes[each] for each in axes)

    def is_whole_axes(self, divided: Divided) -> bool:
        """Whether no axis is divided itself, as Shardy does at times."""
        return all(name in self._sizes for entry in divided for name in entry)

    def place(self, axes: Sequence[str]) -> ir.Value:
        """Which part along some axes this device has, as an int32."""
        number = hlo.convert(_int32(), hlo.partition_id())
        names = list(self._sizes)
        place = integer(0)
        for axis in axes:
            size = self._sizes[axis]
            stride = math.prod(self._sizes[each] for each in names[names.index(axis) + 1 :])
            along = hlo.remainder(hlo.divide(number, integer(stride)), integer(size))
            place = hlo.add(hlo.multiply(place, integer(size)), along)
        return place

    def added_up(self, value: ir.Value, axes: Sequence[str]) -> ir.Value:
        """The sum of a value over the devices along some axes; of truth values, whether any is true."""
        kind = ir.RankedTensorType(value.type)
        total = hlo.AllReduceOp([kind], [value], **self._groups(axes))
        return reduced(total, hlo.or_ if str(kind.element_type) == "i1" else hlo.add)

    def gathered(self, value: ir.Value, axes: Sequence[str]) -> ir.Value:
        """The values of the devices along some axes, one after the other along a new first dimension."""
        kind = ir.RankedTensorType(value.type)
        row = hlo.reshape(tensor([1, *kind.shape], kind.element_type), value)
        rows = tensor([self.count(axes), *kind.shape], kind.element_type)
        return hlo.AllGatherOp([rows], [row], 0, **self._groups(axes)).results[0]

    def _groups(self, axes: Sequence[str]) -> dict[str, Any]:
        names = list(self._sizes)
        ids = np.arange(self.layout.replicas * self.layout.mesh.size)
        ids = ids.reshape(self.layout.replicas, *self._sizes.values())
        others = [index + 1 for index, name in enumerate(names) if name not in axes]
        order = [0, *others, *(names.index(each) + 1 for each in axes)]
        groups: Any = np.ascontiguousarray(ids.transpose(order).reshape(-1, self.count(axes)))
        return {
            "replica_groups": ir.DenseElementsAttr.get(groups),
            "channel_handle": channel(self.channels),
            "use_global_device_ids": True,
        }


def channel(channels: Iterator[int]) -> ir.Attribute:
    """The next channel, as a collective has it."""
    return ir.Attribute.parse(f"#stablehlo.channel_handle<handle = {next(channels)}, type = 1>")


def computed_locally(
    operation: ir.Operation,
    inputs: Sequence[Divided],
    outputs: Sequence[Divided],
    devices: Devices,
    build: Callable[[list[ir.Value]], list[ir.Value]],
    fillings: Sequence[ir.Value] = (),
) -> None:
    """Puts in place of an operation what each device makes with its parts of the operands.

    Args:
        operation: the operation, which is erased.
        inputs: how its operands are divided.
        outputs: how the results will be.
        devices: of a replica.
        build: gets the operands' parts and gives those of the results; called once, where the computation is built.
        fillings: a scalar for each operand, with which it is filled up to equal parts; 0 where there is none.
    """
    mesh = devices.layout.mesh
    with ir.InsertionPoint(operation), operation.location:
        tensors = [ir.RankedTensorType(each.type) for each in operation.operands]
        given = []
        for index, (value, kind, by) in enumerate(zip(operation.operands, tensors, inputs, strict=True)):
            filling = fillings[index] if index < len(fillings) else None
            given.append(filled_up(value, mesh.stored(kind.shape, by), filling))
        kinds = [ir.RankedTensorType(each.type) for each in operation.results]
        stored = [
            tensor(mesh.stored(each.shape, by), each.element_type) for each, by in zip(kinds, outputs, strict=True)
        ]
        parts = [
            tensor(mesh.on_each(each.shape, by), each.element_type) for each, by in zip(tensors, inputs, strict=True)
        ]
        outer, block = manual_computation(dict(mesh.axes), given, inputs, parts, stored, outputs)
        with ir.InsertionPoint(block):
            ir.Operation.create("sdy.return", operands=build(list(block.arguments)))
        for result, kind, made in zip(operation.results, kinds, outer.results, strict=True):
            result.replace_all_uses_with(cut(made, kind))
    operation.erase()


def manual_computation(
    axes: Iterable[str],
    operands: Sequence[ir.Value],
    inputs: Sequence[Divided],
    parts: Sequence[ir.Type],
    results: Sequence[ir.Type],
    outputs: Sequence[Divided],
) -> tuple[ir.Operation, ir.Block]:
    """A computation over some axes at the current place, and its block, which has no operations yet.

    Args:
        axes: the axes.
        operands: what it gets.
        inputs: how that is divided.
        parts: the types of what each device has of it.
        results: the types of the results.
        outputs: how they are divided.
    """
    quoted = ", ".join(f'"{name}"' for name in axes)
    made = ir.Operation.create(
        "sdy.manual_computation",
        results=list(results),
        operands=list(operands),
        attributes={
            "in_shardings": _shardings(inputs),
            "out_shardings": _shardings(outputs),
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{quoted}}}>"),
        },
        regions=1,
    )
    return made, made.regions[0].blocks.append(*parts, arg_locs=[ir.Location.current] * len(parts))


def constrained(value: ir.Value, entries: Iterable[Entry]) -> ir.Value:
    """A value that is divided so from here on; an entry of `Axes` for each dimension."""
    attributes = {"sharding": sharding(entries)}
    return ir.Operation.create(
        "sdy.sharding_constraint", results=[value.type], operands=[value], attributes=attributes
    ).result


def sharding(entries: Iterable[Entry]) -> ir.Attribute:
    """How a value is divided; an entry of `Axes` for each dimension."""
    return ir.Attribute.parse(f"#sdy.sharding<@{MESH}, {dimensions(entries)}>")


def integer(value: int) -> ir.Value:
    """An int32 scalar."""
    return constant(value, _int32())


def constant(value: object, kind: ir.Type) -> ir.Value:
    """A constant of one number."""
    return hlo.constant(ir.Attribute.parse(f"dense<{value}> : {kind}"))


def zeros(kind: ir.RankedTensorType, zero: float = 0.0) -> ir.Value:
    """Zeros of a type. A negative zero changes no sum if it is added: it keeps the sign of another zero."""
    if isinstance(kind.element_type, ir.ComplexType):  # jaxlib reads no constants of complex numbers
        part = tensor(kind.shape, kind.element_type.element_type)
        return hlo.complex(zeros(part, zero), zeros(part, zero))
    return splat(0 if isinstance(kind.element_type, ir.IntegerType) else zero, kind)


def filled_up(value: ir.Value, shape: Sequence[int], filling: ir.Value | None = None) -> ir.Value:
    """A value with a scalar behind it, up to a shape; with 0 if none is given."""
    kind = ir.RankedTensorType(value.type)
    if list(shape) == list(kind.shape):
        return value
    none = [0] * kind.rank
    if filling is None:
        filling = zeros(tensor([], kind.element_type))
    return hlo.pad(value, filling, none, [now - was for now, was in zip(shape, kind.shape, strict=True)], none)


def cut(value: ir.Value, kind: ir.RankedTensorType) -> ir.Value:
    """The first elements of a value along each dimension, as many as a type has."""
    none, ones = [0] * kind.rank, [1] * kind.rank
    return value if value.type == kind else hlo.slice(value, none, list(kind.shape), ones)


def tensor(shape: Sequence[int], element: ir.Type) -> ir.RankedTensorType:
    """A type of tensors."""
    return ir.RankedTensorType.get(list(shape), element)


def _shardings(values: Sequence[Divided]) -> ir.Attribute:
    each = ", ".join(f"<@{MESH}, {dimensions(divided)}>" for divided in values)
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{each}]>")


def _int32() -> ir.RankedTensorType:
    return tensor([], ir.IntegerType.get_signless(32))
