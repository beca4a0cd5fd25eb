"""MirroredStrategy: synchronous training on the devices of one machine, one replica thread a device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine import startup
from replica_engine._compat import distribute
from replica_engine.strategies.base import ReplicaThreads
from replica_engine.strategies.devices import resolve_devices

# Collectives of two groups with one key fail ("joining a group with size 2, but that group has size 4").
# TensorFlow's own strategies all start at key 1; each of ours starts at one of its own, far above.
_COLLECTIVE_KEYS = itertools.count(1_000_000, 16)


class MirroredExtended(ReplicaThreads, distribute.MirroredExtended):
    """The extended half of `MirroredStrategy`: TensorFlow's own, on this library's replica threads.

    Subclass it to change how values are reduced, variables made or datasets distributed, and name your
    class in a strategy's `extended_class`. `docs/custom_strategy.md` shows one.
    """

    def _initialize_strategy(self, devices: Sequence[str]) -> None:
        """The hook that sets up devices and picks the all-reduce when the user gave none.

        CPU devices share one memory, so the sum is made once and every replica is given that: fewer
        copies than a ring makes, no op that blocks a thread of TensorFlow's pool until its peers arrive, and
        replicas that are bitwise equal by construction.
        """
        self._for_integers = tf.distribute.ReductionToOneDevice()
        default = self._cross_device_ops is None  # type: ignore[has-type]
        super()._initialize_strategy(devices)
        if default and all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in self._devices):
            self._cross_device_ops = tf.distribute.ReductionToOneDevice()

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook that reduces many values at once, each by the operations that its dtype takes.

        TensorFlow refuses a batch of which some values are int32, or more than one.
        """
        results: list[Any] = [None] * len(value_destination_pairs)
        by_ops: dict[int, list[int]] = {}
        for index, (value, _) in enumerate(value_destination_pairs):
            by_ops.setdefault(id(self._get_cross_device_ops(value)), []).append(index)
        for indices in by_ops.values():
            batch = [value_destination_pairs[index] for index in indices]
            for index, reduced in zip(indices, super()._batch_reduce_to(reduce_op, batch, options), strict=True):
                results[index] = reduced
        return results

    def _get_cross_device_ops(self, value: Any) -> tf.distribute.CrossDeviceOps:
        """The operations for one value. One object for all int32, where TensorFlow makes a new one each time."""
        ops = super()._get_cross_device_ops(value)
        if not isinstance(ops, tf.distribute.ReductionToOneDevice):
            return ops
        return self._cross_device_ops if isinstance(self._cross_device_ops, type(ops)) else self._for_integers

    def _use_merge_call(self) -> bool:
        """The hook that says whether replicas have to meet to update variables."""
        return super()._use_merge_call() and not distribute.is_merged()

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        self._warn_if_cramped()
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        self._warn_if_cramped()
        return super()._distribute_datasets_from_function(dataset_fn, options)

    def _warn_if_cramped(self) -> None:
        startup.warn_if_cramped(len(self._devices), tf.config.threading.get_inter_op_parallelism_threads())


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
        timeout: seconds a replica may take to reach its next sync point before `run` raises
            ReplicaTimeoutError. None warns every 30 seconds and waits on. It counts in eager code and while a
            function is traced; a traced step runs inside TensorFlow, out of the engine's sight.

    Raises:
        DeviceError: a device that does not exist, is named twice, or is of another kind than the rest.
        ValueError: `timeout` is not positive.

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
    ):
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise ValueError(f"timeout is in seconds and must be positive, or None to wait; got {timeout!r}.")
        self._collective_key_base = next(_COLLECTIVE_KEYS)
        extended = self.extended_class(self, resolve_devices(devices), cross_device_ops)
        options = extended.replica_options  # a subclass may have its own; what is passed here goes before
        extended.replica_options = dataclasses.replace(
            options,
            concurrent=concurrent or options.concurrent,
            timeout=options.timeout if timeout is None else timeout,
        )
        # Not the parent's __init__, which would make TensorFlow's own extended half.
        tf.distribute.Strategy.__init__(self, extended)
