"""Operations that XLA:CPU runs slowly, written another way, before a program is compiled.

XLA:CPU has fast code for matrix products, for most convolutions, and for chains of elementwise operations, which it
fuses. For some operations it has a plain loop, up to a hundred times slower. Each has an equal form of fast operations:

| operation | form | module |
| --- | --- | --- |
| convolution whose kernel is larger than its input | patches and a matrix product | `convolutions` |
| convolution of one pixel without strides, or to one pixel | a matrix product | `convolutions` |
| depthwise convolution, and the gradient of its kernel | a sum of shifted products | `convolutions` |
| gradient of max-pooling | comparisons of shifted slices | `other_forms` |
| batched product whose batch is then summed (the gradient of `w` in `x @ w`) | one product | `other_forms` |
| a loop that keeps a variable once a step for the gradient's loop | the variable itself | `filled_loops` |
| gradient of a softmax, on TPUs | the same, behind a barrier | `other_forms` |

The loops are rewritten for TPUs and GPUs too, which XLA compiles as TensorFlow wrote them. The rules above them are for
CPU devices only.

**Why here.** A rewrite of the StableHLO program sees forward and gradient operations alike: the gradients of a
convolution are convolutions with other dimension numbers, so no gradient has to be defined, and it does not matter
which Keras layer or TensorFlow op the operation came from. A rewrite of the TensorFlow graph would need one rule for
each op and data format; and while a body is lowered, nobody knows on which platform it will run. `Lowered.as_text`
shows the program before the rewrite.

A form has the same values, apart from the order in which numbers are added. One exception: where an infinite or NaN
element of a kernel meets padding, a form adds infinity times 0, which is NaN; XLA:CPU's own loop leaves padding out. An
operation is rewritten only if its shape fits the rule of the form, and only if what the form keeps between its
operations stays below a bound (`convolutions.MOST_BYTES`, `MOST_TIMES`). `benchmarks/cpu_rewrites.py` prints the table
that the rules were taken from.

One switch turns all of them off: `set_cpu_rewrites(False)`, or `REPLICA_ENGINE_CPU_REWRITES=0` in the environment.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from replica_engine.errors.base import warning
from replica_engine.pjrt.jaxlib import ir
from replica_engine.pjrt.rewrites import convolutions, filled_loops, other_forms
from replica_engine.pjrt.stablehlo.mlir import barrier, functions, operations

VERSION = 6
"""Part of what a compiled program depends on. Raise it when a rule or a form changes."""

_RULES: dict[str, dict[str, Callable[[Any], ir.Value | None]]] = {
    "cpu": {
        "stablehlo.convolution": convolutions.rewritten,
        "stablehlo.select_and_scatter": other_forms.pooling_rewritten,
        "stablehlo.reduce": other_forms.products_rewritten,
    },
    "tpu": {"stablehlo.multiply": other_forms.softmax_rewritten},
}
"""By platform and the name of the operation."""

_logger = logging.getLogger("replica_engine")
_chosen: list[bool] = []  # what `set_cpu_rewrites` was called with last
_failed: set[str] = set()  # kinds of operations whose rule has failed and was told of


def set_cpu_rewrites(enabled: bool) -> None:
    """Turns the rewrites of operations that XLA:CPU runs slowly on or off, for programs that are compiled from now on.

    They are on by default. Without this call, `REPLICA_ENGINE_CPU_REWRITES=0` in the environment turns them off.

    Args:
        enabled: whether to rewrite.
    """
    _chosen[:] = [bool(enabled)]


def enabled() -> bool:
    """Whether programs for CPU are rewritten."""
    return _chosen[0] if _chosen else os.environ.get("REPLICA_ENGINE_CPU_REWRITES", "1") != "0"


def rewrite(module: ir.Module, platform: str = "cpu") -> dict[str, int]:
    """Rewrites the operations of a module for a platform, in place. Returns how many of each kind were rewritten.

    An operation whose rule fails stays as it is, and is warned of once: a rewrite only saves time.
    """
    done: dict[str, int] = {}
    rules = _RULES.get(platform, {})
    with module.context:
        defined = functions(module)
        for loop in operations(module, filled_loops.WHILE):
            with _failure_told(loop):  # the rule looks at all that it changes before it changes anything
                if count := filled_loops.rewritten(loop, defined):
                    done[filled_loops.WHILE] = done.get(filled_loops.WHILE, 0) + count
        for operation in operations(module, *rules):
            name = operation.name
            new = _made(operation, rules[name])
            if new is not None:
                operation.results[0].replace_all_uses_with(new)
                operation.erase()
                done[name] = done.get(name, 0) + 1
    return done


def order_sums(module: ir.Module) -> None:
    """Makes the sums over replicas of a module ones in the order of the replicas, in place; no failure is forgiven."""
    rules: dict[str, Callable[[Any], ir.Value | None]] = {
        "stablehlo.all_reduce": other_forms.sum_in_order,
        "stablehlo.reduce_scatter": other_forms.scatter_in_order,
    }
    with module.context:
        for operation in operations(module, *rules):
            with ir.InsertionPoint(operation), operation.location:
                new = rules[operation.name](operation.opview)
            if new is not None:
                for use in operation.results[0].uses:
                    if use.owner.operation.name == "stablehlo.divide":  # a mean: XLA would multiply by the inverse
                        with ir.InsertionPoint(use.owner), operation.location:
                            use.owner.operation.operands[1] = barrier(use.owner.operation.operands[1])
                operation.results[0].replace_all_uses_with(new)
                operation.erase()


@contextlib.contextmanager
def _failure_told(operation: ir.Operation) -> Iterator[None]:
    """Inside, a rule may fail: a warning says so, once for each kind of operation."""
    try:
        yield
    except Exception as error:  # whatever the rule did not think of: the program is right without the rewrite
        if operation.name in _failed:
            return
        _failed.add(operation.name)
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        text = (
            f"An operation {operation.name} stays as it is: writing it in a form that is faster failed ({reason}). The "
            "results are right; the program may take longer. Please report this with the program. "
            "replica_engine.xla.set_cpu_rewrites(False) leaves all operations as they are."
        )
        _logger.warning(warning("not_rewritten", text))


def _made(operation: ir.Operation, rule: Callable[[Any], ir.Value | None]) -> ir.Value | None:
    """What the rule of an operation makes in front of it; None if it makes nothing."""
    around = operation.block.operations
    before = len(around)
    with _failure_told(operation):
        with ir.InsertionPoint(operation), operation.location:
            new = rule(operation.opview)
        if new is None or new.type == operation.results[0].type:
            return new
        raise TypeError(f"{new.type} instead of {operation.results[0].type}")
    # It has failed. What it has made lies right before the operation, and must go: XLA would compile it too.
    now = [each.operation for each in around]
    end = now.index(operation)
    for half_made in reversed(now[end - (len(now) - before) : end]):
        half_made.erase()
    return None
