"""Ops that call a Python function of this library. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# FuncGraph: the graph of a function; it may be garbage collected, unlike the graph around all functions.
from tensorflow.python.framework.func_graph import FuncGraph as _FuncGraph

from replica_engine._tf.graphs.kept import keep


def python_op(fn: Callable[..., Any], inputs: Sequence[Any], dtypes: Any) -> Any:
    """Like `tf.numpy_function`, with a function that lives as long as the graph of the op.

    TensorFlow keeps it as long as the outermost graph: under eager mode, for the life of the process.
    """
    results = tf.numpy_function(fn, inputs, dtypes, stateful=True)
    own = outer = tf.compat.v1.get_default_graph()
    while isinstance(outer, _FuncGraph):
        outer = outer.outer_graph
    called = fn.ag_dnc_wrapper__  # type: ignore[attr-defined]  # what TensorFlow has registered for `fn`
    if keep(own, called):
        outer._py_funcs_used_in_graph.remove(called)
    return results
