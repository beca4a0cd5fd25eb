"""A compiled step of a batch that does not divide by the replicas: each replica takes one of two branches.

A program has the same shapes on all replicas, but the shards of 13 samples on 4 replicas have 4, 3, 3 and 3 samples. So
each replica gets 4 rows and takes one of two branches, which differ in how many of the rows they read. Each branch
computes exactly the samples of its shard. Every collective comes after the branches. Some steps have a collective in
the middle: a synchronized batch normalization, a mask, or the model's own `train_step`, which may continue after its
update. Such steps cannot be divided, so every replica computes the whole batch. The same happens if both branches would
return gradients of an unknown number of table rows, since XLA needs equal shapes in both; and if the model works with
strings or lookup tables, which the host does outside of branches only.
"""

from __future__ import annotations

from typing import TypeAlias

import keras
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import CollectiveError
from replica_engine.keras.shard import Shard, Update
from replica_engine.keras.shard_step import Logs, ShardedStep, across_replicas
from replica_engine.values import samples, table_rows
from replica_engine.xla.body import apart
from replica_engine.xla.soft_placement.host_op_kinds import string_work

Parts: TypeAlias = "tf.Tensor | list[tf.IndexedSlices]"
"""A gradient; that of a table in parts, one for each lookup."""


def in_branches(step: ShardedStep, data: object, total: tf.Tensor, size: int, replicas: int) -> dict[str, tf.Tensor]:
    """Runs a step on this replica's shard.

    Args:
        step: the step.
        data: the rows of a larger shard; a smaller one has the last of them.
        total: the number of samples of all replicas.
        size: the number of samples of a smaller shard.
        replicas: the number of replicas.

    Returns:
        The logs of the step over all replicas.

    Raises:
        CollectiveError: the step cannot be divided so.
    """
    # The larger one is traced first: the other one pads its gradients to these shapes.
    larger = _Branch(step, data, Shard(size + 1, total, replicas))
    smaller = _Branch(step, data, Shard(size, total, replicas), larger)
    is_larger = xla.replica_id() < total % replicas
    logs = larger.finish(tf.cond(is_larger, larger.run, smaller.run), smaller)
    weight = tf.where(is_larger, larger.share.weight("float64"), smaller.share.weight("float64"))
    return across_replicas(step.model, logs, weight)


class _Branch:
    """A step on a shard, up to the first collective; `finish` does the update of weights.

    Args:
        step: the step.
        data: rows; the last ones are the shard.
        share: the shard.
        larger: the branch of the larger shard, which is traced first; None if this is that branch.
    """

    def __init__(self, step: ShardedStep, data: object, share: Shard, larger: _Branch | None = None):
        self.share = share
        self._step, self._data, self._larger = step, data, larger

    def run(self) -> tuple[dict[str, tf.Tensor], list[object]]:
        """Traces the step; returns its logs and the gradients of its update, if it has one."""
        # The last rows: the first one of a smaller shard is that of the replica before it.
        data = samples.take(self._data, samples.count_in_graph(self._data) - self.share.rows, None)
        deferred: list[Update] = []
        self.share.deferred = deferred
        self.share.results.clear()
        with self._step.followed(data, self.share), apart():
            self._logs = Logs(self._step.method(data), self.share)
        if len(deferred) > 1:
            raise CollectiveError.apart("A second update of weights")
        if string_work(tf.compat.v1.get_default_graph().get_operations()) is not None:
            raise CollectiveError.apart("Work with strings or a lookup table")
        self._update = deferred[0] if deferred else None
        grads = self._update[1] if self._update is not None else []
        if any(isinstance(grad, tf.IndexedSlices) and grad.indices.shape[0] is None for grad in grads):
            # Text lookup: both branches must return equally many rows, but the number is unknown while tracing.
            raise CollectiveError.apart("A gradient of an unknown number of rows of a table")
        self._grads = [table_rows.pieces(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
        if self._larger is not None:
            self._grads = [_like(grad, wanted) for grad, wanted in zip(self._grads, self._larger._grads, strict=True)]
        return self._logs.values, [_tensors(grad) for grad in self._grads if grad is not None]

    def finish(self, outputs: tuple[dict[str, tf.Tensor], list[object]], smaller: _Branch) -> Logs:
        """Does the update with the gradients of the branch that ran; returns the logs."""
        self._logs.values, gradients = outputs
        if self._update is not None:
            apply, _, variables = self._update
            left = iter(gradients)
            grads = [
                None if grad is None else _gradient(next(left), grad, other, variable)
                for grad, other, variable in zip(self._grads, smaller._grads, variables, strict=True)
            ]
            apply(grads, variables)
        return self._logs


def _tensors(grad: Parts) -> tf.Tensor | list[list[tf.Tensor]]:
    return [[part.values, part.indices] for part in grad] if isinstance(grad, list) else tf.convert_to_tensor(grad)


def _gradient(
    tensors: tf.Tensor | list[list[tf.Tensor]], like: Parts, other: Parts, variable: keras.Variable
) -> tf.Tensor | tf.IndexedSlices:
    """The gradient of the branch that ran; `like` and `other` are those of both branches."""
    if not isinstance(like, list):
        return tensors
    parts = []
    for (values, indices), one, two in zip(tensors, like, other, strict=True):
        if table_rows.origin(one.indices) is not None and table_rows.origin(two.indices) is not None:
            table_rows.note_from_branches(indices)
        shape = tf.constant(tuple(variable.shape), indices.dtype)
        parts.append(tf.IndexedSlices(values, indices, dense_shape=shape))
    return table_rows.joined(parts)


def _like(grad: Parts, wanted: Parts) -> Parts:
    """Pads a gradient to the shape of `wanted`: repeats one table row with zeros as its values."""
    if isinstance(grad, list):
        return [_like(part, other) for part, other in zip(grad, wanted, strict=True)]
    if not isinstance(grad, tf.IndexedSlices) or isinstance(wanted, list):
        return grad
    if (more := wanted.indices.shape[0] - grad.indices.shape[0]) == 0:
        return grad
    # The row that is repeated gets zeros, so that the sum of its rows stays.
    indices = tf.concat([grad.indices, tf.repeat(grad.indices[:1], more)], 0)
    values = tf.concat([grad.values, tf.zeros([more, *grad.values.shape[1:]], grad.values.dtype)], 0)
    return tf.IndexedSlices(values, indices, grad.dense_shape)
