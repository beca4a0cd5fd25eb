"""The replica context of a compiled body, which stands for all replicas at once.

A body is traced once, so a value in it is N values, one on each replica, and bringing them together is an
operation of the program. A merge call runs its function while the body is traced: what a merge function does
in cross-replica context (reduce, update, local results) becomes a collective or a plain op.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine import xla
from replica_engine._tf import autograph, distribute
from replica_engine.errors import CollectiveError
from replica_engine.values.tensors import as_tensor


class BodyReplicaContext(tf.distribute.ReplicaContext):
    """What `tf.distribute.get_replica_context()` returns in a compiled body.

    TensorFlow's distributed variables ask the context for an index; to them this is replica 0, whose variable
    stands for all. To the user, the replica id is a tensor.

    Args:
        strategy: the strategy.
        is_step: whether it is that of a step of `run_steps`, in which `run` and `reduce` of the strategy work too.
    """

    def __init__(self, strategy: tf.distribute.Strategy, is_step: bool = False):
        super().__init__(strategy, 0)
        self.is_step = is_step

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The id of the replica that runs this: a scalar int32 tensor."""
        return xla.replica_id()

    @autograph.artifact
    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `merge_fn` in cross-replica context, where its arguments stand for those of all replicas.

        As `tf.distribute.ReplicaContext.merge_call`, except that it may be called in branches, loops and nested
        functions, and that the arguments are tensors, not `PerReplica`s.
        """
        return distribute.first_values(super().merge_call(merge_fn, args, kwargs))

    @autograph.artifact
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """As `tf.distribute.ReplicaContext.all_reduce`; "MIN" and "MAX" work too.

        Args:
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
            value: a tensor, `tf.IndexedSlices` or nested structure of them.
            options: of no effect: XLA decides how.
        """
        return tf.nest.map_structure(lambda leaf: reduce_leaf(reduce_op, leaf), value)

    @autograph.artifact
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """As `tf.distribute.ReplicaContext.all_gather`, for shapes that are equal on all replicas."""
        return tf.nest.map_structure(lambda leaf: gather_leaf(leaf, axis), value)

    @property
    def devices(self) -> list:
        """The host, where values are before and after a run."""
        return ["/device:CPU:0"]


def reduce_leaf(reduce_op: Any, value: Any) -> Any:
    """One value reduced over replicas; sparse ones stay sparse."""
    if isinstance(value, tf.IndexedSlices) and value.values.shape.rank is None:
        value = tf.convert_to_tensor(value)
    if isinstance(value, tf.IndexedSlices):
        values = xla.all_gather(value.values, axis=0)
        if str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN":
            values /= tf.cast(xla.num_replicas(), values.dtype)
        return tf.IndexedSlices(values, xla.all_gather(value.indices, axis=0), value.dense_shape)
    tensor = as_tensor(value, "The value to all_reduce")
    if tensor.dtype.is_integer and str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN":
        return xla.cross_replica_sum(tensor) / xla.num_replicas()  # a fraction, as of tf.distribute
    return xla.all_reduce(tensor, reduce_op)


def gather_leaf(value: Any, axis: int) -> tf.Tensor:
    """One value of each replica, concatenated."""
    if isinstance(value, (tf.IndexedSlices, tf.SparseTensor)):
        raise NotImplementedError("all_gather does not support IndexedSlices/SparseTensor")
    tensor = as_tensor(value, "The value to all_gather")
    if tensor.shape.rank == 0:
        raise CollectiveError.no_axis("all_gather", axis, str(tensor.shape))  # as in tf.distribute
    return xla.all_gather(tensor, axis=axis)
