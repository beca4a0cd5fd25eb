"""The shard: the part of a batch that one replica computes, and the weight of its results in the whole batch.

One device computes the mean over its batch of n samples. Replica r has n_r of these samples and computes the mean over
them. The sum over the replicas of `n_r / n` times these means is the mean over the batch. So a loss, a gradient or a
mean of replica r counts with `weight = n_r / n`, and the replicas together compute what one device computes, whatever
the sizes of their shards are.

Some batches cannot be split, for example a batch with fewer samples than replicas. Then every replica computes
the *whole* batch, and only the result of replica 0 counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from replica_engine.process import scoped

Update = tuple[Callable[..., None], list[Any], Sequence[keras.Variable]]
"""An update of weights by an optimizer: what makes it, its gradients, and the weights."""


@dataclasses.dataclass
class Shard:
    """The part of a batch that one replica computes.

    Attributes:
        rows: the number of samples of this replica.
        total: the number of samples of all replicas.
        replicas: the number of replicas.
        whole: whether every replica has all samples.
        results: the metric results of this step, each as (result, metric, key); the key is None unless the metric
            returned a dictionary.
        deferred: optimizer updates, with their gradients, that wait for the end of a branch; None where updates need
            not wait.
        is_own: whether a method of the user's own uses the loss of `compile`: the step, or `compute_loss`.
        sums: whether this step has a sum of losses whose use must be looked at.
        gradients: the gradients that tapes have given in an eager step.
        updates: whether an optimizer has got gradients.
        is_plain: whether the step follows the rule of `tf.distribute`: only the results of its metrics are noted.
        averages: whether all else in its logs is a mean over replicas, whatever it is.
    """

    rows: int | tf.Tensor
    total: int | tf.Tensor
    replicas: int
    whole: bool = False
    results: list[tuple[object, keras.metrics.Metric, str | None]] = dataclasses.field(default_factory=list)
    deferred: list[Update] | None = None
    is_own: bool = False
    sums: bool = False
    gradients: list[tf.Tensor] = dataclasses.field(default_factory=list)
    updates: bool = False
    is_plain: bool = False
    averages: bool = False

    def fraction(self, dtype: str | tf.DType = "float32") -> tf.Tensor:
        """The fraction of the batch that this replica has, as a scalar of `dtype`."""
        if self.whole:
            return tf.ones([], dtype)
        return tf.cast(self.rows, dtype) / tf.cast(self.total, dtype)

    def weight(self, dtype: str | tf.DType = "float32") -> tf.Tensor:
        """The weight of a mean over this replica's samples in the mean over all samples, as a scalar of `dtype`."""
        return self.once(dtype) if self.whole else self.fraction(dtype)

    def once(self, dtype: str | tf.DType = "float32") -> tf.Tensor:
        """The weight of a sum over this replica's samples in the sum over all samples, as a scalar of `dtype`."""
        if not self.whole:
            return tf.ones([], dtype)
        return tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), dtype)

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Makes this shard the current one for the code inside the `with` block."""
        return scoped.variable(_current, self)


def current_shard() -> Shard | None:
    """The shard that is being computed; None outside of steps that have the numbers of one device."""
    share = _current.get()
    return None if share is None or share.is_plain else share


def noted_shard() -> Shard | None:
    """The shard that is being computed by any step."""
    return _current.get()


_current: contextvars.ContextVar[Shard | None] = contextvars.ContextVar("replica_engine_share", default=None)
