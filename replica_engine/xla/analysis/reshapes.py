"""Reshapes of a fixed number of values to a size that depends on data: XLA compiles them, and computes wrong values.

`tf.reshape(x, [count, -1])`, where count is the size of `tf.where(mask)`: for XLA that size is the largest that it may
become, together with the true one. A reshape to it gets rows for the largest. The values then lie in other rows
than in TensorFlow, and TensorFlow's own `jit_compile=True` returns them so without an error.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import subgraphs

_OF_DATA = frozenset({"Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
"""The ops whose results XLA gives a size that depends on data."""


def shaped_by_data(graph: Any) -> tf.Operation | None:
    """The first such reshape of a body, or of a function that it runs."""
    pending, seen = [graph], {id(graph)}
    while pending:
        for op in pending.pop().get_operations():
            if op.type == "Reshape" and op.inputs[0].shape.is_fully_defined() and _depends_on_sizes(op.inputs[1].op):
                return op
            for inner in subgraphs.functions_of(op):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    pending.append(inner)
    return None


def _depends_on_sizes(op: tf.Operation) -> bool:
    """Whether an op depends on the size of a result of one of the ops above."""
    pending: list[tuple[tf.Operation, bool]] = [(op, False)]
    seen = set(pending)
    while pending:
        each, is_size = pending.pop()
        is_size = is_size or each.type in ("Shape", "Size", "ShapeN")
        if is_size and each.type in _OF_DATA:
            return True
        found = {(one.op, is_size) for one in each.inputs} - seen
        seen |= found
        pending += found
    return False
