"""Modules of MLIR: the functions and operations in them, and what several stages build."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replica_engine.pjrt.jaxlib import hlo, ir


def operations(root: ir.Module | ir.Operation, *names: str) -> list[ir.Operation]:
    """The operations of these names inside a module, a function or another operation."""
    found: list[ir.Operation] = []

    def collect(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in names:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    root.operation.walk(collect)
    return found


def functions(module: ir.Module) -> dict[str, ir.Operation]:
    """The functions of a module, by name."""
    found = (each.operation for each in module.body.operations if each.operation.name == "func.func")
    return {ir.StringAttr(each.attributes["sym_name"]).value: each for each in found}


def made_by(value: ir.Value, *names: str) -> ir.Operation | None:
    """The operation of one of these names that makes a value; None if another one does, or if it is an argument."""
    operation = None if isinstance(value.owner, ir.Block) else value.owner.operation
    return operation if operation is not None and operation.name in names else None


def callee(call: ir.Operation) -> str:
    """The name of the function that an operation calls."""
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def attributes(operation: ir.Operation) -> dict[str, ir.Attribute]:
    """The attributes of an operation, by name."""
    names = [each if isinstance(each, str) else each.name for each in operation.attributes]  # by the version of jaxlib
    return {name: operation.attributes[name] for name in names}


def splat(value: float, kind: ir.RankedTensorType) -> ir.Value:
    """A constant of a type of tensors, of which each element is one number."""
    of = ir.IntegerAttr if isinstance(kind.element_type, ir.IntegerType) else ir.FloatAttr
    return hlo.constant(ir.DenseElementsAttr.get_splat(kind, of.get(kind.element_type, value)))


def barrier(value: ir.Value) -> ir.Value:
    """A value behind which XLA does not look."""
    return hlo.OptimizationBarrierOp([value]).results[0]


def compared(left: ir.Value, right: ir.Value, direction: str) -> ir.Value:
    """Where a comparison is true: "EQ", "GE", "LT"; false where one of the values is NaN."""
    return hlo.compare(left, right, hlo.ComparisonDirectionAttr.get(direction))


def reduced_over(
    value: ir.Value, dimensions: Sequence[int], start: float, join: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """A value reduced over some of its dimensions, from a number that changes no result."""
    kind = ir.RankedTensorType(value.type)
    left = [size for index, size in enumerate(kind.shape) if index not in dimensions]
    result = ir.RankedTensorType.get(left, kind.element_type)
    first = splat(start, ir.RankedTensorType.get([], kind.element_type))
    return reduced(hlo.ReduceOp([result], [value], [first], list(dimensions)), join)


def reduced(reduction: ir.Operation | ir.OpView, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """The result of a reduction that joins two scalars so; gives the operation its region."""
    (result,) = reduction.operation.results
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(result.type).element_type)
    block = reduction.operation.regions[0].blocks.append(scalar, scalar, arg_locs=[ir.Location.current] * 2)
    with ir.InsertionPoint(block):
        hlo.return_([join(*block.arguments)])
    return result
