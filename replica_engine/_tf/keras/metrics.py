"""The variables of Keras' metrics, of which each replica needs a value of its own. Checked on Keras 3.8 to 3.15.

Since Keras 3.10, a metric asks for variables with `ON_READ` synchronization: each replica adds to a value of its own,
and reading sums them. Before, it asked for the sum alone, and got variables that are equal on all replicas: each
replica added to the sum of all, which then counted N times. This module does not import Keras.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import tensorflow as tf

from replica_engine._tf import versions

MODULE = "keras.src.backend.tensorflow.core"  # of Keras 3.8 and 3.9
VARIABLE = "Variable"
INITIALIZE = "_initialize"  # makes the TensorFlow variable, now or later


def with_value_of_each_replica(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a variable that a strategy is to make: that of a metric gets `ON_READ` synchronization.

    Of Keras' own variables only those of metrics have this aggregation.
    """
    if versions.keras() >= (3, 10) or kwargs.get("aggregation") is not tf.VariableAggregation.SUM:
        return kwargs
    if kwargs.get("synchronization") not in (None, tf.VariableSynchronization.AUTO):
        return kwargs
    variable = getattr(sys.modules.get(MODULE), VARIABLE, None)
    if variable is None or not _is_called(getattr(variable, INITIALIZE).__code__):
        return kwargs
    return {**kwargs, "synchronization": tf.VariableSynchronization.ON_READ}


def is_counted(variable: Any) -> bool:
    """Whether each replica counts in a value of its own of a Keras variable, and the values are added up."""
    if variable.aggregation != "sum":
        return False
    return versions.keras() < (3, 10) or variable.synchronization == "on_read"


def _is_called(code: CodeType) -> bool:
    """Whether a function calls this one, directly or not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
