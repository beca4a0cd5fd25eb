"""Ops as they are made, and what they wait for. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

# add_op_callback, remove_op_callback: a function that TensorFlow calls for each op that it makes on this thread.
from tensorflow.python.framework import op_callbacks as _op_callbacks

from replica_engine._tf.graphs import subgraphs


@contextlib.contextmanager
def seen(see: Mapping[str, Callable[[tf.Operation], None]]) -> Iterator[None]:
    """Calls `see[kind]` with each op of that type that is added to a graph inside, right after it is added."""

    def callback(
        op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> Any:
        if op_type in see and graph is not None:
            see[op_type](graph.get_operation_by_name(op_name))
        return outputs  # maybe those that another callback has replaced

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Changes an input of an op that nothing has used yet."""
    op._update_input(index, tensor)


def effects_wait(graph: tf.Graph, begin: int, awaited: tf.Operation) -> None:
    """Makes the ops with effects, from the `begin`-th of a graph on, wait for another op that was made before them.

    Only these: ops that just compute stay as they are, so that TensorFlow can compute constants ahead.
    """
    for op in graph.get_operations()[begin:]:
        if subgraphs.is_stateful(op) and op.type != "ReadVariableOp":
            op._add_control_input(awaited)
