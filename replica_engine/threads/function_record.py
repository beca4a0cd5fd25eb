"""What is known of a `tf.function` that replicas have run or called, kept by the function itself."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

_RECORD = "_replica_engine_threads"  # attribute of a `tf.function`


class FunctionRecord:
    """The record of one `tf.function`.

    The function holds it, so traces live exactly as long as the function. It holds strategies weakly. A trace that uses
    a variable of a strategy holds that strategy, as any trace does.

    Attributes:
        lifted: for each strategy, the `tf.function` around a run of this one.
        joint: for each strategy, the function around all replicas that call this one, and weak references to the
            replicas' functions for which it was made.
        swallowed: whether it caught the exception of an attempt, so that it has a trace without its merge calls.
    """

    def __init__(self) -> None:
        self.lifted: weakref.WeakKeyDictionary[tf.distribute.Strategy, Any] = weakref.WeakKeyDictionary()
        self.joint: weakref.WeakKeyDictionary[tf.distribute.Strategy, tuple] = weakref.WeakKeyDictionary()
        self.swallowed = False

    def __reduce__(self) -> tuple:
        return FunctionRecord, ()  # A copy of the function starts without traces.


def record_of(fn: Any) -> FunctionRecord:
    """The record of a `tf.function`."""
    return fn.__dict__.setdefault(_RECORD, FunctionRecord())
