"""Lifting a `tf.function`: `run(tf.function(f))` becomes `tf.function(run(f))`.

Each replica tracing its own copy could not work: a trace holds the function's lock, so the first replica to
pause at a merge call inside it would keep all others out, and the merge function could not see tensors of
the replicas' graphs. So the function is taken off, all replicas trace into one graph, and the function,
with all its options, goes around the whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import autograph, function

_lock = threading.Lock()


class _LiftedFunctions:
    """The lifted forms of one tf.function, one a strategy.

    Kept on the function itself, so that traces live as long as the function does and no longer. Holds the
    strategies weakly; a trace that was given a variable of a strategy holds that one, as any trace does.
    """

    def __init__(self) -> None:
        self.by_strategy: weakref.WeakKeyDictionary[tf.distribute.Strategy, Any] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple:
        return _LiftedFunctions, ()  # A copy of the function starts without traces.


def lift(strategy: tf.distribute.Strategy, fn: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function `fn`, which is a tf.function, around a run of what is inside it.

    The same one for the same strategy and function, so that it keeps its traces.

    Args:
        strategy: whose replicas run it.
        fn: a tf.function.
        run: `call_for_each_replica`.
    """
    with _lock:
        lifted = fn.__dict__.setdefault("_replica_engine_lifted", _LiftedFunctions()).by_strategy
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
