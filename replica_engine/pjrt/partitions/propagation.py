"""How XLA will divide the values inside a program: what Shardy makes of the layouts of arguments and constraints.

Shardy is asked before the compiler asks it, about a copy of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from replica_engine.pjrt import mlir
from replica_engine.pjrt.jaxlib import DYNAMIC, ir, passmanager, sdy

_PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_NUMBER = "replica_engine.number"
_SHARDING = "sdy.sharding"

Divided = tuple[tuple[str, ...], ...]
"""For each dimension of a value the axes that divide it. A part of an axis is "name:(before)size"."""


class Propagated(NamedTuple):
    """How the operands and the results of an operation are divided."""

    operands: tuple[Divided, ...]
    results: tuple[Divided, ...]


def propagated(module: ir.Module, operations: Sequence[ir.Operation]) -> list[Propagated]:
    """How some operations of a module without calls will be divided."""
    number = ir.IntegerType.get_signless(64)
    for index, each in enumerate(operations):
        each.attributes[_NUMBER] = ir.IntegerAttr.get(number, index)
    copy = module.operation.clone()
    for each in operations:
        del each.attributes[_NUMBER]
    try:
        passmanager.PassManager.parse(_PIPELINE).run(copy.operation)
    except ir.MLIRError as error:
        if DYNAMIC not in str(error):
            raise
        return [Propagated((), ()) for _ in operations]  # the compiler will refuse it too
    found = [Propagated((), ()) for _ in operations]
    for each in mlir.operations(copy, *{each.name for each in operations}):
        if _NUMBER in each.attributes:
            index = ir.IntegerAttr(each.attributes[_NUMBER]).value
            found[index] = Propagated(tuple(map(_of, each.operands)), tuple(map(_of, each.results)))
    return found


def inline_calls(module: ir.Module) -> None:
    """Puts what the functions of a module do in place of their calls, so that Shardy sees who has which value.

    XLA does so itself, before it asks Shardy.
    """
    functions = mlir.functions(module)
    main = functions.pop("main")
    while calls := mlir.operations(main, "func.call"):
        for call in calls:
            copy = functions[mlir.callee(call)].clone()
            (block,) = copy.regions[0].blocks
            for argument, value in zip(block.arguments, call.operands, strict=True):
                argument.replace_all_uses_with(value)
            *operations, end = block.operations
            place = ir.InsertionPoint(call)
            for each in operations:
                place.insert(each.detach_from_parent())
            for result, value in zip(call.results, end.operands, strict=True):
                result.replace_all_uses_with(value)
            call.erase()
            copy.erase()
    for function in functions.values():
        function.erase()


def drop_reshapes(module: ir.Module) -> None:
    """Drops reshapes into the same shape: XLA does so before it asks Shardy, whom one along a length of 1 stops."""
    for each in mlir.operations(module, "stablehlo.reshape"):
        if each.operands[0].type == each.results[0].type:
            each.results[0].replace_all_uses_with(each.operands[0])
            each.erase()


def _of(value: ir.Value) -> Divided:
    rank = ir.RankedTensorType(value.type).rank
    is_result = isinstance(value.owner, (ir.Operation, ir.OpView))
    found = _of_result(ir.OpResult(value)) if is_result else _of_argument(ir.BlockArgument(value))
    if found is None:
        return ((),) * rank
    entries = sdy.TensorShardingAttr(found).dimension_shardings
    return tuple(tuple(map(_name, sdy.DimensionShardingAttr(each).axes)) for each in entries)


def _of_result(result: ir.OpResult) -> ir.Attribute | None:
    owner, index = result.owner, result.result_number
    if owner.name == "sdy.manual_computation":
        return _nth(owner.attributes["out_shardings"], index)
    if "sharding" in owner.attributes:  # a constraint or another layout from here on
        return owner.attributes["sharding"]
    return _nth(owner.attributes[_SHARDING], index) if _SHARDING in owner.attributes else None


def _of_argument(argument: ir.BlockArgument) -> ir.Attribute | None:
    owner, index = argument.owner.owner.operation, argument.arg_number  # a view of a function has its own name
    if owner.name == "func.func":
        if "arg_attrs" not in owner.attributes:
            return None
        given = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[index])
        return given[_SHARDING] if _SHARDING in given else None  # noqa: SIM401 (it has no `get`)
    if owner.name == "stablehlo.while" and _SHARDING in owner.attributes:
        return _nth(owner.attributes[_SHARDING], index)
    if owner.name == "sdy.manual_computation":
        return _without_manual(owner, _nth(owner.attributes["in_shardings"], index))
    return None


def _without_manual(owner: ir.Operation, sharding: ir.Attribute) -> ir.Attribute:
    manual: Any = sdy.ManualAxesAttr(owner.attributes["manual_axes"])  # a sequence of names
    whole = sdy.TensorShardingAttr(sharding)
    entries = []
    for each in whole.dimension_shardings:
        axes = map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(each).axes)
        left = [axis for axis in axes if axis.name not in list(manual)]
        entries.append(sdy.DimensionShardingAttr.get(left, is_closed=True))
    return sdy.TensorShardingAttr.get(whole.mesh_or_ref, entries)


def _nth(shardings: ir.Attribute, index: int) -> ir.Attribute:
    return sdy.TensorShardingPerValueAttr(shardings).shardings[index]


def _name(axis: ir.Attribute) -> str:
    reference = sdy.AxisRefAttr(axis)
    if reference.sub_axis_info is None:
        return str(reference.name)
    part = sdy.SubAxisInfoAttr(reference.sub_axis_info)
    return f"{reference.name}:({part.pre_size}){part.size}"
