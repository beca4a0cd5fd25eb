"""The samples of a batch: how many there are, and how to take, pad and join them.

A batch is any structure of tensors, which may be ragged or sparse. A leaf without rows (None, a scalar) is the same in
every part of a batch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from replica_engine.errors import BatchError, ReplicaValueError, base
from replica_engine.upstream.eager import EagerTensor
from replica_engine.values.structure import as_tensor, flatten

_PARTS = ("x", "y", "sample_weight")
T = TypeVar("T")
Rows: TypeAlias = int | tf.Tensor
"""A number of rows; a scalar tensor where only the running graph knows it."""
Array: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor | np.ndarray
"""A leaf of a batch that has rows."""
_EAGER = frozenset((EagerTensor,))


def as_tensors(batch: object) -> Any:
    """Converts the arrays of a batch to tensors, and the empty optionals of Keras to None.

    Raises:
        ReplicaValueError: a leaf is not a tensor and cannot become one.
    """
    if type(batch) is tuple and _EAGER.issuperset(map(type, batch)):  # what Keras gives for arrays
        return batch
    try:
        tensors = tf.nest.map_structure(_as_tensor, batch)
    except RecursionError:
        raise ReplicaValueError.endless("the arrays of a batch") from None
    for leaf in tf.nest.flatten(tensors):
        if isinstance(leaf, int):  # tf.nest treats a bytearray as a sequence, and returns its bytes as ints
            raise ReplicaValueError.no_tensor("An array of a batch", batch, "it has a bytearray in it")
    return tensors


def count(batch: object) -> int:
    """The number of samples of an eager batch.

    Raises:
        BatchError: the arrays have different numbers of samples, or the batch has no array.
    """
    found = []
    for name, part in zip(_PARTS, _parts(batch), strict=False):
        leaves = [leaf for leaf in tf.nest.flatten(part) if has_rows(leaf)]
        for index, leaf in enumerate(leaves):
            found.append((name if len(leaves) == 1 else f"{name}[{index}]", int(_rows(leaf))))
    if not found:
        raise BatchError("The batch has no array with samples, so there is nothing to divide among the replicas.")
    if len({rows for _, rows in found}) > 1:
        rows = ", ".join(f"{name} has {rows}" for name, rows in found)
        raise BatchError(
            f"All arrays of a batch must have the same number of samples: {rows}. If they are an element of a "
            "tf.data.Dataset: is it batched? dataset.batch(n)."
        )
    return found[0][1]


def named(batch: object) -> list[tuple[str, object]]:
    """The leaves of a batch, each with its name, for example "x['words']" or "y"."""
    found: list[tuple[str, object]] = []
    for name, part in zip(_PARTS, _parts(batch), strict=False):
        leaves, spec = flatten(part, name)
        found += zip(spec.paths, leaves, strict=True)
    return found


def _parts(batch: object) -> tuple:
    return batch if isinstance(batch, tuple) and len(batch) <= len(_PARTS) else (batch,)


def count_in_graph(batch: object) -> Rows:
    """The number of samples of a batch; a Python int if it is known while a graph is built, otherwise a tensor."""
    return next(_rows(leaf) for leaf in tf.nest.flatten(batch) if has_rows(leaf))


def take(batch: T, start: Rows, stop: Rows | None) -> T:
    """The samples from `start` up to but not including `stop`; both are ints or scalar tensors."""
    return _map(lambda leaf: _take(leaf, start, stop), batch)


def split(batch: object, count: int) -> list[Any]:
    """An eager batch in `count` parts, in order; its number of samples is a multiple of `count`."""
    leaves = tf.nest.flatten(batch)
    columns = [_split(leaf, count) if has_rows(leaf) else [leaf] * count for leaf in leaves]
    if type(batch) is tuple and list(map(id, leaves)) == list(map(id, batch)):  # each part is a leaf
        return list(zip(*columns, strict=True))
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*columns, strict=True)]


def pad(batch: T, more: Rows) -> T:
    """The batch with `more` copies of its last sample appended."""
    return _map(lambda leaf: _pad(leaf, more), batch)


def blank(batch: T) -> T:
    """A batch of one sample of zeros, with the shapes and dtypes of `batch`, which has no samples."""
    return _map_dense(lambda leaf: tf.zeros([1, *leaf.shape[1:]], leaf.dtype), batch)


def join(parts: Sequence[T]) -> T:
    """Concatenates several batches, in order, to one batch.

    Raises:
        ReplicaValueError: a leaf has no rows.
    """
    return tf.nest.map_structure(lambda *leaves: _join(leaves), *parts)


def views(batch: object) -> Any:
    """The batch with NumPy arrays instead of dense tensors; an array shares the tensor's memory where it can."""
    return tf.nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, batch)


def generalized(batch: object) -> Any:
    """The specification of batches that are like this one except for their number of samples."""
    return _map_dense(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batch)


def on_device(batch: T) -> T:
    """The batch with copies of its tensors on the device whose scope is current."""
    return tf.nest.map_structure(lambda leaf: tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf, batch)


def have_row_count(outputs: object, count: Rows) -> bool | tf.Tensor:
    """Whether all outputs have `count` rows; a tensor if a graph is built and does not yet know.

    Where a graph does not know the count, an output of a known length is not one row per sample, whatever its length.
    """
    leaves = tf.nest.flatten(outputs)
    if not all(has_rows(leaf) for leaf in leaves):
        return False
    if tf.is_symbolic_tensor(count) and any(leaf.shape[0] is not None for leaf in leaves):
        return False
    return functools.reduce(operator.and_, (_rows(leaf) == count for leaf in leaves), True)


def described(batch: object) -> str:
    """The shapes of a batch without the number of samples, for messages."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)]
    return ", ".join(f"{tf.as_dtype(leaf.dtype).name}{[None, *tuple(leaf.shape)[1:]]}" for leaf in leaves)


def places(batch: object) -> int | str:
    """Hashable; equal for batches that have the same structure, and None in the same places."""
    if type(batch) is tuple and _EAGER.issuperset(map(type, batch)):
        return len(batch)
    return repr(tf.nest.map_structure(lambda leaf: leaf is None, batch))


def _map(change: Callable[[Array], object], batch: T) -> T:
    return tf.nest.map_structure(lambda leaf: change(leaf) if has_rows(leaf) else leaf, batch)


def _map_dense(change: Callable[[tf.Tensor], object], batch: T) -> T:
    return _map(lambda leaf: change(leaf) if isinstance(leaf, tf.Tensor) else leaf, batch)


def _as_tensor(leaf: object) -> object:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.__internal__.CompositeTensor) and hasattr(leaf, "shape"):
        return leaf
    return as_tensor(leaf, "An array of a batch")


def has_rows(leaf: object) -> bool:
    """Whether a leaf has samples; None and scalars are the same for all samples."""
    shape = getattr(leaf, "shape", None)
    return leaf is not None and shape is not None and len(shape) > 0


def _rows(leaf: Array) -> Rows:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    rows = leaf.shape[0]
    return tf.shape(leaf)[0] if rows is None else rows


def _take(leaf: Array, start: Rows, stop: Rows | None) -> Array:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    shape = tf.cast(leaf.dense_shape, tf.int64)
    start, stop = tf.cast(start, tf.int64), shape[0] if stop is None else tf.cast(stop, tf.int64)
    begin = tf.concat([[start], tf.zeros_like(shape[1:])], 0)
    return tf.sparse.slice(leaf, begin, tf.concat([[stop - start], shape[1:]], 0))


def _split(leaf: Array, count: int) -> list[Array]:
    if type(leaf) is EagerTensor:
        return tf.raw_ops.Split(axis=0, value=leaf, num_split=count)  # of one op: parts that share memory with the leaf
    size = int(_rows(leaf)) // count
    return [_take(leaf, start, start + size) for start in range(0, count * size, size)]


def _pad(leaf: Array, more: Rows) -> Array:
    if isinstance(leaf, np.ndarray):
        return np.concatenate([leaf, np.repeat(leaf[-1:], more, axis=0)]) if more else leaf
    if isinstance(leaf, tf.Tensor):
        return tf.concat([leaf, tf.repeat(leaf[-1:], more, axis=0)], 0)
    if isinstance(leaf, tf.SparseTensor):
        return _pad_sparse(leaf, more)
    return tf.gather(leaf, tf.concat([tf.range(_rows(leaf)), tf.fill([more], _rows(leaf) - 1)], 0))


def _pad_sparse(leaf: tf.SparseTensor, more: Rows) -> tf.SparseTensor:
    """Appends the last row `more` times."""
    more = tf.cast(more, tf.int64)
    total = leaf.dense_shape[0]
    in_last = leaf.indices[:, 0] == total - 1
    values = tf.boolean_mask(leaf.values, in_last)
    rows = total + tf.repeat(tf.range(more), tf.size(values))
    rest = tf.tile(tf.boolean_mask(leaf.indices, in_last)[:, 1:], [more, 1])
    return tf.SparseTensor(
        tf.concat([leaf.indices, tf.concat([rows[:, tf.newaxis], rest], 1)], 0),
        tf.concat([leaf.values, tf.tile(values, [more])], 0),
        tf.concat([[total + more], leaf.dense_shape[1:]], 0),
    )


def _join(leaves: Sequence[Array]) -> Array:
    for leaf in leaves:
        if not isinstance(leaf, (tf.Tensor, tf.Variable, np.ndarray, tf.RaggedTensor, tf.SparseTensor)):
            raise ReplicaValueError(
                "Outputs of replicas are joined by rows, so each leaf must be a tensor or an array on every "
                f"replica; one leaf is {base.brief(leaf)}."
            )
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves))
    if isinstance(leaves[0], np.ndarray):
        return np.concatenate(leaves) if leaves[0].ndim else np.stack(leaves)
    return tf.stack(leaves) if len(leaves[0].shape) == 0 else tf.concat(leaves, 0)
