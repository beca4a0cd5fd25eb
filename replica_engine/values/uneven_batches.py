"""Batches of any size in custom training loops: split evenly, with weights that exclude the padding.

A compiled program needs the same shapes on all replicas, but 13 samples on 4 replicas make shares of 4, 3, 3 and 3. So
the batch is padded to 16 rows with copies of its last sample, and each row gets a weight: 1/13 for a sample, 0 for a
copy. A loss that sums the rows' losses times the weights, summed over replicas, is the mean over the 13 samples. The
gradients of this loss, summed over replicas, are the gradients of the mean.
"""

from __future__ import annotations

import operator
from typing import Any

import tensorflow as tf

from replica_engine.errors import BatchError, ReplicaValueError
from replica_engine.values import samples
from replica_engine.values.regroup import parts, regroup


def split_batch(
    strategy: tf.distribute.Strategy, batch: object, batch_size: int | None = None
) -> tuple[Any, tf.distribute.DistributedValues]:
    """Splits a batch over the replicas of a strategy, also if its size is not divisible by N, less than N, or 0.

    Args:
        strategy: the strategy whose N replicas will process the batch.
        batch: a structure of arrays or tensors whose first dimension is the samples; None stays None.
        batch_size: the number of samples of the largest batch. A smaller batch, such as the last one of a dataset, is
            padded to the same shapes, so that the same compiled program can run it. None pads only to the next multiple
            of N.

    Returns:
        The shares and the weights, both for the `args` of `strategy.run`. The shares have equal numbers of rows, in the
        order of the samples. The weights are a float32 vector per replica: 1 / n for each of the n samples, 0 for
        padding.

    Raises:
        BatchError: arrays have different lengths, the batch has no array, or it has more than `batch_size` samples.
        ReplicaValueError: a leaf cannot become a tensor, or `batch_size` is not a number of samples.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> shares, weights = replica_engine.split_batch(strategy, tf.constant([1.0, 2.0, 6.0]))
        >>> def mean(x, weights):
        ...     return tf.reduce_sum(x * weights)
        >>> means = strategy.run(mean, args=(shares, weights))
        >>> float(strategy.reduce("SUM", means, axis=None))
        3.0
    """
    _check_strategy(strategy)
    batch_size = _number("batch_size", batch_size)
    batch = samples.as_tensors(batch)
    total = samples.count(batch)
    if batch_size is not None and total > batch_size:
        raise BatchError(f"The batch has {total} samples, more than the batch_size={batch_size} that was given.")
    replicas = strategy.num_replicas_in_sync
    size = max(1, -(-(batch_size or total) // replicas))
    padded = samples.pad(batch if total else samples.blank(batch), size * replicas - max(1, total))
    weights = tf.cast(tf.range(size * replicas) < total, tf.float32) / max(total, 1)
    devices = strategy.extended.worker_devices
    shares = []
    for replica in range(replicas):
        with tf.device(devices[replica]):
            shares.append(samples.on_device(samples.take((padded, weights), replica * size, (replica + 1) * size)))
    return regroup(shares)


def join_outputs(strategy: tf.distribute.Strategy, outputs: object, count: int | None = None) -> Any:
    """Joins the outputs of the replicas for their shares to one batch, in the order of the samples.

    Args:
        strategy: the strategy whose replicas processed the shares.
        outputs: the result of `strategy.run`: for each replica a structure of tensors, with one row per row of its
            share.
        count: the number of samples of the batch; rows after it are padding and are dropped. None keeps all rows.

    Returns:
        The structure with the rows of all replicas.

    Raises:
        StructureMismatchError: the replicas returned different structures.
        ReplicaValueError: an output has no rows, or `count` is not a number of rows.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> shares, _ = replica_engine.split_batch(strategy, tf.constant([1.0, 2.0, 6.0]))
        >>> doubled = strategy.run(lambda x: 2 * x, args=(shares,))
        >>> replica_engine.join_outputs(strategy, doubled, 3).numpy().tolist()
        [2.0, 4.0, 12.0]
    """
    _check_strategy(strategy)
    count = _number("count", count)
    joined = samples.join(parts(outputs, strategy.num_replicas_in_sync, "outputs"))
    return joined if count is None else samples.take(joined, 0, count)


def _check_strategy(strategy: object) -> None:
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ReplicaValueError.no_strategy(strategy)


def _number(name: str, value: Any) -> samples.Rows | None:
    """Checks a number of rows: an int, an integer of NumPy or TensorFlow, or an integer tensor of a graph."""
    is_symbolic = isinstance(value, tf.Tensor) and not isinstance(value, tf.__internal__.EagerTensor)
    if value is None or (is_symbolic and value.dtype.is_integer and value.shape.rank in (0, None)):
        return value
    try:
        number = operator.index(value)
    except Exception:  # TensorFlow's tensors raise errors of other classes here
        raise ReplicaValueError.bad_rows(name, value) from None
    if isinstance(value, bool) or number < 0:
        raise ReplicaValueError.bad_rows(name, value)
    return number
