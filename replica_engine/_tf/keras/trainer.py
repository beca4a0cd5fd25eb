"""Keras' training and test functions, which implement `steps_per_execution`.

Keras runs `steps_per_execution` steps as a loop of a `tf.function` on the host and offers no other way. The trainer's
method `_make_function` takes the function that does one step, and makes the function that `fit` and `evaluate` call.
Checked on Keras 3.15.1. This module does not import Keras; if Keras has no such method, Keras' own loop stays.

`reduce_per_replica` combines the logs of all replicas: it takes the mean, but under a `tf.distribute.TPUStrategy` it
takes the logs of replica 0. This library's TPUStrategy is a subclass, and takes the mean (`patches.average_logs`).
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

MODULE = "keras.src.backend.tensorflow.trainer"
TRAINER = "TensorFlowTrainer"
METHOD = "_make_function"
BUILD = "_maybe_symbolic_build"
REDUCE = "reduce_per_replica"
REST = "partial_batch_size"
_KEPT = "_first_batches"
"""What an adapter has taken of a generator to find out the shapes, and will give first."""
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


def first_batch(iterator: Any, strategy: Any) -> Any:
    """The first batch that an epoch will give the replicas, which the epoch still gives.

    A dataset begins anew for each iterator. A generator does not: what is taken of it here would be missing in the
    epoch. But its adapter has looked at its first batches and keeps them, so the batch is one of a copy of the first.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    kept = getattr(adapter, _KEPT, None)
    if not kept:
        *_, batches = next(iter(iterator))  # after the number of a step; newer Keras has two
        return next(batches)
    copies = itertools.repeat(kept[0], strategy.num_replicas_in_sync)  # for each worker one, and none is needed twice
    return next(iter(strategy.experimental_distribute_dataset(type(adapter)(copies).get_tf_dataset())))


def size_of_rest(iterator: Any) -> int | None:
    """The number of samples in the last batch of an epoch, if Keras knows that it is smaller than the others.

    None too if an epoch ends before that batch, because of `steps_per_epoch`.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    steps: int = getattr(iterator, "steps_per_epoch", None) or 0
    try:
        return None if 0 < steps < (getattr(adapter, "num_batches", None) or 0) else getattr(adapter, REST, None)
    except NotImplementedError:  # an adapter of a generator, a PyDataset or a DataLoader
        return None


def reduced(outputs: Any, strategy: Any) -> Any:
    """Combines the logs of all replicas."""
    return getattr(sys.modules[MODULE], REDUCE)(outputs, strategy, reduction="auto")
