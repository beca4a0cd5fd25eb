"""The gradient of max-pooling, with slices instead of a loop over windows.

XLA's operation looks for the first largest element of each window and adds the window's gradient there. Here the
windows are compared all at once: slice k of the input has element k of each window. Where the largest was found in
slice k, the gradients go back to the places that slice k came from. Gradients that meet in one element (windows that
overlap) are added in another order. Elements of the padding are never chosen. In a window with a NaN another element
may be chosen than XLA chooses; what is pooled is NaN in both.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from replica_engine.pjrt.cpu_rewrites import ops
from replica_engine.pjrt.cpu_rewrites.ops import Value
from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.mlir import compared

MOST_SLICES = 49
"""The most elements of a window."""

MOST_OVERLAP = 3.0
"""In how many windows an element may be. In more, adding up their gradients takes longer than XLA's loop."""


def rewritten(operation: hlo.SelectAndScatterOp) -> Value | None:
    """The result of a `select_and_scatter`; None if it is not the gradient of max-pooling, or the windows are large."""
    operand, source = operation.operand, operation.source
    if not ops.is_static_float(operand, source) or not _is_max_gradient(operation):
        return None
    sizes = ops.shape(operand)
    rank = len(sizes)
    ones = [1] * rank
    window, strides = (ops.numbers(each, ones) for each in (operation.window_dimensions, operation.window_strides))
    low, high = ops.padding(operation, rank)
    overlap = math.prod(window) / math.prod(strides)
    if math.prod(window) > MOST_SLICES or overlap > MOST_OVERLAP or min(*low, *high) < 0:
        return None
    results = ops.shape(source)
    padded = ops.pad(operand, low, high, with_=-math.inf)
    offsets = list(itertools.product(*map(range, window)))
    best = ops.cut(padded, offsets[0], results, strides)
    # At first the first element outside the padding. The padding is minus infinity, and nothing is less than that.
    chosen = _spread(np.argmax(_inside(sizes, low, high, offsets, results, strides), 0), results)
    for number, offset in enumerate(offsets[1:], start=1):
        value = ops.cut(padded, offset, results, strides)
        is_larger = compared(best, value, "LT")
        best = hlo.select(is_larger, value, best)
        chosen = hlo.select(is_larger, _spread(np.full([1] * rank, number), results), chosen)
    return ops.cut(_scattered(source, chosen, offsets, ops.shape(padded), strides), low, sizes, ones)


def _scattered(
    source: Value, chosen: Value, offsets: list[tuple[int, ...]], sizes: list[int], strides: list[int]
) -> Value:
    """The gradients at the places in the padded input that they were chosen from."""
    results, summed = ops.shape(source), None
    nothing = ops.broadcast(ops.scalar(0.0, ops.element_type(source)), results, [])
    for number, offset in enumerate(offsets):
        here = compared(chosen, _spread(np.full([1] * len(results), number), results), "EQ")
        part = hlo.select(here, source, nothing)
        reach = [at + (count - 1) * stride + 1 for at, count, stride in zip(offset, results, strides, strict=True)]
        after = [size - end for size, end in zip(sizes, reach, strict=True)]
        spread = ops.pad(part, offset, after, [stride - 1 for stride in strides])
        summed = spread if summed is None else hlo.add(summed, spread)
    assert summed is not None, "a window has elements"
    return summed


def _inside(
    sizes: list[int],
    low: list[int],
    high: list[int],
    offsets: list[tuple[int, ...]],
    results: list[int],
    strides: list[int],
) -> np.ndarray:
    """For each slice, which of its elements lie outside the padding; dimensions without padding have size 1."""
    table = np.ones((len(offsets), *([1] * len(sizes))), bool)
    for dimension, size in enumerate(sizes):
        if low[dimension] or high[dimension]:
            at = np.add.outer(
                [offset[dimension] for offset in offsets], np.arange(results[dimension]) * strides[dimension]
            )
            at -= low[dimension]
            along = [1] * len(sizes)
            along[dimension] = results[dimension]
            table = table & ((at >= 0) & (at < size)).reshape(len(offsets), *along)
    return table


def _spread(table: np.ndarray, results: list[int]) -> Value:
    """Whole numbers as a constant of the shape of the results."""
    numbers: Any = np.ascontiguousarray(table, np.int32)
    constant = hlo.constant(ir.DenseElementsAttr.get(numbers))
    return ops.broadcast(constant, results, list(range(len(results))))


def _is_max_gradient(operation: hlo.SelectAndScatterOp) -> bool:
    """Whether it selects with >= and scatters with + onto zeros."""
    select, scatter = ([*region.blocks[0].operations] for region in operation.regions)
    if len(select) != 2 or len(scatter) != 2 or scatter[0].operation.name != "stablehlo.add":
        return False
    first = select[0].operation
    return (
        first.name == "stablehlo.compare"
        and hlo.ComparisonDirectionAttr(first.attributes["comparison_direction"]).value == "GE"
        and list(first.operands) == list(operation.regions[0].blocks[0].arguments)
        and ops.is_zero(operation.init_value)
    )
