"""The main function of a divided program, around the body."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.markers import LAYOUT
from replica_engine.pjrt.mlir import functions
from replica_engine.pjrt.partitions import faults, ops
from replica_engine.pjrt.partitions.layout import MESH, ONE, REPLICAS, Axes, Layout, ReplicaMesh, names
from replica_engine.pjrt.partitions.local import cut, filled_up, manual_computation, sharding, tensor

_BODY = "replica_body"


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
        _write_main(module, layout)
        faults.avoid(module, layout, channels)


def _write_main(module: ir.Module, layout: Layout) -> None:
    """Puts a main function into the module that takes and returns values as they lie on the devices.

    It calls the body, beside other replicas in a manual computation over the axis of the replicas.
    """
    body = functions(module)["main"]
    kind = ir.FunctionType(ir.TypeAttr(body.attributes["function_type"]).value)
    inputs = [_Value(each, axes, layout) for each, axes in zip(kind.inputs, layout.arguments, strict=True)]
    outputs = [_Value(each, axes, layout) for each, axes in zip(kind.results, layout.results, strict=True)]
    body.attributes["sym_name"] = ir.StringAttr.get(_BODY)
    body.attributes["sym_visibility"] = ir.StringAttr.get("private")
    for name in ("arg_attrs", "res_attrs"):
        if name in body.attributes:
            del body.attributes[name]
    sizes = [(REPLICAS, layout.replicas)] if layout.rows else []
    axes = ", ".join(f'"{name}"={size}' for name, size in [*sizes, *layout.mesh.axes])
    meshes = ir.Module.parse(f"sdy.mesh @{MESH} = <[{axes}]>\nsdy.mesh @{ONE} = <[], device_ids=[0]>")
    first = ir.InsertionPoint.at_block_begin(module.body)
    for each in list(meshes.body.operations):
        first.insert(each.detach_from_parent())
    stored = ir.FunctionType.get([each.stored for each in inputs], [each.stored for each in outputs])
    attributes = {
        "sym_name": ir.StringAttr.get("main"),
        "sym_visibility": ir.StringAttr.get("public"),
        "function_type": ir.TypeAttr.get(stored),
        "arg_attrs": ir.ArrayAttr.get([each.described for each in inputs]),
        "res_attrs": ir.ArrayAttr.get([each.described for each in outputs]),
    }
    with first:
        main = ir.Operation.create("func.func", attributes=attributes, regions=1)
    block = main.regions[0].blocks.append(*stored.inputs, arg_locs=[ir.Location.current] * len(inputs))
    with ir.InsertionPoint(block):
        if layout.rows:
            rows = [each.row for each in inputs]
            given, returned = ([each.divided for each in values] for values in (inputs, outputs))
            made, inside = manual_computation([REPLICAS], block.arguments, given, rows, stored.results, returned)
            with ir.InsertionPoint(inside):
                ir.Operation.create("sdy.return", operands=_called(inside.arguments, inputs, outputs))
            results: list[ir.Value] = list(made.results)
        else:
            results = _called(block.arguments, inputs, outputs)
        ir.Operation.create("func.return", operands=results)


def _called(given: Sequence[ir.Value], inputs: list[_Value], outputs: list[_Value]) -> list[ir.Value]:
    """What is stored of the results, after a call of the body with what is stored."""
    passed = [each.cut(value) for value, each in zip(given, inputs, strict=True)]
    callee, kinds = ir.FlatSymbolRefAttr.get(_BODY), [each.plain for each in outputs]
    call = ir.Operation.create("func.call", results=kinds, operands=passed, attributes={"callee": callee})
    return [each.filled(value) for value, each in zip(call.results, outputs, strict=True)]


class _Value:
    """An argument or a result: its types in the body and on the devices, and what makes one of the other.

    Attributes:
        plain: its type in the body.
        row: its type in a replica.
        stored: its type on the devices.
        divided: how that is divided.
        described: the same, as the main function declares it.
    """

    def __init__(self, kind: ir.Type, axes: Axes, layout: Layout):
        self.plain = ir.RankedTensorType(kind)
        shape, element = layout.mesh.stored(self.plain.shape, axes), self.plain.element_type
        rows, ones, first = ([layout.replicas], [1], [REPLICAS]) if layout.rows else ([], [], [])
        self._whole, self.row, self.stored = (tensor([*lead, *shape], element) for lead in ([], ones, rows))
        self.divided = tuple(map(names, [*first, *axes, *[None] * (self.plain.rank - len(axes))]))
        self.described = ir.DictAttr.get({"sdy.sharding": sharding(self.divided)})

    def cut(self, value: ir.Value) -> ir.Value:
        """The value in what is stored."""
        return cut(value if self.row == self._whole else hlo.reshape(self._whole, value), self.plain)

    def filled(self, value: ir.Value) -> ir.Value:
        """What is stored of a value."""
        whole = filled_up(value, self._whole.shape)
        return whole if self.row == self._whole else hlo.reshape(self.row, whole)
