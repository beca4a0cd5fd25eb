"""Ops in which a graph may stand still: those that wait for something outside, and those that call Python.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

# script_ops: calls Python functions of graphs, each by its token.
from tensorflow.python.ops import script_ops as _script_ops

from replica_engine._tf.graphs import subgraphs

PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""The types of ops that call Python. TensorFlow cannot end them."""

_WAITS = (
    *PYTHON,
    *("QueueDequeueV2", "QueueDequeueManyV2", "QueueDequeueUpToV2", "QueueEnqueueV2", "QueueEnqueueManyV2"),
    *("IteratorGetNext", "OptionalGetValue", "MultiDeviceIteratorGetNextFromShard", "IteratorGetNextAsOptional"),
    *("BarrierTakeMany", "Stage", "Unstage", "MapStage", "MapUnstage", "OrderedMapUnstage", "ReadFile"),
    *("CollectiveReduceV2", "CollectiveGatherV2", "CollectiveReduceV3", "NcclAllReduce"),
)
"""The types of ops that may wait for something outside of the graph."""

_HEAVY = ("MatMul", "Conv", "Einsum", "FFT", "Pool", "Sort", "TopK", "Unique", "Svd", "Qr", "Cholesky", "Solve", "Eig")
"""What the types of ops contain that compute more than each element once."""

_CALLER = _script_ops.FuncRegistry.__call__.__code__


def may_take_long(op: tf.Operation) -> bool:
    """Whether an op may wait for something outside, calls Python or other functions, or has much to compute."""
    return op.type in _WAITS or subgraphs.runs_functions(op) or any(each in op.type for each in _HEAVY)


def can_be_ended(op: tf.Operation) -> bool:
    """Whether TensorFlow's cancellation has something to end: an op that may wait, or that runs functions that may.

    An iterator is left alone: once a wait for its next element was cancelled, it looks as if it had come to its end.
    """
    if op.type in PYTHON or "Iterator" in op.type:
        return False
    return op.type in _WAITS or subgraphs.runs_functions(op)


def python_ops(graph: Any) -> dict[str, tf.Operation]:
    """The ops that call Python in a graph and in the functions that it runs, by their tokens."""
    return {op.get_attr("token").decode(): op for op in subgraphs.everywhere(graph) if op.type in PYTHON}


def calls_python(graph: Any) -> bool:
    """Whether a graph, or a function that it runs, calls Python."""
    for op in graph.get_operations():
        if op.type in PYTHON or (subgraphs.runs_functions(op) and not _only_tensorflow(op)):
            return True
    return False


def draws(graph: Any) -> bool:
    """Whether a graph, or a function that it runs, takes elements from an iterator, whose dataset may call Python."""
    return any("Iterator" in op.type for op in subgraphs.everywhere(graph))


def threads_in(tokens: Iterable[str]) -> dict[str, list[int]]:
    """The threads that run Python functions of graphs now: their idents, by the token of the function."""
    wanted, found = set(tokens), dict[str, list[int]]()
    for ident, innermost in sys._current_frames().items():
        for frame, _ in traceback.walk_stack(innermost):
            token = frame.f_locals.get("token") if frame.f_code is _CALLER else None
            if token in wanted:
                found.setdefault(token, []).append(ident)
    del innermost, frame  # perhaps that of this call: it would hold itself, and all that calls of this thread have
    return found


def before(op: tf.Operation, passed: Iterable[tf.Operation]) -> list[tf.Operation]:
    """The ops that may wait and that must be done before `op`, but not before the ops that are `passed`.

    Of a branch, a loop or a function that is called they are the ops inside, whose lines say more than its own.
    """
    behind = {*subgraphs.reached(passed, _needed)}
    new = subgraphs.reached([op], lambda op: [each for each in _needed(op) if each not in behind])
    return [inner for each in new if each not in behind for inner in (each, *_inside(each)) if inner.type in _WAITS]


def _needed(op: tf.Operation) -> list[tf.Operation]:
    return [*(each.op for each in op.inputs), *op.control_inputs]


def _inside(op: tf.Operation) -> Iterator[tf.Operation]:
    return subgraphs.everywhere(*subgraphs.functions_of(op))


def _only_tensorflow(op: tf.Operation) -> bool:
    try:
        return subgraphs.op_types_of_calls(op).isdisjoint(PYTHON)
    except (tf.errors.NotFoundError, ValueError):
        return False  # a function that the context does not know: it may call anything
