"""The replica context: what `tf.distribute.get_replica_context()` returns inside a replica."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from replica_engine._compat import autograph, distribute, thread_state
from replica_engine.engine import Replica, current_replica
from replica_engine.errors import MergeCallGraphError, NotInReplicaError
from replica_engine.replica.location import identity, sync_point, user_location


@dataclass(frozen=True)
class MergeRequest:
    """What one replica brings to a merge call, and the state the merge function continues in."""

    merge_fn: Callable[..., Any]
    args: Any
    kwargs: Any
    name_scope: str
    variable_scope: Any
    control_inputs: frozenset
    eager: bool


class ReplicaContext(tf.distribute.ReplicaContext):
    """A `tf.distribute.ReplicaContext` whose merge calls pause a replica thread of this library.

    Replicas get it from `tf.distribute.get_replica_context()`; whoever writes a strategy may subclass it
    and name it in `ReplicaOptions.context_class`.

    Args:
        strategy: the strategy whose replica this is.
        replica_id_in_sync_group: which one, from 0.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> def fn():
        ...     context = tf.distribute.get_replica_context()
        ...     return context.merge_call(lambda strategy, x: x + 1, args=(1,))
        >>> strategy.run(fn)
        2
    """

    _replica: Replica | None = None
    _graph: tf.Graph | None = None
    _device: str | None = None
    _detail: tuple = ()

    def attach(self, replica: Replica, graph: tf.Graph, device: str) -> None:
        """Says which replica of the engine this is, in which graph `run` was called, and the full device name."""
        self._replica = replica
        self._graph = graph
        self._device = device

    def detach(self) -> None:
        """Lets go of the run and, but for a weak reference, of the strategy: the replica's body is over."""
        self._replica = self._graph = None
        distribute.hold_weakly(self)

    @autograph.artifact
    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Waits for all replicas, runs `merge_fn` once for all of them, and returns this replica's part.

        As `tf.distribute.ReplicaContext.merge_call`.

        Args:
            merge_fn: called in cross-replica context with the strategy and the regrouped arguments; the same
                function on every replica.
            args: positional arguments after the strategy.
            kwargs: keyword arguments.

        Raises:
            MergeCallMismatchError: out of `run`, if the replicas do not meet here.
        """
        with self._detailed(*self._detail, identity(merge_fn)):
            return super().merge_call(merge_fn, args, kwargs)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Pauses this replica until all have come here and `merge_fn` has run; returns this one's part.

        Raises:
            MergeCallGraphError: made while a graph is built that the merge function could not see.
            NotInReplicaError: made from a thread that is not running this replica.
        """
        replica = self._replica
        if replica is None or current_replica() is not replica:
            raise NotInReplicaError(threading.current_thread().name)
        if thread_state.default_graph() is not self._graph:
            filename, lineno, function = user_location(replica)
            raise MergeCallGraphError(str(replica), f"{filename}:{lineno} in {function}")
        return replica.pause(
            sync_point(merge_fn, replica, self._detail),
            MergeRequest(
                merge_fn=merge_fn,
                args=args,
                kwargs=kwargs,
                name_scope=tf.get_current_name_scope(),
                variable_scope=thread_state.current_variable_scope(),
                control_inputs=frozenset(thread_state.control_inputs(self._graph)),
                eager=tf.executing_eagerly(),
            ),
        )

    @autograph.artifact
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces `value` over all replicas; each gets the result.

        As `tf.distribute.ReplicaContext.all_reduce`, except that a tensor that is the very same object on
        all replicas counts once for each of them, and that Python numbers are taken as tensors.

        Args:
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
            value: a tensor, `tf.IndexedSlices` or nested structure of them, of equal shapes on all replicas.
            options: `tf.distribute.experimental.CommunicationOptions`.

        Returns:
            The reduced value, in the structure of `value`.
        """
        with self._detailed("all_reduce", str(getattr(reduce_op, "value", reduce_op)).upper()):
            return super().all_reduce(reduce_op, tf.nest.map_structure(self._own, value), options)

    @autograph.artifact
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates `value` of all replicas along `axis`; each gets the result.

        As `tf.distribute.ReplicaContext.all_gather`, with the exceptions of `all_reduce`.

        Args:
            value: a tensor or nested structure of tensors; shapes may differ along `axis` only.
            axis: the dimension to concatenate along.
            options: `tf.distribute.experimental.CommunicationOptions`.
        """
        with self._detailed("all_gather", axis):
            return super().all_gather(tf.nest.map_structure(self._own, value), axis, options)

    @contextlib.contextmanager
    def _detailed(self, *detail: Any) -> Iterator[None]:
        """Merge calls made inside meet only those of the same detail: a SUM does not meet a MEAN."""
        before, self._detail = self._detail, detail
        try:
            yield
        finally:
            self._detail = before

    def _own(self, value: Any) -> Any:
        """`value` as a tensor of this replica's own.

        Regrouping takes one object on all replicas for one value, not for N equal ones, and a sum over
        replicas of one value is that value: TensorFlow returns x where N * x is meant.
        """
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self._own(value.values), value.indices, value.dense_shape)
        tensor = tf.convert_to_tensor(value)
        if tf.executing_eagerly() and tensor.device == self._device:
            return tensor  # No other replica runs on this device, so none can own it as well.
        return tf.identity(tensor)

    @property
    def devices(self) -> list:
        """The device this replica runs on, in a list of one list, as `tf.distribute` has it."""
        return super().devices if self._device is None else [[self._device]]
