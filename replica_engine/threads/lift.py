"""Lifting a `tf.function`: `run(tf.function(f))` becomes `tf.function(run(f))`.

Each replica could not trace its own copy. A trace holds the function's lock, so the first replica that pauses at a
merge call inside the function would keep all other replicas out. The merge function could not see tensors of the
replicas' graphs either. So the library unwraps the function, all replicas trace into one graph, and the
`tf.function`, with all its options, goes around the whole run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import autograph, function
from replica_engine.threads.function_record import record_of

_lock = threading.Lock()


def lift(strategy: tf.distribute.Strategy, fn: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `tf.function` like `fn` that runs the Python function of `fn` on all replicas.

    The same strategy and function give the same result each time, so that it keeps its traces.

    Args:
        strategy: the strategy whose replicas run the function.
        fn: a `tf.function`.
        run: `call_for_each_replica`.
    """
    with _lock:
        lifted = record_of(fn).lifted
        if strategy not in lifted:
            lifted[strategy] = function.clone(fn, _around(strategy, fn.python_function, run))
        return lifted[strategy]


def _around(strategy: tf.distribute.Strategy, inner: Callable, run: Callable) -> Callable[..., Any]:
    strategy_ref = weakref.ref(strategy)

    @autograph.artifact
    def on_all_replicas(*args: Any, **kwargs: Any) -> Any:
        alive = strategy_ref()
        assert alive is not None, "called by `run`, a method of the strategy"
        return run(alive, inner, args=args, kwargs=kwargs)

    return on_all_replicas
