"""The extended half of strategies: the hooks of `tf.distribute` that this library changes, in front of a class of it.

`ReplicaThreads` is for strategies of the user's own too. It changes the hooks that call replicas and create variables;
everything else (datasets, reductions) stays as the extended class has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute, reduction
from replica_engine._tf.host_datasets import HostDatasets
from replica_engine.backend import has_backend
from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.diagnostics.misuse import check_outside_replicas
from replica_engine.errors import ReplicaValueError
from replica_engine.strategies import accumulation
from replica_engine.strategies.reductions import NUMBERS, as_tensors, better, is_narrow
from replica_engine.strategies.validation import NOT_REDUCED, as_reduction
from replica_engine.threads.call import ReplicaOptions, ThreadBackend, backend_on_threads, install
from replica_engine.values.rows import are_rows
from replica_engine.values.structure import flatten


class ExtendedHooks(HostDatasets):
    """The hooks that all strategies of this library have in common: values, which may be any structure, and datasets.

    Put it before an extended class of `tf.distribute`.

    Attributes:
        adds_up_rows: whether `_batch_reduce_to` adds up rows of tables whose indices are not the batch's.
    """

    adds_up_rows = False

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        """Like `tf.distribute.StrategyExtended.reduce_to`, with errors that say what to write."""
        try:
            return super().reduce_to(as_reduction(reduce_op), value, destinations, options)
        except (RuntimeError, *NOT_REDUCED) as error:
            raise better(error, "extended.reduce_to", value)

    def batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> list[Any]:
        """Like `tf.distribute.StrategyExtended.batch_reduce_to`; numbers are reduced as `reduce_to` does it."""
        reduce_op, pairs = as_reduction(reduce_op), list(value_destination_pairs)
        if any(isinstance(value, NUMBERS) for value, _ in pairs):
            check_outside_replicas("extended.batch_reduce_to")
            return [self.reduce_to(reduce_op, value, destinations, options) for value, destinations in pairs]
        try:
            return super().batch_reduce_to(reduce_op, pairs, options)
        except (RuntimeError, *NOT_REDUCED) as error:
            raise better(error, "extended.batch_reduce_to", [value for value, _ in pairs])

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce` and `reduce_to`; it reduces one leaf of a structure at a time."""
        if not isinstance(value, distribute.DistributedValues):  # it may have the attributes of the value that it wraps
            leaves, spec = flatten(value, what="the values to reduce")
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
            isinstance(value, (*NUMBERS, np.ndarray))
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
        if self.adds_up_rows and are_rows(value):
            return self._batch_reduce_to(reduce_op, [(value, destinations)], options)[0]
        several_workers = self._in_multi_worker_mode()
        if is_narrow(value) and not several_workers and reduction.adds_on_one_device(value, destinations):
            # TensorFlow would take an object of its own, which rounds after each addition.
            return reduction.QuietReduction().reduce(reduce_op, value, destinations)
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

    Example:
        >>> from replica_engine.strategies import MirroredExtended, ReplicaThreads
        >>> issubclass(MirroredExtended, ReplicaThreads)
        True
    """

    replica_options = ReplicaOptions()

    def __init__(self, *args: Any, **kwargs: Any):
        install()
        super().__init__(*args, **kwargs)

    @functools.cached_property
    def backend(self) -> ThreadBackend:
        """What runs the replicas."""
        return backend_on_threads(self._container_strategy(), self)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The hook of `tf.distribute`: runs `fn` once per replica, in replica context."""
        return self.backend.run(fn, args, kwargs)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The hook that makes variables. It extends Keras' optimizers, before they make their accumulators."""
        accumulation.extend_keras(has_backend)
        return super()._create_variable(next_creator, **kwargs)

    def _use_merge_call(self) -> bool:
        """The hook of `tf.distribute`: an optimizer must not merge in the merge call of `replicate_model`."""
        return not distribute.is_merged() and super()._use_merge_call()

    def sync_points(self) -> list[SyncPointRecord]:
        """Same as `replica_engine.sync_points`."""
        return self.backend.sync_points()


class ThreadHooks(ReplicaThreads, ExtendedHooks):
    """What the extended halves of `MirroredStrategy` and `MultiWorkerMirroredStrategy` have in common."""

    adds_up_rows = True
