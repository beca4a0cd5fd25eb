"""Modules of MLIR: the functions and operations in them, and what several stages build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replica_engine.pjrt.jaxlib import hlo, ir


def operations(root: Any, *names: str) -> list[Any]:
    """The operations of these names inside a module, a function or another operation."""
    found: list[Any] = []

    def collect(operation: Any) -> Any:
        if operation.name in names:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    root.operation.walk(collect)
    return found


def functions(module: Any) -> dict[str, Any]:
    """The functions of a module, by name."""
    found = (each.operation for each in module.body.operations if each.operation.name == "func.func")
    return {ir.StringAttr(each.attributes["sym_name"]).value: each for each in found}


def callee(call: Any) -> str:
    """The name of the function that an operation calls."""
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def attributes(operation: Any) -> dict[str, Any]:
    """The attributes of an operation, by name."""
    names = [each if isinstance(each, str) else each.name for each in operation.attributes]  # by the version of jaxlib
    return {name: operation.attributes[name] for name in names}


def splat(value: float, kind: Any) -> Any:
    """A constant of a type of tensors, of which each element is one number."""
    of = ir.IntegerAttr if isinstance(kind.element_type, ir.IntegerType) else ir.FloatAttr
    return hlo.constant(ir.DenseElementsAttr.get_splat(kind, of.get(kind.element_type, value)))


def compared(left: Any, right: Any, direction: str) -> Any:
    """Where a comparison is true: "EQ", "GE", "LT"; false where one of the values is NaN."""
    return hlo.compare(left, right, hlo.ComparisonDirectionAttr.get(direction))


def reduced(reduction: Any, join: Callable[[Any, Any], Any]) -> Any:
    """The result of a reduction that joins two scalars so; gives the operation its region."""
    (result,) = reduction.operation.results
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(result.type).element_type)
    block = reduction.operation.regions[0].blocks.append(scalar, scalar, arg_locs=[ir.Location.current] * 2)
    with ir.InsertionPoint(block):
        hlo.return_([join(*block.arguments)])
    return result
