"""What `TPUStrategy` does where the job has several workers. In a process on its own, nothing here is used.

A worker has the values of its own replicas. Inside a body nothing changes: a collective is an op of the program, which
runs on the devices of all workers. In cross-replica context, what concerns all replicas is a small program of its own.
So all workers must reduce, read and make variables in the same order, as they must launch steps in the same order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine import xla
from replica_engine._tf import collectives, distribute, variables
from replica_engine._tf.graphs import xla_ops
from replica_engine.diagnostics.user_frames import calling_line
from replica_engine.hosts import Member
from replica_engine.pjrt import exchange
from replica_engine.pjrt.group import DeviceGroup, is_needed_by_a_program
from replica_engine.strategies.multi_worker.launches import of_variable
from replica_engine.strategies.reductions import as_tensors
from replica_engine.strategies.saving_together import Saving
from replica_engine.values.structure import as_tensor
from replica_engine.xla.body import LaunchLimits
from replica_engine.xla.context import gather_leaf, reduce_leaf

FIRST = "the first replica's value"
"""The reduction of variables with `ONLY_FIRST_REPLICA`."""


class ModelsOverWorkers:
    """What Keras asks of a strategy with several workers."""

    extended: Any

    def combined(self, own: Callable[..., Any], values: Any, reduction: str) -> Any:
        """As in every strategy; predictions are joined by `join_rows`."""
        if self.extended.saving is not None and reduction == "concat":
            return tf.nest.map_structure(self.join_rows, values)
        return super().combined(own, values, reduction)  # type: ignore[misc]

    def join_rows(self, value: Any) -> tf.Tensor:
        """The rows of all replicas of all workers, in the order of the whole batch that they were taken from.

        TensorFlow deals the shares of a batch out in turns: with two workers of two replicas, worker 0 has the first
        and the third share. Keras calls this for predictions.
        """
        devices = self.extended.device_group
        of_this: Any = self
        rows = of_this.gather(value, axis=0)
        shape = tf.shape(rows)
        shares = tf.reshape(rows, tf.concat([[devices.replicas // devices.size, devices.size, -1], shape[1:]], 0))
        swapped = tf.transpose(shares, tf.concat([[1, 0], tf.range(2, tf.rank(shares))], 0))
        return tf.reshape(swapped, shape)


class OverWorkers:
    """The hooks that concern the replicas of all workers. Put it before TensorFlow's extended class."""

    device_group: DeviceGroup
    limits: LaunchLimits

    def over_workers(self, reduction: Any, value: Any) -> Any:
        """Reduces a value of each replica over the replicas of all workers.

        Args:
            reduction: a `tf.distribute.ReduceOp` or its name, `FIRST`, or ("gather", axis).
            value: a distributed value or an ON_READ variable.
        """
        of_this: Any = self
        reducer = _reducer(reduction, calling_line()[0])
        programs = of_this.__dict__.setdefault("_reductions", of_this._programs.for_owner())  # each shape is a trace
        if isinstance(value, distribute.DistributedVariable):
            value = distribute.PerReplica(tuple(component.read_value() for component in value._values))
        elif not isinstance(value, distribute.DistributedValues):
            value = distribute.PerReplica((value,))
        value = as_tensors(value, of_this.worker_devices)
        result = of_this.run_of(programs, reducer, (value,))
        return distribute.select_replica(0, result)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce` and `reduce_to`, for one value in cross-replica context."""
        if self.device_group.member is None or not self._has_parts(value):
            return super()._reduce_to(reduce_op, value, destinations, options)  # type: ignore[misc]
        return self.over_workers(reduce_op, value)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        """The hook of `gather`."""
        if self.device_group.member is None or not self._has_parts(value):
            return super()._gather_to_implementation(value, destinations, axis, options)  # type: ignore[misc]
        return self.over_workers(("gather", axis), value)

    def _has_parts(self, value: Any) -> bool:
        """Whether a value may differ by replica. What `run` returns is not wrapped where a worker has one replica."""
        if isinstance(value, distribute.DistributedVariable):
            return isinstance(value, distribute.SyncOnReadVariable)
        if isinstance(value, (distribute.DistributedValues, tf.Variable)):
            return isinstance(value, distribute.PerReplica)
        return self.device_group.size == 1

    def _make_input_context(self) -> tf.distribute.InputContext:
        """The hook of TensorFlow's code for several workers."""
        devices = self.device_group
        return tf.distribute.InputContext(
            devices.replicas // devices.size, devices.first // devices.size, devices.replicas
        )

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """The hook of `experimental_distribute_dataset`: this worker's part of the dataset."""
        if self.device_group.member is None:
            return super()._experimental_distribute_dataset(dataset, options)  # type: ignore[misc]
        return distribute.MultiWorkerMirroredExtended._experimental_distribute_dataset(self, dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        """The hook of `distribute_datasets_from_function`."""
        if self.device_group.member is None:
            return super()._distribute_datasets_from_function(dataset_fn, options)  # type: ignore[misc]
        return distribute.MultiWorkerMirroredExtended._distribute_datasets_from_function(self, dataset_fn, options)

    def have_batches(self) -> Callable[[Any], Any] | None:
        """How the workers agree whether there is a batch; see `HostDatasets`."""
        return None if self.device_group.member is None else self._all_have_batch

    def _all_have_batch(self, has: Any) -> Any:
        """Like `all_have`; but batches that are fetched for a running program are agreed on by that program."""
        if not tf.executing_eagerly():
            mine = tf.cast(has, tf.int32)
            return self.over_workers("MIN", distribute.PerReplica((mine,) * self.device_group.size)) > 0
        return has if is_needed_by_a_program() else all_have(self.device_group, bool(has), self.limits)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        """The hook of `experimental_distribute_values_from_function`: the values of this worker's replicas."""
        devices = self.device_group
        if devices.member is None:
            return super()._experimental_distribute_values_from_function(value_fn)  # type: ignore[misc]
        contexts = [tf.distribute.experimental.ValueContext(id, devices.replicas) for id in _ids(devices)]
        return distribute.PerReplica(tuple(value_fn(context) for context in contexts))

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.device_group.replicas

    @property
    def experimental_should_init(self) -> bool:
        """Whether this worker is the chief."""
        return self.device_group.is_chiefs

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints: the chief does."""
        return self.device_group.is_chiefs

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker writes summaries: the chief does."""
        return self.device_group.is_chiefs


def saving_on(devices: DeviceGroup, limits: LaunchLimits) -> Saving | None:
    """This worker, as one that saves together with the others; None if it is the only one."""
    member = devices.member
    if member is None:
        return None

    def meet(name: str, limited: bool) -> None:
        member.meet(name, limits.timeout if limited else None, limits.warn_after)

    return Saving(member, meet)


def explain_failures(member: Member) -> None:
    """Makes an op or a `tf.function` that fails because the job has failed raise the job's error, and not TensorFlow's.

    A program in a `tf.function`, such as a step of Keras' `fit`, is an op that calls Python. TensorFlow makes an
    UnknownError with a long text of an exception of that code.
    """
    process = os.getpid()
    collectives.explain_failures(lambda code, message: member.failure if os.getpid() == process else None)


def agree_to_make(name: str, value: Any, devices: DeviceGroup, limits: LaunchLimits, how: str | None) -> None:
    """Waits until all workers make a variable.

    Args:
        name, devices, limits, how: as for `start_from_chief`.
        value: something with its shape and dtype.

    Raises:
        ProgramDisagreementError, WorkersMissingError or ReplicaTimeoutError: as for `start_from_chief`.
    """
    assert devices.member is not None, "there are several workers"
    devices.member.compile(of_variable(name, value, how), *limits)


def take_seed_of_chief(initializer: Any, devices: DeviceGroup, limits: LaunchLimits) -> None:
    """Gives an initializer of Keras the seed that the chief's has, so that each worker can make its parts of a value.

    A seed that the user has not given is a random number. An initializer that counts its draws keeps its own seed.
    """
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, int) and seed.bit_length() < 64:
        initializer.seed = int(exchange.from_chief(devices, np.array(seed, np.int64), limits))


def start_from_chief(
    name: str, components: Sequence[Any], devices: DeviceGroup, limits: LaunchLimits, how: str | None = None
) -> None:
    """Gives a new variable the chief's value, whatever this worker computed.

    Args:
        name: the name of the variable.
        components: its variables on the host, all with one value.
        devices: the devices of all workers.
        limits: how long to wait for the other workers.
        how: how it is divided over the devices of a replica, in words.

    Raises:
        ProgramDisagreementError: another worker does not make this variable now, or divides it in another way.
        WorkersMissingError or ReplicaTimeoutError: another worker did not come in time.
    """
    unique = list({id(component): component for component in components}.values())
    handle = variables.raw_handle(unique[0])
    value = variables.read(handle, unique[0].dtype)
    agree_to_make(name, value, devices, limits, how)
    if xla_ops.is_host_only(value.dtype):
        return  # strings: each worker keeps its own
    chiefs = exchange.from_chief(devices, value.numpy(), limits)
    for component in unique:
        variables.write(variables.raw_handle(component), chiefs)


def all_have(devices: DeviceGroup, has: bool, limits: LaunchLimits) -> bool:
    """Whether every worker has something, such as a next batch."""
    return has if devices.member is None else bool(exchange.least(devices, [has], limits)[0])


@functools.lru_cache(maxsize=1024)
def _reducer(reduction: Any, where: str) -> Callable[[Any], Any]:
    """A body that reduces its argument over all replicas, for a line of the user's code."""

    def reduce_over_workers(value: Any) -> Any:
        if isinstance(reduction, tuple):
            return gather_leaf(value, reduction[1])
        if reduction == FIRST:
            return _of_first(as_tensor(value, "The value of a variable"))
        return reduce_leaf(reduction, value)

    reducer: Any = reduce_over_workers
    name = f"gather_{reduction[1]}" if isinstance(reduction, tuple) else str(getattr(reduction, "value", reduction))
    reducer.__name__ = "first_value" if reduction == FIRST else name if "_" in name else f"reduce_{name.upper()}"
    reducer._replica_engine_where = where  # see `BodyGraph.where`
    return reduce_over_workers


def _of_first(value: tf.Tensor) -> tf.Tensor:
    """The first replica's value, bit by bit; a sum of numbers would lose the sign of zero, and bools have none."""
    if value.dtype.is_complex:
        return tf.complex(_of_first(tf.math.real(value)), _of_first(tf.math.imag(value)))
    if value.dtype.is_bool:
        return tf.cast(_of_first(tf.cast(value, tf.uint8)), tf.bool)
    bits = tf.bitcast(value, _BITS[value.dtype.size])
    return tf.bitcast(xla.cross_replica_sum(tf.where(xla.replica_id() == 0, bits, tf.zeros_like(bits))), value.dtype)


_BITS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


def _ids(devices: DeviceGroup) -> range:
    return range(devices.first, devices.first + devices.size)
