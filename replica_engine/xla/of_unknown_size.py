"""Values of all replicas, of a size that is known when the body is lowered and not yet while it is traced.

A body in a `tf.function` is traced once for batches of any size, and compiled for the size that comes. A marker
(`xla_ops.marker`) says the shape of its result while the body is traced, so no marker can stand for a collective of
such values. A sum over replicas has the shape of its operand, whatever that is: each replica puts its value into its
own place among zeros, and the sum has all of them. That moves N times as much as a gather does.

The sum is of integers, of the bits of the values: nothing is lost then of a NaN or a negative zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replica_engine._tf import xla_ops

_NARROW = {tf.float16: tf.uint16, tf.bfloat16: tf.uint16}


def stacked(x: tf.Tensor, rows: Sequence[Sequence[int]]) -> tf.Tensor:
    """The values of a replica's group, stacked along a new first dimension.

    Args:
        x: the replica's own value, of a known rank; of one shape on all replicas.
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
    """Where in its group the replica is that runs this."""
    places = {replica: place for row in rows for place, replica in enumerate(row)}
    return tf.gather(tf.constant([places[replica] for replica in range(len(places))]), xla_ops.replica_id())


def _as_words(x: tf.Tensor) -> tf.Tensor:
    """The bits of a value as int32, in one more dimension if there are more than 32."""
    if x.dtype in _NARROW:
        x = tf.bitcast(x, _NARROW[x.dtype])
    return tf.cast(x, tf.int32) if x.dtype.size < 4 else tf.bitcast(x, tf.int32)


def _of_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype in _NARROW:
        return tf.bitcast(tf.cast(words, _NARROW[dtype]), dtype)
    return tf.cast(words, dtype) if dtype.size < 4 else tf.bitcast(words, dtype)
