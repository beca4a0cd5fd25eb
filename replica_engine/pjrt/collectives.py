"""Collective operations that TensorFlow has no lowering for.

TensorFlow lowers reductions of a few dtypes. For the rest the replica body holds a marker, a custom call with the
name below and its parameters as JSON, and here the program's text is rewritten: each marker becomes the
StableHLO operation of that name.
"""

from __future__ import annotations

import json
from typing import Any

from replica_engine.pjrt.jaxlib import ir, make_ir_context

PREFIX = "replica_engine."


def expand_markers(program: str) -> str:
    """The program with each marker replaced by the operation it stands for."""
    if f"@{PREFIX}" not in program:
        return program
    with make_ir_context():
        module = ir.Module.parse(program)
        markers: list[Any] = []

        def collect(operation: Any) -> Any:
            if operation.name == "stablehlo.custom_call" and _target(operation).startswith(PREFIX):
                markers.append(operation)
            return ir.WalkResult.ADVANCE

        module.operation.walk(collect)
        for marker in markers:
            _replace(marker)
        return str(module)


def _target(operation: Any) -> str:
    return ir.StringAttr(operation.attributes["call_target_name"]).value


def _replace(marker: Any) -> None:
    name = _target(marker).removeprefix(PREFIX)
    parameters = json.loads(ir.StringAttr(marker.attributes["backend_config"]).value)
    attributes = {key: ir.Attribute.parse(text) for key, text in _ATTRIBUTES[name](parameters).items()}
    with ir.InsertionPoint(marker), marker.location:
        operation = ir.Operation.create(
            f"stablehlo.{name}",
            results=[result.type for result in marker.results],
            operands=list(marker.operands),
            attributes=attributes,
            regions=1 if "op" in parameters else 0,
        )
        if "op" in parameters:
            _fill_reduction(operation.regions[0], parameters["op"], ir.RankedTensorType(marker.results[0].type))
    for old, new in zip(marker.results, operation.results, strict=True):
        old.replace_all_uses_with(new)
    marker.erase()


def _fill_reduction(region: Any, op: str, of: Any) -> None:
    """Puts the reduction of two scalars into the region of an operation."""
    scalar = ir.RankedTensorType.get([], of.element_type)
    location = ir.Location.unknown()
    block = region.blocks.append(scalar, scalar, arg_locs=[location, location])
    with ir.InsertionPoint(block), location:
        name = {"Add": "add", "Min": "minimum", "Max": "maximum"}[op]
        value = ir.Operation.create(f"stablehlo.{name}", results=[scalar], operands=list(block.arguments))
        ir.Operation.create("stablehlo.return", operands=[value.results[0]])


def _table(rows: list[list[int]]) -> str:
    return f"dense<{json.dumps(rows)}> : tensor<{len(rows)}x{len(rows[0]) if rows else 0}xi64>"


def _all_reduce(parameters: dict[str, Any]) -> dict[str, str]:
    return {"replica_groups": _table(_rectangular(parameters["groups"]))}


def _reduce_scatter(parameters: dict[str, Any]) -> dict[str, str]:
    return {"scatter_dimension": f"{parameters['axis']} : i64", "replica_groups": _table(parameters["groups"])}


def _rectangular(groups: list[list[int]]) -> list[list[int]]:
    """Groups of different sizes, filled up with -1."""
    longest = max(map(len, groups))
    return [group + [-1] * (longest - len(group)) for group in groups]


def _all_gather(parameters: dict[str, Any]) -> dict[str, str]:
    return {"all_gather_dim": f"{parameters['axis']} : i64", "replica_groups": _table(parameters["groups"])}


def _all_to_all(parameters: dict[str, Any]) -> dict[str, str]:
    return {
        "split_dimension": f"{parameters['split_axis']} : i64",
        "concat_dimension": f"{parameters['concat_axis']} : i64",
        "split_count": f"{len(parameters['groups'][0])} : i64",
        "replica_groups": _table(parameters["groups"]),
    }


def _collective_permute(parameters: dict[str, Any]) -> dict[str, str]:
    pairs = parameters["pairs"]
    return {"source_target_pairs": _table(pairs) if pairs else "dense<> : tensor<0x2xi64>"}


_ATTRIBUTES = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "collective_permute": _collective_permute,
}
