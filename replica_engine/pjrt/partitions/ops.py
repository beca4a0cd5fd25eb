"""What the operations of a body become in a program that is divided over devices.

- `replica_engine.constrain`, a marker, says how a value is divided.
- A host call gets the whole value, and the first device of a replica calls. Where there is one replica, XLA can be told
  so. Beside other replicas the call lies in a branch that only first devices take, and they send the results to the
  others.
- Replicas exchange values between devices at the same place of each replica. XLA divides a reduction; around the other
  collectives a value is whole.
- The id of a replica is that of a device, divided by the number of devices of a replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from replica_engine.pjrt import mlir
from replica_engine.pjrt.collectives import COLLECTIVES
from replica_engine.pjrt.jaxlib import HOST_CALL_TARGETS, hlo, ir
from replica_engine.pjrt.markers import CONSTRAIN, parameters_of, target
from replica_engine.pjrt.partitions.layout import ONE, Layout
from replica_engine.pjrt.partitions.local import Devices, channel, constant, constrained, manual_computation, zeros
from replica_engine.pjrt.partitions.propagation import Divided

_GROUPS, _PAIRS = "replica_groups", "source_target_pairs"
_REDUCE = "stablehlo.all_reduce"
_WITH_IDS = (_REDUCE, "stablehlo.all_gather", "stablehlo.reduce_scatter")


def convert(module: ir.Module, layout: Layout, channels: Iterator[int]) -> None:
    """Converts the operations of a module; `channels` numbers the collectives that have one."""
    collectives = mlir.operations(module, *(f"stablehlo.{name}" for name in COLLECTIVES))
    ids = mlir.operations(module, "stablehlo.replica_id")
    for each in mlir.operations(module, "stablehlo.custom_call"):
        if target(each) == CONSTRAIN:
            axes = parameters_of(each)["axes"]
            with ir.InsertionPoint(each), each.location:
                each.results[0].replace_all_uses_with(constrained(each.operands[0], axes))
            each.erase()
            continue
        is_host_call = target(each) in HOST_CALL_TARGETS.values()
        call = _without_tuple(each)
        if is_host_call and layout.rows:
            _call_by_first(call, layout, channels)
        elif is_host_call:
            sharding = ", ".join([f"<@{ONE}, []>"] * max(1, len(call.results)))
            call.attributes["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{sharding}]>")
    if layout.rows:
        for each in collectives:
            _between_replicas(each, layout.mesh.size, channels)
            if each.name != _REDUCE:
                wrap(each, layout)
        for each in ids:
            _of_device(each, layout)


def _without_tuple(call: ir.Operation) -> ir.Operation:
    """A call whose results are one tuple, as TensorFlow writes several, as one with several, which Shardy asks for."""
    if len(call.results) != 1 or not isinstance(call.results[0].type, ir.TupleType):
        return call
    kind = call.results[0].type
    kinds = [kind.get_type(index) for index in range(kind.num_types)]
    with ir.InsertionPoint(call), call.location:
        operands, attributes = list(call.operands), mlir.attributes(call)
        flat = ir.Operation.create(call.name, results=kinds, operands=operands, attributes=attributes)
    for use in list(call.results[0].uses):
        taken = use.owner
        assert taken.name == "stablehlo.get_tuple_element", "TensorFlow takes its results out of it"
        taken.results[0].replace_all_uses_with(flat.results[ir.IntegerAttr(taken.attributes["index"]).value])
        taken.operation.erase()
    call.erase()
    return flat


def wrap(operation: ir.Operation | ir.OpView, layout: Layout) -> None:
    """Puts an operation into a manual computation over the axes of a replica, where each device has whole values."""

    def whole(types: list[ir.Type]) -> list[Divided]:
        return [((),) * ir.RankedTensorType(each).rank for each in types]

    kinds, results = [each.type for each in operation.operands], [each.type for each in operation.results]
    with ir.InsertionPoint(operation), operation.location:
        outer, block = manual_computation(
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
    devices: Any = np.concatenate([np.where(rows < 0, rows, rows * size + place) for place in range(size)])
    operation.attributes[name] = ir.DenseElementsAttr.get(devices)
    operation.attributes["channel_handle"] = channel(channels)
    if operation.name in _WITH_IDS:
        operation.attributes["use_global_device_ids"] = ir.UnitAttr.get()


def _of_device(operation: ir.Operation, layout: Layout) -> None:
    """Replaces the id of a replica."""
    with ir.InsertionPoint(operation), operation.location:
        place = hlo.partition_id()
        found = hlo.divide(place, constant(layout.mesh.size, place.type))
    operation.results[0].replace_all_uses_with(found)
    operation.erase()
    wrap(place.owner, layout)


def _call_by_first(call: ir.Operation, layout: Layout, channels: Iterator[int]) -> None:
    """Lets the first device of each replica make a call, and send its results to the other devices of the replica."""
    wrap(call, layout)
    uses = [list(each.uses) for each in call.results]
    devices, axes = Devices(layout, channels), [name for name, _ in layout.mesh.axes]

    with ir.InsertionPoint(call), call.location:
        number = hlo.partition_id()
        place = hlo.remainder(number, constant(layout.mesh.size, number.type))
        is_first = mlir.compared(place, constant(0, number.type), "EQ")
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
                    values = [zeros(ir.RankedTensorType(each.type)) for each in branch.results]
                ir.Operation.create("stablehlo.return", operands=values)
