"""Ops as they are made: a look at each op that is added to a graph. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# add_op_callback, remove_op_callback: a function that TensorFlow calls for each op that it makes on this thread.
from tensorflow.python.framework import op_callbacks as _op_callbacks


@contextlib.contextmanager
def seen(kind: str, see: Callable[[tf.Operation], None]) -> Iterator[None]:
    """Calls `see` with each op of a type that is added to a graph inside, right after it is added."""

    def callback(
        op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> Any:
        if op_type == kind and graph is not None:
            see(graph.get_operation_by_name(op_name))
        return outputs  # maybe those that another callback has replaced

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)
