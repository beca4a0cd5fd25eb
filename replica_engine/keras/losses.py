"""Losses and means of a shard, computed so that all replicas together yield the losses and means of the whole batch.

Keras divides the sum of a batch's losses by their number. For a shard, the result is the mean over the shard, which
counts n_r / n. With masked values, or with weights in one of the reductions, Keras divides by another number; with the
reduction "sum" it does not divide. Shards have different divisors, so the divisors are summed over the replicas.

A `Mean` metric that gets a single number for a batch counts it once. A single number for a shard counts with the
shard's fraction of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops

from replica_engine._tf.keras import model as keras_model
from replica_engine.keras.shard import Shard, current_shard

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def _reduce(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    share = current_shard()
    assert share is not None
    if share.whole or share.replicas == 1 or len(values.shape) == 0:
        return loss
    if reduction == "sum":
        return loss / share.weight(loss.dtype)
    if reduction not in _MEANS:
        return loss
    divisor = _divisor(sample_weight, mask, reduction, loss.dtype)
    return loss if divisor is None else loss * _correction(divisor, share)


def _weight(values: Any, sample_weight: Any) -> Any:
    share = current_shard()
    assert share is not None
    is_number = sample_weight is None and len(tf.convert_to_tensor(values).shape) == 0
    return share.fraction() if is_number else sample_weight


def _divisor(sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """The divisor of a shard's losses; None if it is the number of samples or a multiple of that number."""
    if reduction == "mean_with_sample_weight":
        if sample_weight is None and mask is None:
            return None
        return ops.sum(ops.cast(keras_model.masked(sample_weight, mask, dtype, reduction), dtype))
    return None if mask is None else ops.sum(ops.cast(mask, dtype))


def _correction(divisor: Any, share: Shard) -> Any:
    """The factor from the shard's mean to its part of the global mean; a later weight by samples is divided out."""
    context = tf.distribute.get_replica_context()
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(divisor))
    return tf.math.divide_no_nan(divisor, total) / share.weight(divisor.dtype)


extension = keras_model.Extension(_reduce, _weight, lambda: current_shard() is not None)
"""Makes Keras' losses and means treat the values of a shard as described above, while it is installed."""
