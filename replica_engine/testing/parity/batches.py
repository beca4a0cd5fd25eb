"""Cuts the batches of a check from the data, including an uneven last batch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.errors import ParityArgumentError
from replica_engine.values import samples

DEFAULT_ROWS = 32
"""The number of rows of a batch if neither the user nor the data gives it."""


def of_arrays(data: Any, steps: int, batch_size: int | None, replicas: int, uneven: bool) -> list[Any]:
    """Cuts batches from arrays, starting at the first row; after the last row it continues with the first.

    Args:
        data: a structure of arrays with the same number of rows.
        steps: the number of batches.
        batch_size: the number of rows of a batch. None takes 32, or all rows if there are fewer, rounded down to a
            multiple of `replicas`.
        replicas: the number of replicas that share a batch.
        uneven: whether to make the last batch one that `replicas` does not divide.

    Raises:
        BatchError: the arrays have different lengths.
        ParityArgumentError: the arrays have no rows.
    """
    data = samples.as_tensors(data)
    total = samples.count(data)
    if not total:
        raise ParityArgumentError.no_rows()
    size = batch_size or max(min(DEFAULT_ROWS, total) // replicas, 1) * replicas
    return [_cut(data, step * size, each, total) for step, each in enumerate(_sizes(size, steps, replicas, uneven))]


def as_they_come(data: Any, steps: int, batch_size: int | None, replicas: int) -> list[Any]:
    """Cuts batches from arrays as an epoch does: full batches, and last the rest, if there is one.

    The rest has at least one row per replica. Without `batch_size`, `replicas` divides a full batch.

    Raises:
        BatchError: the arrays have different lengths.
        ParityArgumentError: the arrays have no rows.
    """
    made = of_arrays(data, steps, batch_size, replicas, uneven=False)
    size, total = samples.count(made[0]), samples.count(samples.as_tensors(data))
    left = total % size
    if left and total > replicas:
        left += 0 if left >= replicas else replicas
        made[-1] = samples.take(samples.as_tensors(data), max(total - left, 0), total)
    return made


def of_dataset(data: Any, steps: int, replicas: int, uneven: bool) -> list[Any]:
    """The first batches of a dataset or list of batches; after the last batch it continues with the first.

    Raises:
        ParityArgumentError: there is no batch with rows.
    """
    batches = [samples.as_tensors(batch) for batch in itertools.islice(iter(data), steps)]
    batches = [batch for batch in batches if samples.count(batch)]
    if not batches:
        raise ParityArgumentError.no_rows()
    batches = [batches[step % len(batches)] for step in range(steps)]
    total = samples.count(batches[-1])
    if uneven and replicas > 1 and total > 1 and total % replicas == 0:
        batches[-1] = samples.take(batches[-1], 0, total - 1)
    return batches


def even(batch: Any, replicas: int) -> Any:
    """Shortens a batch to a multiple of `replicas` rows; fills up a smaller batch with copies of its last row."""
    total = samples.count(batch)
    if total < replicas:
        return samples.pad(batch, replicas - total)
    return samples.take(batch, 0, total - total % replicas)


def shuffled(batch: Any, seed: int) -> Any:
    """The same rows in another order."""
    return _gathered(batch, np.random.default_rng(seed).permutation(samples.count(batch)))


def shares(batch: Any, count: int) -> list[Any]:
    """Splits a batch into `count` parts as evenly as possible; the first parts have one row more."""
    total = samples.count(batch)
    sizes = [total // count + (replica < total % count) for replica in range(count)]
    stops = list(itertools.accumulate(sizes))
    return [samples.take(batch, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _sizes(size: int, steps: int, replicas: int, uneven: bool) -> list[int]:
    last = size - 1 if uneven and size > 1 and replicas > 1 and size % replicas == 0 else size
    return [size] * (steps - 1) + [last]


def _cut(data: Any, start: int, size: int, total: int) -> Any:
    start %= total
    if start + size <= total:
        return samples.take(data, start, start + size)
    return _gathered(data, np.arange(start, start + size) % total)


def _gathered(batch: Any, indices: np.ndarray) -> Any:
    def gather(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return samples.join([samples.take(leaf, int(index), int(index) + 1) for index in indices])
        if leaf is None or not leaf.shape.rank:
            return leaf
        return tf.gather(leaf, indices)

    return tf.nest.map_structure(gather, batch)
