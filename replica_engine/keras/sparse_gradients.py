"""Gradients of embedding tables, which are rows with their indices: a row that was looked up twice is there twice.

Keras does not add up duplicate rows. Adam squares each of them, and clipping by norm takes the norm of all of them. So
a row that is split into two parts is another gradient to an optimizer than the row itself, although both add the same
to the table. Together, the replicas must have the rows that one device has: each once, and otherwise zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def of_whole_batch(grads: Sequence[Any]) -> list[Any]:
    """Moves the rows of tables to the first replica, for a batch that every replica has computed.

    The loss counts on the first replica only. But in a synchronized batch normalization its gradient goes to all
    replicas: each gets a part of every row. The parts are added up here.

    Args:
        grads: this replica's gradients; their sum over replicas is the gradient of the batch.

    Returns:
        Gradients with the same sum. Where another replica has the same index as the first, its row is zero.
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
