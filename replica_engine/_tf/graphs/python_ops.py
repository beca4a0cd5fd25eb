"""Ops that call a Python function of this library. Checked on TensorFlow 2.19 to 2.22."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import variables, versions
from replica_engine._tf.graphs.kept import keep
from replica_engine.errors import ReplicaEngineError

_BY_OUTERMOST = versions.minor(tf.__version__) < (2, 22)
_lock = threading.Lock()
_raised: deque[ReplicaEngineError] = deque(maxlen=8)  # by Python ops whose function has not yet been left


def python_op(fn: Callable[..., Any], inputs: Sequence[Any], dtypes: Any) -> Any:
    """Like `tf.numpy_function`, with a function that lives as long as the graph of the op.

    TensorFlow before 2.22 keeps it as long as the outermost graph: under eager mode, for the life of the process. Since
    then it keeps it as long as the graph of the op, but not as long as those around it. An error of this library that
    the function raises can be had again (`raised_in_op`): TensorFlow keeps the text only.
    """

    @functools.wraps(fn)
    def noted(*args: Any) -> Any:
        try:
            return fn(*args)
        except ReplicaEngineError as error:
            with _lock:
                _raised.append(error)
            raise

    results = tf.numpy_function(noted, inputs, dtypes, stateful=True)
    graph = tf.compat.v1.get_default_graph()
    called = noted.ag_dnc_wrapper__  # type: ignore[attr-defined]  # what TensorFlow has registered for `fn`
    if keep(graph, called) and _BY_OUTERMOST:
        variables.outermost_graph(graph).outer_graph._py_funcs_used_in_graph.remove(called)
    return results


def raised_in_op(error: BaseException) -> ReplicaEngineError | None:
    """The error of this library that a Python op has raised, if TensorFlow has made `error` of it; else None."""
    if not _raised or not isinstance(error, tf.errors.OpError):
        return None
    with _lock:
        found = next((each for each in _raised if f"{type(each).__name__}: {each}" in error.message), None)
        if found is not None:
            _raised.clear()  # the other replicas' errors of the same step; nothing keeps their frames
    return found
