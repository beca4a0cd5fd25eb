"""Batches of any number of samples in custom loops: shared out evenly, with weights that leave the padding out.

A compiled program has one shape on all replicas, and 13 samples on 4 replicas make shares of 4, 3, 3 and 3. So the
batch is padded to 16 with copies of its last sample, and each row has a weight: one in 13 for a sample, nothing for a
copy. A loss that is the sum of the rows' losses times the weights, summed over replicas, is the mean over the 13
samples, and its gradients, summed over replicas, are those of the mean.
"""

from __future__ import annotations

import operator
from typing import Any

import tensorflow as tf

from replica_engine.errors import BatchError, ReplicaValueError
from replica_engine.values import samples
from replica_engine.values.regroup import parts, regroup


def split_batch(strategy: tf.distribute.Strategy, batch: Any, batch_size: int | None = None) -> tuple[Any, Any]:
    """Shares a batch out to the replicas of a strategy, whatever its size: not divisible, smaller than N, or empty.

    Args:
        strategy: on whose replicas it will run.
        batch: a structure of arrays or tensors whose first dimension is the samples'; None in it stays None.
        batch_size: how many samples the largest batch has. A smaller one, such as the last of a data set, is padded to
            the same shapes, so that the same compiled program serves. None pads to the next multiple of N only.

    Returns:
        The shares, with N equal numbers of rows and in the order of the samples, and the weights of the rows: float32
        vectors with 1 / n for each of the n samples, and 0 for padding. Both are for the `args` of `strategy.run`.

    Raises:
        BatchError: arrays of different lengths, none at all, or more samples than `batch_size`.
        ReplicaValueError: something in it cannot become a tensor, or `batch_size` is no number of samples.

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
        raise BatchError.too_large(total, batch_size)
    replicas = strategy.num_replicas_in_sync
    size = max(1, -(-(batch_size or total) // replicas))
    padded = (
        samples.pad(batch, size * replicas - total) if total else samples.pad(samples.blank(batch), size * replicas - 1)
    )
    weights = tf.cast(tf.range(size * replicas) < total, tf.float32) / max(total, 1)
    devices = strategy.extended.worker_devices
    shares, of_rows = [], []
    for replica in range(replicas):
        with tf.device(devices[replica]):
            start, stop = replica * size, (replica + 1) * size
            shares.append(samples.on_device(samples.take(padded, start, stop)))
            of_rows.append(tf.identity(weights[start:stop]))
    return regroup(shares), regroup(of_rows)


def join_outputs(strategy: tf.distribute.Strategy, outputs: Any, count: int | None = None) -> Any:
    """What replicas returned for their shares, as one batch in the order of the samples.

    Args:
        strategy: on whose replicas it ran.
        outputs: what `strategy.run` returned: of each replica a structure of tensors, with a row for each of its rows.
        count: how many samples the batch had; what comes after is padding. None keeps all rows.

    Returns:
        The structure with the rows of all replicas.

    Raises:
        StructureMismatchError: replicas returned different structures.
        ReplicaValueError: they returned what has no rows, or `count` is no number of rows.

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


def _check_strategy(strategy: Any) -> None:
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ReplicaValueError.no_strategy(strategy)


def _number(name: str, value: Any) -> Any:
    """A number of rows; integers of NumPy and TensorFlow too, also those of a graph."""
    if value is None or _is_symbolic_number(value):
        return value
    try:
        number = operator.index(value)
    except Exception:  # tensors of TensorFlow have errors of their own
        raise ReplicaValueError.bad_rows(name, value) from None
    if isinstance(value, bool) or number < 0:
        raise ReplicaValueError.bad_rows(name, value)
    return number


def _is_symbolic_number(value: Any) -> bool:
    is_symbolic = isinstance(value, tf.Tensor) and not isinstance(value, tf.__internal__.EagerTensor)
    return is_symbolic and value.dtype.is_integer and value.shape.rank in (0, None)
