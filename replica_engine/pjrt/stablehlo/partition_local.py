"""How values are divided over the devices of a replica, and what each device computes with its part.

`ReplicaMesh` and `Layout` say how values are divided. `computed_locally` puts a computation that each device makes with
its own parts in place of an operation of the whole. `propagated` says how XLA will divide the values inside a program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from replica_engine.pjrt.jaxlib import DYNAMIC, hlo, ir, passmanager, sdy
from replica_engine.pjrt.stablehlo import mlir

Entry = str | Sequence[str] | None
Axes = tuple[Entry, ...]
"""For each dimension of a value: the name of an axis of the mesh, several names, or None. The last ones may lack."""

WHOLE: Axes = ()
"""The axes of a value of which each device has all."""

REPLICAS = "replica"
"""The axis of the replicas, in front of those of the mesh."""

MESH = "mesh"
"""The mesh of all devices in a divided program."""

ONE = "one_device"
"""A mesh of one device in it."""


class ReplicaMesh(NamedTuple):
    """The devices of one replica.

    Attributes:
        axes: the name and the size of each axis.
        batch: the axis over which the batch of a replica is divided; None if each device gets the whole batch.
    """

    axes: tuple[tuple[str, int], ...]
    batch: str | None

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(size for _, size in self.axes)

    def parts(self, axes: Axes) -> list[int]:
        """Into how many parts each dimension is divided."""
        sizes = dict(self.axes)
        return [math.prod(sizes[name] for name in names(entry)) for entry in axes]

    def stored(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """The shape in which a value is stored: each dimension as long as its parts together."""
        return tuple(
            -(-size // count) * count
            for size, count in itertools.zip_longest(shape, self.parts(axes[: len(shape)]), fillvalue=1)
        )

    def on_each(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """The shape of what each device has of a value."""
        parts = itertools.chain(self.parts(axes), itertools.repeat(1))
        return tuple(size // count for size, count in zip(self.stored(shape, axes), parts, strict=False))

    def choose_batch_axes(self, shape: Sequence[int | None], lead: int = 0) -> Axes:
        """The axes of an argument or a result: its first dimension over the axis of the batch, if it is long enough.

        Args:
            shape: its shape.
            lead: how many dimensions come before the first one of a batch.
        """
        # A shorter dimension leaves devices without a part, and one of unknown size may.
        if self.batch is None or len(shape) <= lead or (shape[lead] or 0) < dict(self.axes)[self.batch]:
            return WHOLE
        return (*[None] * lead, self.batch)


class ValuePart(NamedTuple):
    """What a device has of a value, without the zeros behind it.

    Attributes:
        place: the first index and the length in each dimension.
        shard: which device of this process has it.
        is_first: whether this process has the first of all devices that have it.
    """

    place: tuple[tuple[int, int], ...]
    shard: int
    is_first: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        """The place as an index of the whole value."""
        return tuple(slice(begin, begin + length) for begin, length in self.place)


class Layout(NamedTuple):
    """How the values of a program lie on its devices.

    Attributes:
        mesh: the devices of each replica.
        replicas: the number of replicas.
        rows: whether each value has a first dimension with a row for each replica.
        arguments: the axes of each parameter.
        results: the axes of each result.
    """

    mesh: ReplicaMesh
    replicas: int
    rows: bool
    arguments: tuple[Axes, ...]
    results: tuple[Axes, ...]


def names(entry: Entry) -> tuple[str, ...]:
    """The names in one entry of `Axes`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def dimensions(entries: Iterable[Entry]) -> str:
    """The axes of each dimension, as Shardy writes them. A part of an axis is "name:(before)size"."""

    def quoted(name: str) -> str:
        axis, colon, part = name.partition(":")
        return f'"{axis}"{colon}{part}'

    return "[" + ", ".join("{" + ", ".join(map(quoted, names(each))) + "}" for each in entries) + "]"


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
            # The devices of a replica are numbered along the last axis of the mesh first.
            stride = math.prod(self._sizes[each] for each in names[names.index(axis) + 1 :])
            along = hlo.remainder(hlo.divide(number, integer(stride)), integer(size))
            place = hlo.add(hlo.multiply(place, integer(size)), along)
        return place

    def added_up(self, value: ir.Value, axes: Sequence[str]) -> ir.Value:
        """The sum of a value over the devices along some axes; of truth values, whether any is true."""
        kind = ir.RankedTensorType(value.type)
        total = hlo.AllReduceOp([kind], [value], **self._groups(axes))
        return mlir.reduced(total, hlo.or_ if str(kind.element_type) == "i1" else hlo.add)

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
        # The devices of a group come last, so that they lie side by side. Replicas stay apart.
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
    return mlir.splat(0 if isinstance(kind.element_type, ir.IntegerType) else zero, kind)


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


_PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_NUMBER = "replica_engine.number"
_SHARDING = "sdy.sharding"

Divided = tuple[tuple[str, ...], ...]
"""For each dimension of a value the axes that divide it. A part of an axis is "name:(before)size"."""


class Propagated(NamedTuple):
    """How the operands and the results of an operation are divided."""

    operands: tuple[Divided, ...]
    results: tuple[Divided, ...]


def propagated(module: ir.Module, operations: Sequence[ir.Operation]) -> list[Propagated]:
    """How some operations of a module without calls will be divided.

    That is what Shardy makes of the layouts of arguments and constraints. It is asked before the compiler asks it,
    about a copy of the module.
    """
    number = ir.IntegerType.get_signless(64)
    # Numbered, since the copy has operations of its own, to which Shardy adds others.
    for index, each in enumerate(operations):
        each.attributes[_NUMBER] = ir.IntegerAttr.get(number, index)
    copy = module.operation.clone()
    for each in operations:
        del each.attributes[_NUMBER]
    try:
        passmanager.PassManager.parse(_PIPELINE).run(copy.operation)
    except ir.MLIRError as error:
        if DYNAMIC not in str(error):
            raise
        return [Propagated((), ()) for _ in operations]  # the compiler will refuse it too
    found = [Propagated((), ()) for _ in operations]
    for each in mlir.operations(copy, *{each.name for each in operations}):
        if _NUMBER in each.attributes:
            index = ir.IntegerAttr(each.attributes[_NUMBER]).value
            found[index] = Propagated(tuple(map(_read_divided, each.operands)), tuple(map(_read_divided, each.results)))
    return found


def inline_calls(module: ir.Module) -> None:
    """Puts what the functions of a module do in place of their calls, so that Shardy sees who has which value.

    XLA does so itself, before it asks Shardy.
    """
    functions = mlir.functions(module)
    main = functions.pop("main")
    while calls := mlir.operations(main, "func.call"):
        for call in calls:
            copy = functions[mlir.callee(call)].clone()
            (block,) = copy.regions[0].blocks
            for argument, value in zip(block.arguments, call.operands, strict=True):
                argument.replace_all_uses_with(value)
            *operations, end = block.operations
            place = ir.InsertionPoint(call)
            for each in operations:
                place.insert(each.detach_from_parent())
            for result, value in zip(call.results, end.operands, strict=True):
                result.replace_all_uses_with(value)
            call.erase()
            copy.erase()
    for function in functions.values():
        function.erase()


def drop_reshapes(module: ir.Module) -> None:
    """Drops reshapes into the same shape, as XLA does before it asks Shardy.

    Shardy does not look beyond a reshape along a dimension of length 1.
    """
    for each in mlir.operations(module, "stablehlo.reshape"):
        if each.operands[0].type == each.results[0].type:
            each.results[0].replace_all_uses_with(each.operands[0])
            each.erase()


def _read_divided(value: ir.Value) -> Divided:
    rank = ir.RankedTensorType(value.type).rank
    is_result = isinstance(value.owner, (ir.Operation, ir.OpView))
    found = (
        _read_result_attribute(ir.OpResult(value)) if is_result else _read_argument_attribute(ir.BlockArgument(value))
    )
    if found is None:
        return ((),) * rank
    entries = sdy.TensorShardingAttr(found).dimension_shardings
    return tuple(tuple(map(_name, sdy.DimensionShardingAttr(each).axes)) for each in entries)


def _read_result_attribute(result: ir.OpResult) -> ir.Attribute | None:
    owner, index = result.owner, result.result_number
    if owner.name == "sdy.manual_computation":
        return _nth(owner.attributes["out_shardings"], index)
    if "sharding" in owner.attributes:  # a constraint or another layout from here on
        return owner.attributes["sharding"]
    return _nth(owner.attributes[_SHARDING], index) if _SHARDING in owner.attributes else None


def _read_argument_attribute(argument: ir.BlockArgument) -> ir.Attribute | None:
    owner, index = argument.owner.owner.operation, argument.arg_number  # a view of a function has its own name
    if owner.name == "func.func":
        if "arg_attrs" not in owner.attributes:
            return None
        given = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[index])
        return given[_SHARDING] if _SHARDING in given else None  # noqa: SIM401 (it has no `get`)
    if owner.name == "stablehlo.while" and _SHARDING in owner.attributes:
        return _nth(owner.attributes[_SHARDING], index)
    if owner.name == "sdy.manual_computation":
        return _without_manual(owner, _nth(owner.attributes["in_shardings"], index))
    return None


def _without_manual(owner: ir.Operation, sharding: ir.Attribute) -> ir.Attribute:
    manual: Any = sdy.ManualAxesAttr(owner.attributes["manual_axes"])  # a sequence of names
    whole = sdy.TensorShardingAttr(sharding)
    entries = []
    for each in whole.dimension_shardings:
        axes = map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(each).axes)
        left = [axis for axis in axes if axis.name not in list(manual)]
        entries.append(sdy.DimensionShardingAttr.get(left, is_closed=True))
    return sdy.TensorShardingAttr.get(whole.mesh_or_ref, entries)


def _nth(shardings: ir.Attribute, index: int) -> ir.Attribute:
    return sdy.TensorShardingPerValueAttr(shardings).shardings[index]


def _name(axis: ir.Attribute) -> str:
    reference = sdy.AxisRefAttr(axis)
    if reference.sub_axis_info is None:
        return str(reference.name)
    part = sdy.SubAxisInfoAttr(reference.sub_axis_info)
    return f"{reference.name}:({part.pre_size}){part.size}"
