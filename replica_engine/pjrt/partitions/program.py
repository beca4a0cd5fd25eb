"""The main function of a divided program, around the body."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable

from replica_engine.pjrt.jaxlib import ir
from replica_engine.pjrt.markers import LAYOUT
from replica_engine.pjrt.mlir import functions
from replica_engine.pjrt.partitions import faults, ops
from replica_engine.pjrt.partitions.layout import MESH, ONE, REPLICAS, Axes, Layout, ReplicaMesh, dimensions, zero_of


def with_layout(text: str, layout: Layout) -> str:
    """The text of a module with its layout, which `partition` reads."""
    head, brace, rest = text.partition("{")
    assert "attributes" in head, "a lowered module has a name and attributes"
    comma = "" if rest.lstrip().startswith("}") else ", "
    return f"{head}{brace}{LAYOUT} = {json.dumps(json.dumps(layout))}{comma}{rest}"


def partition(module: ir.Module) -> None:
    """Divides a module whose text has a layout over the devices of its mesh; leaves other modules as they are."""
    attributes = module.operation.attributes
    if LAYOUT not in attributes:
        return
    mesh, replicas, rows, arguments, results = json.loads(ir.StringAttr(attributes[LAYOUT]).value)
    del attributes[LAYOUT]
    layout = Layout(ReplicaMesh(tuple(map(tuple, mesh[0])), mesh[1]), replicas, rows, arguments, results)
    with module.context, ir.Location.unknown():
        channels = itertools.count(1)
        ops.convert(module, layout, channels)
        _Main(module, layout).write()
        faults.avoid(module, layout, channels)


def of_one_replica(module: ir.Module) -> None:
    """Makes the layout of a module one for a single replica, whose values have a row as beside others."""
    attributes = module.operation.attributes
    if LAYOUT in attributes:
        mesh, _, *rest = json.loads(ir.StringAttr(attributes[LAYOUT]).value)
        attributes[LAYOUT] = ir.StringAttr.get(json.dumps([mesh, 1, *rest]))


class _Main:
    """The main function, whose text is written and not built by calls: so it reads like the program."""

    def __init__(self, module: ir.Module, layout: Layout):
        self._module = module
        self._layout = layout
        self._number = itertools.count()
        self._body = functions(module)["main"]
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
        meshes = [f"sdy.mesh @{MESH} = <[{axes}]>", f"sdy.mesh @{ONE} = <[], device_ids=[0]>"]
        inputs, outputs = (", ".join(each.plain for each in values) for values in (self._inputs, self._outputs))
        body = f"func.func private @replica_body({inputs}) -> ({outputs})"  # what is parsed is checked on its own
        made = ir.Module.parse("\n".join([*meshes, self._main(), body]))
        first = ir.InsertionPoint.at_block_begin(self._module.body)
        for each in list(made.body.operations)[:-1]:
            first.insert(each.detach_from_parent())

    def _main(self) -> str:
        parameters = ", ".join(f"%a{index}: {each.outside}" for index, each in enumerate(self._inputs))
        results = ", ".join(each.outside for each in self._outputs)
        given = [f"%a{index}" for index in range(len(self._inputs))]
        lines, returned = self._in_replicas(given) if self._layout.rows else self._lines(given)
        types = ", ".join(each.stored for each in self._outputs)
        end = f"return {', '.join(returned)} : {types}" if returned else "return"
        body = "\n    ".join([*lines, end])
        return f"func.func public @main({parameters}) -> ({results}) {{\n    {body}\n}}"

    def _in_replicas(self, given: list[str]) -> tuple[list[str], list[str]]:
        """The lines that call the body in each replica, and the names of the results of all."""
        inside = [f"%i{index}" for index in range(len(given))]
        lines, returned = self._lines(inside)
        all_ = self._new() if returned else ""
        parameters = ", ".join(f"{name}: {each.row}" for name, each in zip(inside, self._inputs, strict=True))
        shardings = [", ".join(each.sharding for each in values) for values in (self._inputs, self._outputs)]
        types = [", ".join(each.stored for each in values) for values in (self._inputs, self._outputs)]
        count = f"{all_}:{len(returned)} = " if returned else ""
        head = (
            f"{count}sdy.manual_computation({', '.join(given)}) in_shardings=[{shardings[0]}] "
            f'out_shardings=[{shardings[1]}] manual_axes={{"{REPLICAS}"}} ({parameters}) {{'
        )
        end = f"sdy.return {', '.join(returned)} : {', '.join(each.row for each in self._outputs)}"
        foot = f"}} : ({types[0]}) -> ({types[1]})"
        return [head, *lines, end if returned else "sdy.return", foot], [
            f"{all_}#{index}" for index in range(len(returned))
        ]

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
        row: its type in a replica.
        stored: its type on the devices.
        sharding: how that is divided.
        outside: both, as the main function declares it.
    """

    def __init__(self, kind: ir.Type, axes: Axes, layout: Layout):
        tensor = ir.RankedTensorType(kind)
        self._shape = [tensor.get_dim_size(axis) for axis in range(tensor.rank)]
        self._padded = list(layout.mesh.stored(self._shape, axes))
        self._element = str(tensor.element_type)
        entries = [*axes, *[None] * (tensor.rank - len(axes))]
        rows, ones = ([layout.replicas], [1]) if layout.rows else ([], [])
        self.plain = str(kind)
        self.stored, self.row = self._type([*rows, *self._padded]), self._type([*ones, *self._padded])
        self._whole = self._type(self._padded)
        self.sharding = f"<@{MESH}, {dimensions([REPLICAS, *entries] if layout.rows else entries)}>"
        self.outside = f"{self.stored} {{sdy.sharding = #sdy.sharding{self.sharding}}}"

    def cut(self, name: str, new: Callable[[], str]) -> tuple[list[str], str]:
        """The lines that take a value out of what is stored, and its name."""
        lines: list[str] = []
        if self.row != self._whole:
            lines, name = self._reshaped(name, new(), self.row, self._whole)
        if self._padded != self._shape:
            result, ends = new(), ", ".join(f"0:{size}" for size in self._shape)
            lines.append(f"{result} = stablehlo.slice {name} [{ends}] : ({self._whole}) -> {self.plain}")
            name = result
        return lines, name

    def filled(self, name: str, new: Callable[[], str]) -> tuple[list[str], str]:
        """The lines that make of a value what is stored, and the name of that."""
        lines: list[str] = []
        if self._padded != self._shape:
            zero, result, none = new(), new(), ", ".join("0" for _ in self._shape)
            high = ", ".join(str(stored - size) for stored, size in zip(self._padded, self._shape, strict=True))
            scalar = self._type(())
            lines += [
                f"{zero} = stablehlo.constant dense<{zero_of(self._element)}> : {scalar}",
                f"{result} = stablehlo.pad {name}, {zero}, low = [{none}], high = [{high}], interior = [{none}] : "
                f"({self.plain}, {scalar}) -> {self._whole}",
            ]
            name = result
        if self.row != self._whole:
            more, name = self._reshaped(name, new(), self._whole, self.row)
            lines += more
        return lines, name

    @staticmethod
    def _reshaped(name: str, result: str, before: str, after: str) -> tuple[list[str], str]:
        return [f"{result} = stablehlo.reshape {name} : ({before}) -> {after}"], result

    def _type(self, shape: Iterable[int]) -> str:
        return f"tensor<{''.join(f'{size}x' for size in shape)}{self._element}>"
