"""Gradients of embedding tables: rows with their indices, where a row that was looked up twice appears twice.

Keras does not add up duplicate rows. Adam squares each duplicate, and clipping by norm takes the norm over all of them.
So an optimizer treats a row that is split into two parts differently from the whole row, although both add the same to
the table. Together, the replicas must therefore have the rows that one device has: each row once, and zeros elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def of_whole_batch(grads: Sequence[Any]) -> list[Any]:
    """Moves the rows of tables to the first replica, for a batch that every replica has computed.

    Only the loss of the first replica counts. But a synchronized batch normalization sends its gradient to all
    replicas, so each replica gets a part of every row. This function adds up the parts.

    Args:
        grads: this replica's gradients; their sum over replicas is the gradient of the batch.

    Returns:
        Gradients with the same sum. If another replica has the same index as the first replica, its row is zero.
    """
    tables = {
        index: grad
        for index, grad in enumerate(grads)
        if isinstance(grad, tf.IndexedSlices) and grad.values.shape.rank is not None
    }
    if not tables:
        return list(grads)
    context = tf.distribute.get_replica_context()
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    wanted = context.all_reduce("SUM", [_if(is_first, grad.indices) for grad in tables.values()])
    # Replicas that draw different random numbers may look up different rows.
    is_same = [
        _column(tf.equal(grad.indices, rows), grad.values) for grad, rows in zip(tables.values(), wanted, strict=True)
    ]
    whole = context.all_reduce(
        "SUM", [_if(same, grad.values) for grad, same in zip(tables.values(), is_same, strict=True)]
    )
    result = list(grads)
    for (index, grad), same, values in zip(tables.items(), is_same, whole, strict=True):
        values = tf.where(same, _if(is_first, values), grad.values)
        result[index] = tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return result


def _if(condition: Any, value: tf.Tensor) -> tf.Tensor:
    return tf.where(condition, value, tf.zeros([], value.dtype))


def _column(flags: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(flags, [-1] + [1] * (values.shape.rank - 1))
