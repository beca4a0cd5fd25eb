"""The statistics of a synchronized `BatchNormalization` that gets a mask, for the replicas of this library.

Keras synchronizes the statistics of all samples, but computes those of masked samples on each replica for itself. Here
the sums behind them are those of all replicas. Checked on Keras 3.15.1. This module does not import Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from replica_engine._tf.hook import FIRST_SCOPE, Hook

if TYPE_CHECKING:
    import keras

Moments = tuple[tf.Tensor, tf.Tensor]
"""A mean and a variance."""
MOMENTS = Hook(
    "keras.src.layers.normalization.batch_normalization.BatchNormalization",
    "_moments",  # returns the mean and the variance of what it gets
    why="a synchronized normalization that gets a mask has the statistics of all replicas",
    since=FIRST_SCOPE,
    until="passes on to Keras outside the replicas of this library's strategies",
)


def synchronize_masked(is_ours: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Makes synchronized normalizations use the statistics of all replicas with a mask too.

    Does nothing until Keras is imported, or a second time.

    Args:
        is_ours: whether a strategy is one of this library's.
    """

    def moments(
        own: Callable[..., Moments], layer: keras.layers.Layer, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> Moments:
        context = tf.distribute.get_replica_context() if mask is not None and layer.synchronized else None
        if context is None or context.num_replicas_in_sync == 1 or not is_ours(context.strategy):
            return own(layer, inputs, mask)
        return _of_all_replicas(context, inputs, mask, layer._reduction_axes)

    MOMENTS.around(moments)


def _of_all_replicas(
    context: tf.distribute.ReplicaContext, inputs: tf.Tensor, mask: tf.Tensor, axes: Sequence[int]
) -> Moments:
    def over_samples(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, axes, keepdims=True)

    seen = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    zero = tf.zeros([], inputs.dtype)
    sums = over_samples(tf.where(seen, inputs, zero)), over_samples(tf.cast(seen, inputs.dtype))
    total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    count += sys.modules["keras"].config.epsilon()  # as Keras does, for a batch of which nothing is seen
    mean = total / count
    squares = over_samples(tf.square(tf.where(seen, inputs - mean, zero)))
    variance = context.all_reduce(tf.distribute.ReduceOp.SUM, squares) / count
    return tf.squeeze(mean), tf.squeeze(variance)
