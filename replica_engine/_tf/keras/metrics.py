"""The variables of Keras' metrics, of which each replica needs a value of its own. Checked on Keras 3.8 to 3.15.

Since Keras 3.10, a metric asks for variables with `ON_READ` synchronization: each replica adds to a value of its own,
and reading sums them. Before, it asked for the sum alone, and got variables that are equal on all replicas: each
replica added to the sum of all, which then counted N times. This module does not import Keras.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import versions
from replica_engine._tf.keras import hooks

MODULE = "keras.src.backend.tensorflow.core"  # of Keras 3.8 and 3.9
VARIABLE = "Variable"
INITIALIZE = "_initialize"  # makes the TensorFlow variable, now or later

_is_of_keras: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_keras_variable", default=False)


def extend_variables() -> None:
    """Notes when Keras makes the variable under one of its own; only once per process, and only before Keras 3.10."""
    if versions.keras() < (3, 10):
        hooks.wrap(getattr(sys.modules.get(MODULE), VARIABLE, None), INITIALIZE, _initialize)


def _initialize(own: Callable[..., Any], variable: Any, value: Any) -> None:
    token = _is_of_keras.set(True)
    try:
        own(variable, value)
    finally:
        _is_of_keras.reset(token)


def with_value_of_each_replica(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a variable that a strategy is to make: that of a metric gets `ON_READ` synchronization.

    Of Keras' own variables only those of metrics have this aggregation.
    """
    if not _is_of_keras.get() or kwargs.get("aggregation") is not tf.VariableAggregation.SUM:
        return kwargs
    if kwargs.get("synchronization") not in (None, tf.VariableSynchronization.AUTO):
        return kwargs
    return {**kwargs, "synchronization": tf.VariableSynchronization.ON_READ}


def is_counted(variable: Any) -> bool:
    """Whether each replica counts in a value of its own of a Keras variable, and the values are added up."""
    if variable.aggregation != "sum":
        return False
    return versions.keras() < (3, 10) or variable.synchronization == "on_read"
