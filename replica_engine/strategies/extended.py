"""The extended half of strategies: the hooks of `tf.distribute` that this library changes, in front of a class of it.

`ReplicaThreads` is for strategies of the user's own too. It changes the hooks that call replicas and create variables;
everything else (datasets, reductions) stays as the extended class has it.

TensorFlow's reductions take tensors. They fail on other values that replicas may return: Python numbers, None, ragged
tensors, a plain zero. So these are prepared for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics import flight_record, misuse
from replica_engine.errors import ReplicaValueError, ScopeError, base
from replica_engine.strategies import argument_checks, keras_scopes
from replica_engine.threads.replica_run import ReplicaOptions, ThreadBackend, backend_on_threads, install
from replica_engine.upstream import distribute, host_datasets
from replica_engine.values import structure, table_rows

_NUMBERS = (bool, int, float, complex, np.generic)


class ExtendedHooks(host_datasets.HostDatasets):
    """The hooks that all strategies of this library have in common: values, which may be any structure, and datasets.

    Put it before an extended class of `tf.distribute`, and give it a `backend`.
    """

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        """Like `tf.distribute.StrategyExtended.reduce_to`, with errors that say what to write."""
        try:
            return super().reduce_to(argument_checks.as_reduction(reduce_op), value, destinations, options)
        except (RuntimeError, *argument_checks.NOT_REDUCED) as error:
            raise _better(error, "extended.reduce_to", value)

    def batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> list[Any]:
        """Like `tf.distribute.StrategyExtended.batch_reduce_to`; numbers are reduced as `reduce_to` does it."""
        reduce_op, pairs = argument_checks.as_reduction(reduce_op), list(value_destination_pairs)
        if any(isinstance(value, _NUMBERS) for value, _ in pairs):
            misuse.check_outside_replicas("extended.batch_reduce_to")
            return [self.reduce_to(reduce_op, value, destinations, options) for value, destinations in pairs]
        try:
            return super().batch_reduce_to(reduce_op, pairs, options)
        except (RuntimeError, *argument_checks.NOT_REDUCED) as error:
            raise _better(error, "extended.batch_reduce_to", [value for value, _ in pairs])

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce` and `reduce_to`; it reduces one leaf of a structure at a time."""
        if not isinstance(value, distribute.DistributedValues):  # it may have the attributes of the value that it wraps
            leaves, spec = structure.flatten(value, what="the values to reduce")
            if not spec.is_leaf:
                return spec.rebuild([self._reduce_to(reduce_op, leaf, destinations, options) for leaf in leaves])
            try:
                if tf.nest.is_nested(value):  # a structure that only TensorFlow knows: a deque, a range
                    return tf.nest.map_structure(
                        lambda leaf: self._reduce_to(reduce_op, leaf, destinations, options), value
                    )
            except RecursionError:
                raise ReplicaValueError.endless("the values to reduce") from None
        if (
            isinstance(value, (*_NUMBERS, np.ndarray))
            and isinstance(destinations, distribute.DistributedVariable)
            and reduce_op == tf.distribute.ReduceOp.SUM
        ):
            # Every replica of this worker adds one number, which became one value. Those of others may add another.
            number = tf.convert_to_tensor(value, destinations.dtype)
            value = distribute.PerReplica([number for _ in self.worker_devices])
        if isinstance(value, (bool, int, float, complex)) and not value:
            return value  # the sum of zeros is zero, and so is their mean
        if distribute.is_mirrored(value) and reduce_op == tf.distribute.ReduceOp.SUM:
            raise ReplicaValueError.sum_of_one(value, isinstance(value, tf.Variable))
        value = as_tensors(value, self.worker_devices)
        # On threads, the hook adds up those that are not the batch's.
        if table_rows.are_rows(value) and not self.backend.compiles:
            return self._batch_reduce_to(reduce_op, [(value, destinations)], options)[0]
        whole = _is_dense(value) and len(self.worker_devices) == self._num_replicas_in_sync  # of all workers
        if whole and distribute.adds_on_one_device(value, destinations):
            # TensorFlow would take an object of its own, whose sums have no order, and round after each addition.
            return distribute.QuietReduction().reduce(reduce_op, value, destinations)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The hook of `broadcast_to`. TensorFlow's asks for the truth of the values of a tensor, not for its device."""
        if isinstance(destinations, tf.Tensor):  # the value of an only replica
            destinations = destinations.device or None
        return super()._broadcast_to(tensor, destinations)


class ReplicaThreads(tf.distribute.StrategyExtended):
    """Runs the replicas of a `tf.distribute` extended class on this library's threads.

    Put it before an extended class in the list of base classes. `docs/custom_strategy.md` describes the hooks.

    Attributes:
        replica_options: how replicas run; set it on the class or on the instance.
        backend: what runs the replicas.

    Example:
        >>> from replica_engine.strategies import MirroredExtended, ReplicaThreads
        >>> issubclass(MirroredExtended, ReplicaThreads)
        True
    """

    replica_options = ReplicaOptions()
    _backend: ThreadBackend | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        install()
        super().__init__(*args, **kwargs)

    @property
    def backend(self) -> ThreadBackend:
        """What runs the replicas; it is made when it is first asked for."""
        if self._backend is None:
            self._backend = backend_on_threads(self._container_strategy(), self)
        return self._backend

    @backend.setter
    def backend(self, value: object) -> NoReturn:
        raise AttributeError(
            "`backend` is what runs the replicas of an extended half with ReplicaThreads, and cannot be set. Give your "
            "own attribute another name."
        )

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The hook of `tf.distribute`: runs `fn` once per replica, in replica context."""
        return self.backend.run(fn, args, kwargs)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The hook that makes variables. It extends Keras' optimizers, before they make their accumulators."""
        keras_scopes.extend_optimizers()
        return super()._create_variable(next_creator, **kwargs)

    def _use_merge_call(self) -> bool:
        """The hook of `tf.distribute`: an optimizer must not merge in the merge call of `replicate_model`."""
        return not distribute.is_merged() and super()._use_merge_call()

    def sync_points(self) -> list[flight_record.SyncPointRecord]:
        """Same as `replica_engine.sync_points`."""
        return self.backend.sync_points()


def _is_dense(value: object) -> bool:
    """Whether each replica has a tensor of its own."""
    if not isinstance(value, (distribute.PerReplica, distribute.DistributedVariable)) or distribute.is_mirrored(value):
        return False
    return isinstance(value.values[0], (tf.Tensor, tf.Variable))


def by_dtype(pairs: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Reduces pairs of a value and its destination, those of each dtype in a call of its own.

    TensorFlow packs a batch into one tensor, and fails at two dtypes.
    """
    places: dict[tuple[bool, tf.DType], list[int]] = {}
    for place, (value, _) in enumerate(pairs):
        first = value.values[0] if isinstance(value, distribute.DistributedValues) else value
        places.setdefault((type(first) is tf.IndexedSlices, tf.as_dtype(first.dtype)), []).append(place)
    results: list[Any] = [None] * len(pairs)
    for indices in places.values():
        for index, reduced in zip(indices, reduce([pairs[index] for index in indices]), strict=True):
            results[index] = reduced
    return results


def _better(error: Exception, method: str, value: object) -> Exception:
    """The error that says what an error of TensorFlow in a method of the extended half means; otherwise that error."""
    try:
        misuse.check_outside_replicas(method)
    except ScopeError as scope:
        scope.__suppress_context__ = True
        return scope
    return argument_checks.not_reduced(error, value) if isinstance(error, argument_checks.NOT_REDUCED) else error


def as_tensors(value: object, devices: Sequence[str]) -> object:
    """Converts the numbers in a distributed value to tensors; returns any other value unchanged.

    Args:
        value: the value.
        devices: the devices of the replicas, in their order.

    Raises:
        ReplicaValueError: a component is neither a tensor nor a number.
    """
    if not isinstance(value, distribute.DistributedValues) or isinstance(value, distribute.DistributedVariable):
        return value
    if all(map(_is_tensor, value.values)):
        return value
    return distribute.PerReplica(
        tuple(_as_tensor(component, index, devices) for index, component in enumerate(value.values))
    )


def _is_tensor(component: object) -> bool:
    if isinstance(component, tf.IndexedSlices):
        return isinstance(component.values, tf.Tensor) and isinstance(component.indices, tf.Tensor)
    return isinstance(component, (tf.Tensor, tf.Variable))


def _as_tensor(component: object, index: int, devices: Sequence[str]) -> object:
    if _is_tensor(component):
        return component
    if not isinstance(component, (*_NUMBERS, np.ndarray)):
        raise ReplicaValueError(
            f"Values of replicas are reduced as tensors, but a replica has {base.brief(component)}. Return tensors or "
            "numbers from the replicas. For ragged and sparse tensors, reduce the parts: x.flat_values, "
            "tf.sparse.to_dense(x)."
        )
    with tf.device(devices[index] if index < len(devices) else None):
        return structure.as_tensor(component, f"The value of replica {index}")
