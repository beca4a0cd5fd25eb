"""MirroredStrategy: synchronous training on the devices of one machine, one replica thread a device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import autograph, distribute, quick_scopes
from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.diagnostics.tracebacks import shortened
from replica_engine.errors import DeviceError
from replica_engine.process.interrupts import held_off_once
from replica_engine.strategies.base import ReplicaThreads, check_seconds
from replica_engine.strategies.devices import resolve_devices
from replica_engine.strategies.reductions import Reductions
from replica_engine.strategies.validation import check_call, check_flags, checked_reduction
from replica_engine.threads.cpu_reduction import CpuReduction

# Collectives of two groups with one key fail ("joining a group with size 2, but that group has size 4").
# TensorFlow's own strategies all start at key 1; each of ours starts at one of its own, far above.
_COLLECTIVE_KEYS = itertools.count(1_000_000, 16)


class MirroredExtended(ReplicaThreads, Reductions, distribute.MirroredExtended):
    """The extended half of `MirroredStrategy`: TensorFlow's own, on this library's replica threads.

    Subclass it to change how values are reduced, variables made or datasets distributed, and name your
    class in a strategy's `extended_class`. `docs/custom_strategy.md` shows one.
    """

    def _initialize_strategy(self, devices: Sequence[str]) -> None:
        """The hook that sets up devices and picks the all-reduce when the user gave none."""
        self._for_integers = tf.distribute.ReductionToOneDevice()
        default = self._cross_device_ops is None  # type: ignore[has-type]
        super()._initialize_strategy(devices)
        if default and all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in self._devices):
            self._cross_device_ops = CpuReduction()

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook that reduces many values at once, each by the operations that its dtype takes.

        TensorFlow refuses a batch of which some values are int32, or more than one.
        """
        if self._sums_on_host():  # for which TensorFlow would copy the options first, one by one
            return self._cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)
        results: list[Any] = [None] * len(value_destination_pairs)
        by_ops: dict[int, list[int]] = {}
        for index, (value, _) in enumerate(value_destination_pairs):
            by_ops.setdefault(id(self._get_cross_device_ops(value)), []).append(index)
        for indices in by_ops.values():
            batch = [value_destination_pairs[index] for index in indices]
            for index, reduced in zip(indices, super()._batch_reduce_to(reduce_op, batch, options), strict=True):
                results[index] = reduced
        return results

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """The hook that updates a variable, one replica's component after the other: all of them or none."""
        with held_off_once():
            return super()._update(var, fn, args, kwargs, group)

    def _get_cross_device_ops(self, value: Any) -> tf.distribute.CrossDeviceOps:
        """The operations for one value. One object for all int32, where TensorFlow makes a new one each time."""
        if self._sums_on_host():
            return self._cross_device_ops
        ops = super()._get_cross_device_ops(value)
        if not isinstance(ops, tf.distribute.ReductionToOneDevice):
            return ops
        return self._cross_device_ops if isinstance(self._cross_device_ops, type(ops)) else self._for_integers

    def _sums_on_host(self) -> bool:
        """Whether values of any dtype are reduced by `CpuReduction`."""
        return type(self._cross_device_ops) is CpuReduction and self._use_merge_call()

    def _use_merge_call(self) -> bool:
        """The hook that says whether replicas have to meet to update variables; in XLA they cannot."""
        return not distribute.is_merged() and (tf.executing_eagerly() or super()._use_merge_call())


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """Runs a function on one replica a device, on one machine, and keeps their variables equal.

    A drop-in for `tf.distribute.MirroredStrategy`, and an instance of it: `scope`, `run`, `reduce`, `gather`,
    datasets, Keras `fit`, checkpoints and `extended` work as TensorFlow documents them. Underneath are this
    library's replica threads: made once and reused, several strategies of any size in one process, several
    user threads on one strategy, and errors that name the replica and the line.

    Args:
        devices: device names ("CPU:0", "/gpu:1") or `tf.config.LogicalDevice`s, all of one kind. None takes
            all GPUs, or all logical CPUs where there is no GPU.
        cross_device_ops: a `tf.distribute.CrossDeviceOps` for reductions. None picks NCCL or ring
            collectives on GPUs, and one shared sum on CPUs.
        concurrent: release all replicas at once in eager mode, instead of one after another. For functions
            that do large eager work; Python state that replicas share is then theirs to protect. While a
            function still creates variables, replica 0 goes first.
        timeout: seconds that a replica may take to reach its next sync point, and a merge function to return,
            before `run` raises ReplicaTimeoutError. None waits on. It counts in eager code and while a
            function is traced; a traced step runs inside TensorFlow, out of the engine's sight.
        warn_after: seconds after which a table of who is where is logged, and again after as many. None takes 30,
            or what the environment variable REPLICA_ENGINE_WARN_AFTER says.

    Raises:
        DeviceError: a device that does not exist, is named twice, or is of another kind than the rest.
        ValueError: `timeout` or `warn_after` is not positive.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> with strategy.scope():
        ...     weight = tf.Variable(2.0)
        >>> result = strategy.run(lambda x: weight * x, args=(tf.constant(3.0),))
        >>> float(strategy.reduce("SUM", result, axis=None))
        6.0
    """

    extended_class: type[MirroredExtended] = MirroredExtended
    """The extended half to use; a subclass of the strategy may name its own."""

    def __init__(
        self,
        devices: Sequence[str | tf.config.LogicalDevice] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        *,
        concurrent: bool = False,
        timeout: float | None = None,
        warn_after: float | None = None,
    ):
        check_seconds(timeout=timeout, warn_after=warn_after)
        check_flags(concurrent=concurrent)
        if cross_device_ops is not None and not isinstance(cross_device_ops, tf.distribute.CrossDeviceOps):
            raise DeviceError.no_cross_device_ops(cross_device_ops)
        self._collective_key_base = next(_COLLECTIVE_KEYS)
        extended = self.extended_class(self, resolve_devices(devices), cross_device_ops)
        options = extended.replica_options  # a subclass may have its own; what is passed here goes before
        extended.replica_options = dataclasses.replace(
            options,
            concurrent=concurrent or options.concurrent,
            timeout=options.timeout if timeout is None else timeout,
            warn_after=options.warn_after if warn_after is None else warn_after,
        )
        # Not the parent's __init__, which would make TensorFlow's own extended half.
        tf.distribute.Strategy.__init__(self, extended)

    @autograph.artifact
    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on each replica, with the given arguments; as `tf.distribute.Strategy.run`.

        Args:
            fn: the function, called in replica context; a `tf.function` goes around the whole run.
            args: positional arguments; of a `tf.distribute.DistributedValues` each replica gets its own.
            kwargs: keyword arguments, likewise.
            options: `tf.distribute.RunOptions`.

        Raises:
            MergeCallMismatchError: replicas did not meet at the same merge calls.
            ReplicaMismatchError: they brought tensors of different dtypes or shapes to an all-reduce.
            ReplicaTimeoutError: one did not come back within `timeout`.
            Exception: whatever `fn` or a merge function raised, with notes on which replica it was.
        """
        check_call(fn, args, kwargs)
        try:
            if not autograph.is_out_of_play():
                return super().run(fn, args, kwargs, options)
            with quick_scopes.in_scope(self):  # once, and not again in each of the calls on the way
                return self.extended._call_for_each_replica(fn, args, {} if kwargs is None else kwargs)
        except Exception as error:
            raise shortened(error)

    @autograph.artifact
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """As of every strategy; Python numbers count as tensors.

        Raises:
            ReplicaValueError: `value` cannot be reduced, or `reduce_op` or `axis` is none.
        """
        return super().reduce(*checked_reduction(reduce_op, value, axis))

    def sync_points(self) -> list[SyncPointRecord]:
        """The last sync points of each replica: which, from which line, with what, and when.

        See `replica_engine.sync_points`.
        """
        return self.extended.sync_points()
