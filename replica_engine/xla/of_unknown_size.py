"""Collectives of values whose size is known when the body is lowered, but not yet while the body is traced.

A body in a `tf.function` is traced once for batches of any size, and compiled for each size that occurs. A marker
(`xla_ops.marker`) must declare the shape of its result while the body is traced, so no marker can stand for a
collective of such values. A sum over replicas has the shape of its operand, so it needs no declared shape. Each replica
puts its value into its own place among zeros, and the sum holds the values of all replicas. That moves N times as many
bytes as a gather.

The sum adds integers, the bits of the values, so that a NaN or a negative zero stays exactly as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replica_engine._tf.graphs import xla_ops

_NARROW = {tf.float16: tf.uint16, tf.bfloat16: tf.uint16}


def stacked(x: tf.Tensor, rows: Sequence[Sequence[int]]) -> tf.Tensor:
    """The values of a replica's group, stacked along a new first dimension.

    Args:
        x: the replica's own value, of a known rank and of one shape on all replicas.
        rows: the groups, of equal sizes.
    """
    if x.dtype.is_complex:
        return tf.complex(stacked(tf.math.real(x), rows), stacked(tf.math.imag(x), rows))
    words = _as_words(x)
    places = tf.range(len(rows[0])) == position(rows)
    mask = tf.reshape(places, [-1, *([1] * words.shape.rank)])
    mine = tf.where(mask, words[tf.newaxis], tf.zeros([], tf.int32))
    result = _of_words(xla_ops.all_reduce(mine, rows, "Add"), x.dtype)
    result.set_shape([len(rows[0]), *x.shape])
    return result


def position(rows: Sequence[Sequence[int]]) -> tf.Tensor:
    """The position of the replica that runs this in its group: a scalar int32 tensor."""
    places = {replica: place for row in rows for place, replica in enumerate(row)}
    return tf.gather(tf.constant([places[replica] for replica in range(len(places))]), xla_ops.replica_id())


def _as_words(x: tf.Tensor) -> tf.Tensor:
    """The bits of a value as int32, with one more dimension if a value has more than 32 bits."""
    if x.dtype in _NARROW:
        x = tf.bitcast(x, _NARROW[x.dtype])
    return tf.cast(x, tf.int32) if x.dtype.size < 4 else tf.bitcast(x, tf.int32)


def _of_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype in _NARROW:
        return tf.bitcast(tf.cast(words, _NARROW[dtype]), dtype)
    return tf.cast(words, dtype) if dtype.size < 4 else tf.bitcast(words, dtype)
