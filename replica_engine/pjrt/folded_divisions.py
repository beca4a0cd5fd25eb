"""Divisions of integers that XLA must not compute while it compiles.

A division or a remainder by 0, of numbers that are all known then, ends the process in jaxlib before 0.11.2, also where
they are known only by computing with others. A barrier keeps such a divisor from being known before the program runs.
There, and when newer versions compile, XLA divides by 0 without an error, as `docs/tpu_strategy.md` says.
"""

from __future__ import annotations

from replica_engine.pjrt.jaxlib import FOLDS_DIVISIONS, ir
from replica_engine.pjrt.mlir import barrier, functions

_NAMES = ("stablehlo.divide", "stablehlo.remainder")


def keep(module: ir.Module) -> None:
    """Puts a barrier before the divisors in a module that do not depend on its arguments, in place."""
    if FOLDS_DIVISIONS:
        return
    of_arguments = set(functions(module)["main"].regions[0].blocks[0].arguments)
    found: list[ir.Operation] = []

    def collect(operation: ir.Operation) -> ir.WalkResult:
        if any(each in of_arguments for each in operation.operands):
            of_arguments.update(operation.results)
        elif operation.name in _NAMES:
            kind = ir.RankedTensorType(operation.results[0].type).element_type
            if isinstance(kind, ir.IntegerType):
                found.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(collect, ir.WalkOrder.PRE_ORDER)
        for operation in found:
            with ir.InsertionPoint(operation), operation.location:
                operation.operands[1] = barrier(operation.operands[1])
