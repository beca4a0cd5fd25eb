"""A program divided over devices: its main function, and what becomes of the operations of the body."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from replica_engine.pjrt.jaxlib import HOST_CALL_TARGETS, hlo, ir
from replica_engine.pjrt.stablehlo import mlir, partition_faults, partition_local
from replica_engine.pjrt.stablehlo.markers import COLLECTIVES, CONSTRAIN, LAYOUT, read_parameters, target
from replica_engine.pjrt.stablehlo.partition_local import Axes, Devices, Divided, Layout, ReplicaMesh

_GROUPS, _PAIRS = "replica_groups", "source_target_pairs"
_REDUCE = "stablehlo.all_reduce"
_WITH_IDS = (_REDUCE, "stablehlo.all_gather", "stablehlo.reduce_scatter")


def convert(module: ir.Module, layout: Layout, channels: Iterator[int]) -> None:
    """Converts the operations of a body, a module; `channels` numbers the collectives that have one.

    - `replica_engine.constrain`, a marker, says how a value is divided.
    - A host call gets the whole value, and the first device of a replica calls. Where there is one replica, XLA can be
      told so. Beside other replicas the call lies in a branch that only first devices take, and they send the results
      to the others.
    - Replicas exchange values between devices at the same place of each replica. XLA divides a reduction; around the
      other collectives a value is whole.
    - The id of a replica is that of a device, divided by the number of devices of a replica.
    """
    # Before anything is changed: the new operations are collectives too.
    collectives = mlir.operations(module, *(f"stablehlo.{name}" for name in COLLECTIVES))
    ids = mlir.operations(module, "stablehlo.replica_id")
    for each in mlir.operations(module, "stablehlo.custom_call"):
        if target(each) == CONSTRAIN:
            axes = read_parameters(each)["axes"]
            with ir.InsertionPoint(each), each.location:
                each.results[0].replace_all_uses_with(partition_local.constrained(each.operands[0], axes))
            each.erase()
            continue
        is_host_call = target(each) in HOST_CALL_TARGETS.values()
        call = _without_tuple(each)
        if is_host_call and layout.rows:
            _call_by_first(call, layout, channels)
        elif is_host_call:
            each_whole = ", ".join([f"<@{partition_local.ONE}, []>"] * max(1, len(call.results)))
            call.attributes["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{each_whole}]>")
    if layout.rows:
        for each in collectives:
            _between_replicas(each, layout.mesh.size, channels)
            if each.name != _REDUCE:
                wrap(each, layout)
        for each in ids:
            _replace_replica_id(each, layout)


def _without_tuple(call: ir.Operation) -> ir.Operation:
    """A call whose results are one tuple, as TensorFlow writes several, as one with several, which Shardy asks for."""
    if len(call.results) != 1 or not isinstance(call.results[0].type, ir.TupleType):
        return call
    with ir.InsertionPoint(call), call.location:
        operands, attributes = list(call.operands), mlir.attributes(call)
        flat = ir.Operation.create(call.name, mlir.result_types(call), operands, attributes=attributes)
    mlir.replace_call(call, flat.results)
    return flat


def wrap(operation: ir.Operation | ir.OpView, layout: Layout) -> None:
    """Puts an operation into a manual computation over the axes of a replica, where each device has whole values."""

    def whole(types: list[ir.Type]) -> list[Divided]:
        return [((),) * ir.RankedTensorType(each).rank for each in types]

    kinds, results = [each.type for each in operation.operands], [each.type for each in operation.results]
    with ir.InsertionPoint(operation), operation.location:
        outer, block = partition_local.manual_computation(
            dict(layout.mesh.axes), operation.operands, whole(kinds), kinds, results, whole(results)
        )
    for old, new in zip(operation.results, outer.results, strict=True):
        old.replace_all_uses_with(new)
    with ir.InsertionPoint(block), operation.location:
        ir.InsertionPoint(block).insert(operation.detach_from_parent())
        for index, argument in enumerate(block.arguments):
            operation.operands[index] = argument
        ir.Operation.create("sdy.return", operands=list(operation.results))


def _between_replicas(operation: ir.Operation, size: int, channels: Iterator[int]) -> None:
    """Makes a collective of replicas one of the devices at the same place of each."""
    name = _PAIRS if _PAIRS in operation.attributes else _GROUPS
    rows = np.array(ir.DenseIntElementsAttr(operation.attributes[name])).astype(np.int64)
    # -1 fills up groups of unequal sizes.
    devices: Any = np.concatenate([np.where(rows < 0, rows, rows * size + place) for place in range(size)])
    operation.attributes[name] = ir.DenseElementsAttr.get(devices)
    operation.attributes["channel_handle"] = partition_local.channel(channels)
    if operation.name in _WITH_IDS:
        operation.attributes["use_global_device_ids"] = ir.UnitAttr.get()


def _replace_replica_id(operation: ir.Operation, layout: Layout) -> None:
    """Replaces the id of a replica."""
    with ir.InsertionPoint(operation), operation.location:
        place = hlo.partition_id()
        found = hlo.divide(place, partition_local.constant(layout.mesh.size, place.type))
    operation.results[0].replace_all_uses_with(found)
    operation.erase()
    wrap(place.owner, layout)


def _call_by_first(call: ir.Operation, layout: Layout, channels: Iterator[int]) -> None:
    """Lets the first device of each replica make a call, and send its results to the other devices of the replica."""
    wrap(call, layout)
    # Those of now: the exchange below uses the results too.
    uses = [list(each.uses) for each in call.results]
    devices, axes = Devices(layout, channels), [name for name, _ in layout.mesh.axes]

    with ir.InsertionPoint(call), call.location:
        number = hlo.partition_id()
        place = hlo.remainder(number, partition_local.constant(layout.mesh.size, number.type))
        is_first = mlir.compared(place, partition_local.constant(0, number.type), "EQ")
        branch = ir.Operation.create(
            "stablehlo.if", results=[each.type for each in call.results], operands=[is_first], regions=2
        )
        for result, places in zip(branch.results, uses, strict=True):
            kind = ir.RankedTensorType(result.type)
            ends = [1, *kind.shape]
            first = hlo.slice(devices.gathered(result, axes), [0] * len(ends), ends, [1] * len(ends))
            taken = hlo.reshape(kind, first)
            for use in places:
                use.owner.operands[use.operand_number] = taken
    with call.location:
        for region, is_taken in zip(branch.regions, (True, False), strict=True):
            block = region.blocks.append()
            with ir.InsertionPoint(block):
                if is_taken:
                    ir.InsertionPoint(block).insert(call.detach_from_parent())
                    values: list[ir.Value] = list(call.results)
                else:
                    # Nobody takes these: of what all devices bring, only the row of the first counts.
                    values = [partition_local.zeros(ir.RankedTensorType(each.type)) for each in branch.results]
                ir.Operation.create("stablehlo.return", operands=values)


# The main function of a divided program, around the body.
_BODY = "replica_body"


def with_layout(text: str, layout: Layout) -> str:
    """The text of a module with its layout, which `partition` reads."""
    head, brace, rest = text.partition("{")
    assert "attributes" in head, "a lowered module has a name and attributes"
    comma = "" if rest.lstrip().startswith("}") else ", "
    # Dumped twice: a text of JSON, and that as a string of MLIR.
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
        convert(module, layout, channels)
        _write_main(module, layout)
        partition_faults.avoid(module, layout, channels)


def _write_main(module: ir.Module, layout: Layout) -> None:
    """Puts a main function into the module that takes and returns values as they lie on the devices.

    It calls the body, beside other replicas in a manual computation over the axis of the replicas.
    """
    body = mlir.functions(module)["main"]
    kind = ir.FunctionType(ir.TypeAttr(body.attributes["function_type"]).value)
    inputs = [_Value(each, axes, layout) for each, axes in zip(kind.inputs, layout.arguments, strict=True)]
    outputs = [_Value(each, axes, layout) for each, axes in zip(kind.results, layout.results, strict=True)]
    body.attributes["sym_name"] = ir.StringAttr.get(_BODY)
    body.attributes["sym_visibility"] = ir.StringAttr.get("private")
    for name in ("arg_attrs", "res_attrs"):
        if name in body.attributes:
            del body.attributes[name]
    sizes = [(partition_local.REPLICAS, layout.replicas)] if layout.rows else []
    axes = ", ".join(f'"{name}"={size}' for name, size in [*sizes, *layout.mesh.axes])
    # The second mesh is for host calls, which one device makes.
    meshes = ir.Module.parse(
        f"sdy.mesh @{partition_local.MESH} = <[{axes}]>\nsdy.mesh @{partition_local.ONE} = <[], device_ids=[0]>"
    )
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
            made, inside = partition_local.manual_computation(
                [partition_local.REPLICAS], block.arguments, given, rows, stored.results, returned
            )
            with ir.InsertionPoint(inside):
                ir.Operation.create("sdy.return", operands=_called(inside.arguments, inputs, outputs))
            results: list[ir.Value] = list(made.results)
        else:
            results = _called(block.arguments, inputs, outputs)
        ir.Operation.create("func.return", operands=results)


def _called(given: Sequence[ir.Value], inputs: list[_Value], outputs: list[_Value]) -> list[ir.Value]:
    """Calls the body with stored arguments, and returns its results as they are stored."""
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
        rows, ones, first = ([layout.replicas], [1], [partition_local.REPLICAS]) if layout.rows else ([], [], [])
        self._whole, self.row, self.stored = (
            partition_local.tensor([*lead, *shape], element) for lead in ([], ones, rows)
        )
        self.divided = tuple(map(partition_local.names, [*first, *axes, *[None] * (self.plain.rank - len(axes))]))
        self.described = ir.DictAttr.get({"sdy.sharding": partition_local.sharding(self.divided)})

    def cut(self, value: ir.Value) -> ir.Value:
        """The value in the body, from the stored one."""
        return partition_local.cut(value if self.row == self._whole else hlo.reshape(self._whole, value), self.plain)

    def filled(self, value: ir.Value) -> ir.Value:
        """The stored value, from the one in the body."""
        whole = partition_local.filled_up(value, self._whole.shape)
        return whole if self.row == self._whole else hlo.reshape(self.row, whole)
