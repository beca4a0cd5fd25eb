"""Keras' training and test functions, which implement `steps_per_execution`.

Keras runs `steps_per_execution` steps as a loop of a `tf.function` on the host and offers no other way. The trainer's
method `_make_function` takes the function that does one step, and makes the function that `fit` and `evaluate` call.
Checked on Keras 3.10 to 3.16. This module does not import Keras; if Keras has no such method, Keras' own loop stays.

`reduce_per_replica` combines the logs of all replicas: it takes the mean, but under a `tf.distribute.TPUStrategy` it
takes the logs of replica 0. This library's TPUStrategy is a subclass, and takes the mean (`hooks.combine_logs`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import versions

if TYPE_CHECKING:
    import keras

MODULE = "keras.src.backend.tensorflow.trainer"
TRAINER = "Trainer" if versions.keras_renamed() else "TensorFlowTrainer"
METHOD = "_make_function"
REDUCE = "reduce_per_replica"
DISTRIBUTED, ORIGINAL = "_distributed_dataset", "_original_dataset"
"""Where Keras keeps the distributed dataset, and TensorFlow in that the one that it was made of."""
KEPT = "_first_batches"
"""What an adapter has taken of a generator to find out the shapes, and will give first."""
COMPILES = "keras.src.trainers.trainer"
BASE = "BaseTrainer" if versions.keras_renamed() else "Trainer"
"""The class of all backends' trainers, which has `compile`, and its module."""


def class_of_trainers() -> type | None:
    """The class of models' trainers under TensorFlow, which has Keras' own step methods; None before Keras is there."""
    return getattr(sys.modules.get(MODULE), TRAINER, None)


def strategy_of(model: object) -> Any:
    """The strategy under which a model was built; None if it was built under none, and for anything else."""
    return getattr(model, "_distribute_strategy", None)


def has_keras_step(model: keras.Model, name: str) -> bool:
    """Whether a step such as `train_step` is Keras' own and not overridden by the model."""
    own = getattr(type(model), name) is not getattr(class_of_trainers(), name)
    return not own and name not in vars(model)


def has_keras_loss(model: keras.Model) -> bool:
    """Whether a model adds its losses up as Keras does."""
    return getattr(type(model).compute_loss, "__module__", "").partition(".")[0] == "keras"


def makes_functions(model: keras.Model) -> str | None:
    """The method of a model that makes a function, such as `make_train_function`, in place of Keras'; None if none."""
    names = (f"make_{name}_function" for name in ("train", "test", "predict"))
    return next((name for name in names if not has_keras_step(model, name)), None)


def undistribute(iterator: Any) -> None:
    """Makes an epoch iterator give whole batches, where Keras has distributed a dataset.

    A dataset that the user has distributed stays as it is. TensorFlow takes a distributed dataset's batches ahead of
    the step, and so does what takes its place.
    """
    dataset = getattr(iterator, DISTRIBUTED)
    given = getattr(iterator.data_adapter, "_dataset", None)
    if not isinstance(dataset, tf.data.Dataset) and not isinstance(given, tf.distribute.DistributedDataset):
        ahead = min(max(_AHEAD, int(iterator.steps_per_execution)), _MOST_AHEAD)
        setattr(iterator, DISTRIBUTED, getattr(dataset, ORIGINAL).prefetch(ahead))
        setattr(iterator, READ_AHEAD, True)


_AHEAD, _MOST_AHEAD = 2, 8  # batches; as many as an execution takes before its steps are read during the one before
READ_AHEAD = "_replica_engine_reads_ahead"
"""On an epoch iterator that `undistribute` has changed: another thread reads its batches before they are asked for."""


def first_batch(iterator: Any, strategy: tf.distribute.Strategy) -> object:
    """The first batch that an epoch will give the replicas, which the epoch still gives.

    A dataset begins again for each iterator. A generator does not: what is taken of it here would be missing in the
    epoch. But its adapter has looked at its first batches and keeps them, so the batch is one of a copy of the first.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    kept = getattr(adapter, KEPT, None)
    if not kept:
        *_, batches = next(iter(iterator))  # after the number of a step; newer Keras has two
        return next(batches)
    copies = itertools.repeat(kept[0], strategy.num_replicas_in_sync)  # for each worker one, and none is needed twice
    return next(iter(strategy.experimental_distribute_dataset(type(adapter)(copies).get_tf_dataset())))


def plain_logs(logs: Mapping[str, object]) -> dict[str, object]:
    """Logs as numbers of Python, as `fit` gives them to callbacks."""
    return {name: _plain(value) for name, value in logs.items()}


def _plain(value: object) -> object:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
