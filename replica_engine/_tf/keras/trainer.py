"""Keras' training and test functions, which implement `steps_per_execution`.

Keras runs `steps_per_execution` steps as a loop of a `tf.function` on the host and offers no other way. The trainer's
method `_make_function` takes the function that does one step, and makes the function that `fit` and `evaluate` call.
Checked on Keras 3.15.1. This module does not import Keras; if Keras has no such method, Keras' own loop stays.

`reduce_per_replica` combines the logs of all replicas: it takes the mean, but under a `tf.distribute.TPUStrategy` it
takes the logs of replica 0. This library's TPUStrategy is a subclass, and takes the mean (`patches.average_logs`).
"""

from __future__ import annotations

import sys
from typing import Any

MODULE = "keras.src.backend.tensorflow.trainer"
TRAINER = "TensorFlowTrainer"
METHOD = "_make_function"
BUILD = "_maybe_symbolic_build"
REDUCE = "reduce_per_replica"
REST = "partial_batch_size"
FRAMES = "keras.src.utils.traceback_utils"
EXCLUDED = "_EXCLUDED_PATHS"
"""The module that filters tracebacks, and the folders whose files it leaves out."""

COMPILES = "keras.src.trainers.trainer"
"""The module whose class `Trainer` has `compile`."""


def strategy_of(model: Any) -> Any:
    """The strategy under which a model was built; None if it was built under none."""
    return model._distribute_strategy


def has_keras_step(model: Any, name: str) -> bool:
    """Whether a step such as `train_step` is Keras' own and not overridden by the model."""
    return getattr(type(model), name) is getattr(getattr(sys.modules[MODULE], TRAINER), name)


def size_of_rest(iterator: Any) -> int | None:
    """The number of samples in the last batch of an epoch, if Keras knows that it is smaller than the others.

    None too if an epoch ends before that batch, because of `steps_per_epoch`.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    steps: int = getattr(iterator, "steps_per_epoch", None) or 0
    return None if 0 < steps < (getattr(adapter, "num_batches", None) or 0) else getattr(adapter, REST, None)


def reduced(outputs: Any, strategy: Any) -> Any:
    """Combines the logs of all replicas."""
    return getattr(sys.modules[MODULE], REDUCE)(outputs, strategy, reduction="auto")
