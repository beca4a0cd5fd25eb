"""Collective operations that TensorFlow has no lowering for.

TensorFlow lowers sums and their like. For the others the replica body holds a marker, a custom call with the
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
        )
    for old, new in zip(marker.results, operation.results, strict=True):
        old.replace_all_uses_with(new)
    marker.erase()


def _table(rows: list[list[int]]) -> str:
    return f"dense<{json.dumps(rows)}> : tensor<{len(rows)}x{len(rows[0]) if rows else 0}xi64>"


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
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "collective_permute": _collective_permute,
}
