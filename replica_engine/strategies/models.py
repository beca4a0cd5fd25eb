"""Keras models that are built under a scope and trained with Keras' own `fit`: what goes wrong there, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute, patches
from replica_engine.diagnostics.misuse import explained
from replica_engine.diagnostics.suspicions import warn_once
from replica_engine.errors import BatchError, warn_uneven_rest


def explain(is_ours: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Makes `fit` and `evaluate` check the first batch, and explain what fails before the first step.

    Does nothing until Keras is imported, or a second time.

    Args:
        is_ours: whether a strategy runs on a backend of this library; all others keep what Keras does.
    """
    patches.extend_build(_check_batch, explained, is_ours)


def _check_batch(batch: Any, rest: int | None, strategy: tf.distribute.Strategy) -> None:
    """Checks that the replicas have equal shares of a batch; `fit` averages over replicas, not over samples.

    Of a last batch that is smaller, a warning is enough: it is one step of an epoch. Compiled replicas refuse it when
    it comes.

    Raises:
        BatchError: they have not.
    """
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, distribute.DistributedValues):
            shapes = [getattr(part, "shape", None) for part in leaf.values]
            rows = [shape[0] for shape in shapes if shape is not None and shape.rank]
            if len(rows) == len(shapes) and len(set(rows)) > 1:
                raise BatchError.uneven(rows)
    size = strategy.num_replicas_in_sync
    if rest and rest % size and not hasattr(strategy, "run_steps"):
        warn_once(strategy, "rest", warn_uneven_rest(rest, size))


def is_uneven(error: BaseException) -> bool:
    """Whether a compiled step in a `tf.function` failed because the replicas had unequal shares of a batch.

    TensorFlow makes an error of its own of an exception that is raised while a graph runs, and keeps only the text.
    """
    return isinstance(error, tf.errors.OpError) and "ReplicaMismatchError" in str(error)
