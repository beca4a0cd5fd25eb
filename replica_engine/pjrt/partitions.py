"""Replicas of several devices: how their values are divided, and the program that XLA's partitioner divides.

A replica's devices form a mesh, whose axes have names. The axes of a value say, for each of its dimensions, over which
axis of the mesh it is divided. A body is lowered as for one device. Its text then gets a layout: the mesh, and the axes
of each argument and result (`with_layout`). When the text is compiled, `partition` turns the layout into shardings of
Shardy. XLA divides everything in between, and inserts the collectives that this needs. So the results of a body never
depend on a layout, except by rounding.

How values lie on the devices:

- A dimension that does not divide evenly is stored with zeros behind it: 13 rows over 4 devices as 16. The program cuts
  them off what it gets, and adds them to what it returns.
- With several replicas, each value has one more dimension, the first, with a row for each replica. The body lies in a
  manual computation over the axis of the replicas, so that one program has all replicas: XLA has replicas beside
  partitions too, but jaxlib 0.10 aborts the process at the first divided result. What replicas exchange goes to the
  devices at the same place of other replicas.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from replica_engine.pjrt.jaxlib import ir

Axes = tuple[Any, ...]
"""For each dimension of a value: the name of an axis of the mesh, several names, or None. The last ones may lack."""

WHOLE: Axes = ()
"""The axes of a value of which each device has all."""

REPLICAS = "replica"
"""The axis of the replicas, in front of those of the mesh."""

_LAYOUT = "mhlo.replica_engine_layout"
_MESH, _ONE = "mesh", "one_device"


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

    def of_batch(self, shape: Sequence[int | None]) -> Axes:
        """The axes of an argument or a result: its first dimension over the axis of the batch, if it is long enough."""
        if self.batch is None or not shape or (shape[0] or 0) < dict(self.axes)[self.batch]:
            return WHOLE
        return (self.batch,)


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


def names(entry: Any) -> tuple[str, ...]:
    """The names in one entry of `Axes`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def with_layout(text: str, layout: Layout) -> str:
    """The text of a module with its layout, which `partition` reads."""
    head, brace, rest = text.partition("{")
    assert "attributes" in head, "a lowered module has a name and attributes"
    return f"{head}{brace}{_LAYOUT} = {json.dumps(json.dumps(layout))}, {rest}"


def partition(module: Any) -> None:
    """Divides a module whose text has a layout over the devices of its mesh; leaves other modules as they are."""
    attributes = module.operation.attributes
    if _LAYOUT not in attributes:
        return
    mesh, replicas, rows, arguments, results = json.loads(ir.StringAttr(attributes[_LAYOUT]).value)
    del attributes[_LAYOUT]
    layout = Layout(ReplicaMesh(tuple(map(tuple, mesh[0])), mesh[1]), replicas, rows, arguments, results)
    with module.context, ir.Location.unknown():
        _Partitioned(module, layout).write()


class _Partitioned:
    """The main function of a divided program, around the body's.

    Its text is written and not built by calls: so it reads like the program.
    """

    def __init__(self, module: Any, layout: Layout):
        self._module = module
        self._layout = layout
        self._number = itertools.count()
        (self._body,) = (
            each
            for each in module.body.operations
            if "sym_name" in each.attributes and ir.StringAttr(each.attributes["sym_name"]).value == "main"
        )
        kind = ir.FunctionType(ir.TypeAttr(self._body.attributes["function_type"]).value)
        self._inputs = [_Value(each, axes, layout) for each, axes in zip(kind.inputs, layout.arguments, strict=True)]
        self._outputs = [_Value(each, axes, layout) for each, axes in zip(kind.results, layout.results, strict=True)]

    def write(self) -> None:
        """Puts the function into the module."""
        self._body.attributes["sym_name"] = ir.StringAttr.get("replica_body")
        self._body.attributes["sym_visibility"] = ir.StringAttr.get("private")
        for name in ("arg_attrs", "res_attrs"):
            if name in self._body.attributes:
                del self._body.attributes[name]
        sizes = [(REPLICAS, self._layout.replicas)] if self._layout.rows else []
        axes = ", ".join(f'"{name}"={size}' for name, size in [*sizes, *self._layout.mesh.axes])
        meshes = [f"sdy.mesh @{_MESH} = <[{axes}]>", f"sdy.mesh @{_ONE} = <[], device_ids=[0]>"]
        inputs, outputs = (", ".join(each.plain for each in values) for values in (self._inputs, self._outputs))
        body = f"func.func private @replica_body({inputs}) -> ({outputs})"  # what is parsed is checked on its own
        made = ir.Module.parse("\n".join([*meshes, self._main(), body]))
        first = ir.InsertionPoint.at_block_begin(self._module.body)
        for each in list(made.body.operations)[:-1]:
            first.insert(each.detach_from_parent())

    def _main(self) -> str:
        parameters = ", ".join(f"%a{index}: {each.outside}" for index, each in enumerate(self._inputs))
        results = ", ".join(each.outside for each in self._outputs)
        lines, returned = self._lines([f"%a{index}" for index in range(len(self._inputs))])
        types = ", ".join(each.stored for each in self._outputs)
        end = f"return {', '.join(returned)} : {types}" if returned else "return"
        body = "\n    ".join([*lines, end])
        return f"func.func public @main({parameters}) -> ({results}) {{\n    {body}\n}}"

    def _lines(self, given: list[str]) -> tuple[list[str], list[str]]:
        """The lines that call the body, and the names of the results."""
        lines, passed, returned = [], [], []
        for name, value in zip(given, self._inputs, strict=True):
            more, name = value.cut(name, self._new)
            lines += more
            passed.append(name)
        called = self._new() if self._outputs else ""
        count = f"{called}:{len(self._outputs)} = " if self._outputs else ""
        inputs, outputs = (", ".join(each.plain for each in values) for values in (self._inputs, self._outputs))
        lines.append(f"{count}func.call @replica_body({', '.join(passed)}) : ({inputs}) -> ({outputs})")
        for index, value in enumerate(self._outputs):
            more, name = value.filled(f"{called}#{index}", self._new)
            lines += more
            returned.append(name)
        return lines, returned

    def _new(self) -> str:
        return f"%v{next(self._number)}"


class _Value:
    """An argument or a result: its types in the body and on the devices, and the lines between the two.

    Attributes:
        plain: its type in the body.
        stored: its type on the devices.
        outside: the same with its sharding, as the main function declares it.
    """

    def __init__(self, kind: Any, axes: Axes, layout: Layout):
        tensor = ir.RankedTensorType(kind)
        self._shape = [tensor.get_dim_size(axis) for axis in range(tensor.rank)]
        self._stored = layout.mesh.stored(self._shape, axes)
        self._element = str(tensor.element_type)
        self.plain, self.stored = str(kind), self._type(self._stored)
        entries = [*axes[: tensor.rank], *[None] * (tensor.rank - len(axes))]
        self.outside = f"{self.stored} {{sdy.sharding = #sdy.sharding<@{_MESH}, {_dimensions(entries)}>}}"

    def cut(self, name: str, new: Any) -> tuple[list[str], str]:
        """The lines that cut off what is stored behind a value, and the name of the rest."""
        if list(self._stored) == self._shape:
            return [], name
        result, ends = new(), ", ".join(f"0:{size}" for size in self._shape)
        return [f"{result} = stablehlo.slice {name} [{ends}] : ({self.stored}) -> {self.plain}"], result

    def filled(self, name: str, new: Any) -> tuple[list[str], str]:
        """The lines that add zeros behind a value, and the name of the result."""
        if list(self._stored) == self._shape:
            return [], name
        zero, result, none = new(), new(), ", ".join("0" for _ in self._shape)
        high = ", ".join(str(stored - size) for stored, size in zip(self._stored, self._shape, strict=True))
        scalar = self._type(())
        return [
            f"{zero} = stablehlo.constant dense<{_zero(self._element)}> : {scalar}",
            f"{result} = stablehlo.pad {name}, {zero}, low = [{none}], high = [{high}], interior = [{none}] : "
            f"({self.plain}, {scalar}) -> {self.stored}",
        ], result

    def _type(self, shape: Iterable[int]) -> str:
        return f"tensor<{''.join(f'{size}x' for size in shape)}{self._element}>"


def _dimensions(entries: Iterable[Any]) -> str:
    """The axes of each dimension, as Shardy writes them."""
    return "[" + ", ".join("{" + ", ".join(f'"{name}"' for name in names(each)) + "}" for each in entries) + "]"


def _zero(element: str) -> str:
    if element == "i1":
        return "false"
    if element.startswith("complex"):
        return "(0.0, 0.0)"
    return "0" if element.startswith(("i", "ui", "si")) else "0.0"
