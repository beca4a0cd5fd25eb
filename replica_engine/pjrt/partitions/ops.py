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

from replica_engine.pjrt.collectives import COLLECTIVES
from replica_engine.pjrt.jaxlib import HOST_CALL_TARGETS, ir
from replica_engine.pjrt.markers import CONSTRAIN, parameters_of, target
from replica_engine.pjrt.partitions.layout import MESH, ONE, Layout, dimensions, zero_of

_GROUPS, _PAIRS = "replica_groups", "source_target_pairs"
_REDUCE = "stablehlo.all_reduce"
_WITH_IDS = (_REDUCE, "stablehlo.all_gather", "stablehlo.reduce_scatter")


def convert(module: Any, layout: Layout, channels: Iterator[int]) -> None:
    """Converts the operations of a module; `channels` numbers the collectives that have one."""
    calls, constraints, collectives, ids, tuples = [], [], [], [], []

    def collect(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            name = target(operation)
            if name in HOST_CALL_TARGETS.values():
                calls.append(operation)
            elif name == CONSTRAIN:
                constraints.append(operation)
            elif _is_tuple(operation):
                tuples.append(operation)
        elif operation.name.removeprefix("stablehlo.") in COLLECTIVES:
            collectives.append(operation)
        elif operation.name == "stablehlo.replica_id":
            ids.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for each in constraints:
        _constrain(each)
    for each in tuples:
        _without_tuple(each)
    for each in map(_without_tuple, calls):
        if layout.rows:
            _call_by_first(each, layout, channels)
        else:
            each.attributes["sdy.sharding"] = _sharding([f"<@{ONE}, []>"] * max(1, len(each.results)))
    if layout.rows:
        for each in collectives:
            _between_replicas(each, layout.mesh.size, channels)
            if each.name != _REDUCE:
                wrap(each, layout)
        for each in ids:
            _of_device(each, layout)


def _is_tuple(call: Any) -> bool:
    return len(call.results) == 1 and str(call.results[0].type).startswith("tuple<")


def _without_tuple(call: Any) -> Any:
    """A call whose results are one tuple, as TensorFlow writes several, as one with several, which Shardy asks for."""
    if not _is_tuple(call):
        return call
    kind = ir.TupleType(call.results[0].type)
    kinds = [kind.get_type(index) for index in range(kind.num_types)]
    with ir.InsertionPoint(call), call.location:
        names = [each if isinstance(each, str) else each.name for each in call.attributes]  # by the version of jaxlib
        attributes = {name: call.attributes[name] for name in names}
        flat = ir.Operation.create(call.name, results=kinds, operands=list(call.operands), attributes=attributes)
    for use in list(call.results[0].uses):
        taken = use.owner
        assert taken.name == "stablehlo.get_tuple_element", "TensorFlow takes its results out of it"
        taken.results[0].replace_all_uses_with(flat.results[ir.IntegerAttr(taken.attributes["index"]).value])
        taken.operation.erase()
    call.erase()
    return flat


def _constrain(marker: Any) -> None:
    axes = [None if each is None else tuple(each) for each in parameters_of(marker)["axes"]]
    with ir.InsertionPoint(marker), marker.location:
        made = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[marker.results[0].type],
            operands=[marker.operands[0]],
            attributes={"sharding": ir.Attribute.parse(f"#sdy.sharding<@{MESH}, {dimensions(axes)}>")},
        )
    marker.results[0].replace_all_uses_with(made.results[0])
    marker.erase()


def _sharding(each: list[str]) -> Any:
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(each)}]>")


def wrap(operation: Any, layout: Layout) -> Any:
    """Puts an operation into a manual computation over the axes of a replica, where each device has whole values."""
    axes = ", ".join(f'"{name}"' for name, _ in layout.mesh.axes)

    def whole(values: Any) -> Any:
        return _sharding([f"<@{MESH}, {dimensions([None] * ir.RankedTensorType(each.type).rank)}>" for each in values])

    attributes = {
        "in_shardings": whole(operation.operands),
        "out_shardings": whole(operation.results),
        "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>"),
    }
    operands, location = list(operation.operands), operation.location
    with ir.InsertionPoint(operation), location:
        outer = ir.Operation.create(
            "sdy.manual_computation",
            results=[each.type for each in operation.results],
            operands=operands,
            attributes=attributes,
            regions=1,
        )
    for old, new in zip(operation.results, outer.results, strict=True):
        old.replace_all_uses_with(new)
    block = outer.regions[0].blocks.append(*[each.type for each in operands], arg_locs=[location] * len(operands))
    with ir.InsertionPoint(block), location:
        ir.InsertionPoint(block).insert(operation.detach_from_parent())
        for index, argument in enumerate(block.arguments):
            operation.operands[index] = argument
        ir.Operation.create("sdy.return", operands=list(operation.results))
    return outer


def _between_replicas(operation: Any, size: int, channels: Iterator[int]) -> None:
    """Makes a collective of replicas one of the devices at the same place of each."""
    name = _PAIRS if _PAIRS in operation.attributes else _GROUPS
    rows = np.array(ir.DenseIntElementsAttr(operation.attributes[name])).astype(np.int64)
    devices = np.concatenate([np.where(rows < 0, rows, rows * size + place) for place in range(size)])
    operation.attributes[name] = ir.Attribute.parse(
        f"dense<{devices.tolist()}> : tensor<{devices.shape[0]}x{devices.shape[1]}xi64>"
        if devices.size
        else f"dense<> : tensor<0x{rows.shape[-1]}xi64>"
    )
    operation.attributes["channel_handle"] = ir.Attribute.parse(
        f"#stablehlo.channel_handle<handle = {next(channels)}, type = 1>"
    )
    if operation.name in _WITH_IDS:
        operation.attributes["use_global_device_ids"] = ir.UnitAttr.get()


def _of_device(operation: Any, layout: Layout) -> None:
    """Replaces the id of a replica."""
    kind = operation.results[0].type
    with ir.InsertionPoint(operation), operation.location:
        place = ir.Operation.create("stablehlo.partition_id", results=[kind])
        count = ir.Operation.create(
            "stablehlo.constant",
            results=[kind],
            attributes={"value": ir.Attribute.parse(f"dense<{layout.mesh.size}> : {kind}")},
        )
        found = ir.Operation.create("stablehlo.divide", results=[kind], operands=[place.results[0], count.results[0]])
    operation.results[0].replace_all_uses_with(found.results[0])
    operation.erase()
    wrap(place, layout)


def within_replicas(layout: Layout, channels: Iterator[int]) -> dict[str, str]:
    """The attributes of a collective of the devices of each replica."""
    size = layout.mesh.size
    groups = np.arange(layout.replicas * size).reshape(-1, size)
    return {
        _GROUPS: f"dense<{groups.tolist()}> : tensor<{layout.replicas}x{size}xi64>",
        "channel_handle": f"#stablehlo.channel_handle<handle = {next(channels)}, type = 1>",
        "use_global_device_ids": "unit",
    }


def _call_by_first(call: Any, layout: Layout, channels: Iterator[int]) -> None:
    """Lets the first device of each replica make a call, and send its results to the other devices of the replica."""
    wrap(call, layout)
    size = layout.mesh.size
    uses = [list(each.uses) for each in call.results]
    number, truth = (ir.RankedTensorType.get([], kind) for kind in (ir.IntegerType.get_unsigned(32), _bits(1)))

    def add(name: str, kind: Any, operands: list[Any], **attributes: str) -> Any:
        parsed = {key: ir.Attribute.parse(text) for key, text in attributes.items()}
        return ir.Operation.create(f"stablehlo.{name}", results=[kind], operands=operands, attributes=parsed).result

    def zeros(kind: Any) -> Any:
        if str(kind.element_type).startswith("complex"):
            part = ir.RankedTensorType.get(kind.shape, ir.ComplexType(kind.element_type).element_type)
            return add("complex", kind, [zeros(part), zeros(part)])
        return add("constant", kind, [], value=f"dense<{zero_of(str(kind.element_type))}> : {kind}")

    with ir.InsertionPoint(call), call.location:
        count, zero = (add("constant", number, [], value=f"dense<{value}> : {number}") for value in (size, 0))
        place = add("remainder", number, [add("partition_id", number, []), count])
        is_first = add("compare", truth, [place, zero], comparison_direction="#stablehlo<comparison_direction EQ>")
        branch = ir.Operation.create(
            "stablehlo.if", results=[each.type for each in call.results], operands=[is_first], regions=2
        )
        for result, places in zip(branch.results, uses, strict=True):
            kind = ir.RankedTensorType(result.type)
            row, rows = (ir.RankedTensorType.get([count, *kind.shape], kind.element_type) for count in (1, size))
            gathered = add(
                "all_gather",
                rows,
                [add("reshape", row, [result])],
                all_gather_dim="0 : i64",
                **within_replicas(layout, channels),
            )
            ends = [1, *kind.shape]
            first = add(
                "slice",
                row,
                [gathered],
                start_indices=f"array<i64: {', '.join('0' for _ in ends)}>",
                limit_indices=f"array<i64: {', '.join(map(str, ends))}>",
                strides=f"array<i64: {', '.join('1' for _ in ends)}>",
            )
            taken = add("reshape", kind, [first])
            for use in places:
                use.owner.operands[use.operand_number] = taken
    with call.location:
        for region, is_taken in zip(branch.regions, (True, False), strict=True):
            block = region.blocks.append()
            with ir.InsertionPoint(block):
                if is_taken:
                    ir.InsertionPoint(block).insert(call.detach_from_parent())
                    values = list(call.results)
                else:
                    values = [zeros(ir.RankedTensorType(each.type)) for each in branch.results]
                ir.Operation.create("stablehlo.return", operands=values)


def _bits(count: int) -> Any:
    return ir.IntegerType.get_signless(count)
