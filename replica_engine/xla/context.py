"""The replica context of a compiled body; this one context stands for all replicas.

A body is traced once, so each tensor in it stands for N values, one on each replica, and a collective is an op of the
program. A merge call runs its function while the body is traced: everything that the merge function does in
cross-replica context (reduce, update, local results) becomes a collective or a plain op.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.graphs import autograph
from replica_engine.errors import CollectiveError, NotInReplicaError, ReplicaValueError
from replica_engine.errors.inputs import elsewhere
from replica_engine.values import late_weights, rows
from replica_engine.values.structure import as_axis, as_tensor
from replica_engine.xla.body import in_body, num_replicas, replica_id
from replica_engine.xla.collectives import all_gather, all_reduce, all_to_all, cross_replica_sum, reduce_scatter
from replica_engine.xla.constraints import logical_device
from replica_engine.xla.own_values import own_value, own_values


class BodyReplicaContext(tf.distribute.ReplicaContext):
    """The object that `tf.distribute.get_replica_context()` returns in a compiled body.

    TensorFlow's distributed variables ask the context for a replica index. The context answers 0, because the variable
    of replica 0 stands for the variables of all replicas. User code gets the replica id as a tensor.

    Args:
        strategy: the strategy.
        is_step: whether the body is a step of `run_steps`, in which `run` and `reduce` of the strategy also work.
    """

    def __init__(self, strategy: tf.distribute.Strategy, is_step: bool = False):
        super().__init__(strategy, 0)
        self.is_step = is_step

    if not TYPE_CHECKING:  # a type checker would take each name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for an attribute that is not found: says what to write for one that the strategy has."""
            return elsewhere(self, "replica", name)

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The id of the replica that runs this: a scalar int32 tensor."""
        return replica_id()

    @autograph.artifact
    def merge_call(self, merge_fn: Callable[..., object], args: object = (), kwargs: object = None) -> Any:
        """Runs `merge_fn` in cross-replica context; each tensor argument stands for the values of all replicas.

        Like `tf.distribute.ReplicaContext.merge_call`, with two differences: it may be called in branches, loops and
        nested functions, and the arguments are tensors instead of `PerReplica`s.
        """
        _check_in_run()
        if not isinstance(args, (list, tuple)):
            raise ReplicaValueError.no_positional(args)
        return distribute.first_values(super().merge_call(merge_fn, own_values(args), own_values(kwargs)))

    @autograph.artifact
    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: object, options: object = None) -> Any:
        """Reduces `value` over all replicas, like `tf.distribute.ReplicaContext.all_reduce`; "MIN" and "MAX" work too.

        Args:
            reduce_op: "SUM", "MEAN", "MIN" or "MAX", or a `tf.distribute.ReduceOp`.
            value: a tensor, `tf.IndexedSlices` or nested structure of them.
            options: ignored; XLA decides how to reduce.
        """
        return _of_leaves(value, lambda leaf: reduce_leaf(reduce_op, leaf))

    @autograph.artifact
    def all_gather(self, value: object, axis: int, options: object = None) -> Any:
        """Like `tf.distribute.ReplicaContext.all_gather`; shapes must be equal on all replicas."""
        return _of_leaves(value, lambda leaf: gather_leaf(leaf, axis))

    @autograph.artifact
    def reduce_scatter(self, value: object, axis: int = 0) -> Any:
        """The sum over all replicas, of which replica i gets part i along `axis`; as `replica_engine.ReplicaContext`'s.

        Args:
            value: a tensor or nested structure of tensors, of equal shapes on all replicas.
            axis: the dimension to divide; its size must be a multiple of the number of replicas.
        """
        return _of_leaves(value, lambda leaf: reduce_scatter(leaf, axis))

    @autograph.artifact
    def all_to_all(self, value: object, split_axis: int, concat_axis: int) -> Any:
        """Sends part i along `split_axis` to replica i, and joins the received parts along `concat_axis`.

        Args:
            value: a tensor or nested structure of tensors, of equal shapes on all replicas.
            split_axis: the dimension to split; its size must be a multiple of the number of replicas.
            concat_axis: the dimension to concatenate along.
        """
        return _of_leaves(value, lambda leaf: all_to_all(leaf, split_axis, concat_axis))

    def experimental_logical_device(self, logical_device_id: int) -> contextlib.AbstractContextManager[None]:
        """As in the context of `tf.distribute.TPUStrategy`: names a device of the replica; XLA chooses them."""
        body = in_body()
        count = 1 if body is None or body.mesh is None else body.mesh.size
        return logical_device(logical_device_id, count)

    @property
    def devices(self) -> list:
        """The host, because values are on the host before and after a run."""
        return ["/device:CPU:0"]


def _as_tensor(
    value: distribute.PerReplica, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
) -> object:
    """TensorFlow's hook that makes a tensor of a value of several replicas that a body uses without being given it.

    Each replica gets its own value, as on replica threads.
    """
    context = tf.distribute.get_replica_context()
    if not isinstance(context, BodyReplicaContext) or in_body() is None:
        return NotImplemented
    return own_value(value, dtype)


@functools.cache
def use_own_values() -> None:
    """Lets bodies use values of several replicas that they are not given; once per process."""
    tf.register_tensor_conversion_function(distribute.PerReplica, _as_tensor, priority=80)  # TensorFlow's has 100


def _check_in_run() -> None:
    """Raises NotInReplicaError if no body is being traced here."""
    if in_body() is None:
        raise NotInReplicaError.used_after_run()


def _of_leaves(value: object, exchange: Callable[[Any], object]) -> Any:
    """A structure of values, each of which the replicas exchange."""
    _check_in_run()
    return late_weights.reduced(value, functools.partial(tf.nest.map_structure, exchange))


_SPARSE = ("SUM", "MEAN")  # reductions of which the result of sparse values is sparse


def reduce_leaf(reduce_op: tf.distribute.ReduceOp | str, value: object) -> tf.Tensor | tf.IndexedSlices:
    """Reduces one value over replicas; a sparse value stays sparse if its rank is known."""
    name = str(getattr(reduce_op, "value", reduce_op)).upper()
    if isinstance(value, tf.IndexedSlices) and value.values.dtype == tf.bool:
        raise CollectiveError.wrong_dtype(name, "bool")
    if isinstance(value, tf.IndexedSlices) and (value.values.shape.rank is None or name not in _SPARSE):
        value = tf.convert_to_tensor(value)
    if isinstance(value, tf.IndexedSlices):
        return rows.joined([_reduced_rows(name, part) for part in rows.pieces(value)])
    tensor = as_tensor(value, "The value to all_reduce")
    if tensor.dtype.is_integer and name == "MEAN":
        return cross_replica_sum(tensor) / num_replicas()  # a fraction, as in tf.distribute
    return all_reduce(tensor, reduce_op)


def _reduced_rows(name: str, value: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of all replicas if their indices depend on no input of the step; joins them otherwise."""
    body, origin = in_body(), rows.origin(value.indices)
    shape = value.dense_shape if value.dense_shape is None else tf.convert_to_tensor(value.dense_shape)
    values = value.values
    if name == "MEAN":
        values /= tf.cast(num_replicas(), values.dtype)
    is_of_one_process = body is not None and body.own == body.size
    if origin is not None and not origin.of_branches and (is_of_one_process or not origin.of_process):
        return tf.IndexedSlices(cross_replica_sum(values), value.indices, shape)  # one program has the same for all
    together = tf.IndexedSlices(all_gather(values, axis=0), all_gather(value.indices, axis=0), shape)
    return together if origin is None else rows.compared(together, num_replicas())


def gather_leaf(value: object, axis: int) -> tf.Tensor:
    """Concatenates the values of all replicas along `axis`."""
    if isinstance(value, (tf.IndexedSlices, tf.SparseTensor)):
        raise NotImplementedError("all_gather does not support IndexedSlices/SparseTensor")
    tensor = as_tensor(value, "The value to all_gather")
    if tensor.shape.rank == 0:
        raise CollectiveError.no_axis(
            "all_gather", as_axis("all_gather", axis), str(tensor.shape)
        )  # as in tf.distribute
    return all_gather(tensor, axis=axis)
