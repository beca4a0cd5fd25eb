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
from replica_engine.pjrt import worker_exchange
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.threads.merge_checks import make_variable_program
from replica_engine.upstream import eager, worker_collectives
from replica_engine.upstream.graphs import xla_ops
from replica_engine.values.structure import as_tensor
from replica_engine.workers import Member, saving
from replica_engine.xla.body import LaunchLimits
from replica_engine.xla.body_context import gather_leaf, reduce_leaf

FIRST = "the first replica's value"
"""The reduction of variables with `ONLY_FIRST_REPLICA`."""


def saving_on(devices: DeviceGroup, limits: LaunchLimits) -> saving.Saving | None:
    """This worker, as one that saves together with the others; None if it is the only one."""
    member = devices.member
    if member is None:
        return None

    def meet(name: str, limited: bool) -> None:
        member.meet(name, limits.timeout if limited else None, limits.warn_after)

    return saving.Saving(member, meet)


def raise_job_failures(member: Member) -> None:
    """Makes an op or a `tf.function` that fails because the job has failed raise the job's error, and not TensorFlow's.

    A program in a `tf.function`, such as a step of Keras' `fit`, is an op that calls Python. TensorFlow makes an
    UnknownError with a long text of an exception of that code.
    """
    # A forked child has the hook and not the job.
    process = os.getpid()
    worker_collectives.translate_failures(lambda code, message: member.failure if os.getpid() == process else None)


def agree_to_make(name: str, value: Any, devices: DeviceGroup, limits: LaunchLimits, how: str | None) -> None:
    """Waits until all workers make a variable.

    Args:
        name, devices, limits, how: as for `start_from_chief`.
        value: something with its shape and dtype.

    Raises:
        ProgramDisagreementError, WorkersMissingError or ReplicaTimeoutError: as for `start_from_chief`.
    """
    assert devices.member is not None, "there are several workers"
    devices.member.compile(make_variable_program(name, value, how), *limits)


def take_seed_of_chief(initializer: Any, devices: DeviceGroup, limits: LaunchLimits) -> None:
    """Gives an initializer of Keras the seed that the chief's has, so that each worker can make its parts of a value.

    A seed that the user has not given is a random number. An initializer that counts its draws keeps its own seed.
    """
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, int) and seed.bit_length() < 64:
        initializer.seed = int(worker_exchange.from_chief(devices, np.array(seed, np.int64), limits))


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
    handle = eager.raw_handle(unique[0])
    value = eager.read(handle, unique[0].dtype)
    # First: workers that exchanged the values of different variables would mix them up.
    agree_to_make(name, value, devices, limits, how)
    if xla_ops.is_host_only(value.dtype):
        return  # strings: each worker keeps its own
    chiefs = worker_exchange.from_chief(devices, value.numpy(), limits)
    for component in unique:
        eager.write(eager.raw_handle(component), chiefs)


def all_have(devices: DeviceGroup, has: bool, limits: LaunchLimits) -> bool:
    """Whether every worker has something, such as a next batch."""
    return has if devices.member is None else bool(worker_exchange.least(devices, has, limits))


# Kept, since a program belongs to a function: another function of the same kind would be compiled again.
@functools.lru_cache(maxsize=1024)
def reducer(reduction: Any, where: str, compared: str) -> Callable[[Any], Any]:
    """A body that reduces its argument over all replicas, for a line of the user's code; see `BodyGraph.compared`."""

    def reduce_over_workers(value: Any) -> Any:
        if isinstance(reduction, tuple):
            return gather_leaf(value, reduction[1])
        if reduction == FIRST:
            return _broadcast_first(as_tensor(value, "The value of a variable"))
        return reduce_leaf(reduction, value)

    body: Any = reduce_over_workers
    name = f"gather_{reduction[1]}" if isinstance(reduction, tuple) else str(getattr(reduction, "value", reduction))
    body.__name__ = "first_value" if reduction == FIRST else name if "_" in name else f"reduce_{name.upper()}"
    body._replica_engine_where, body._replica_engine_compared = where, compared  # see `BodyGraph.where`
    return reduce_over_workers


def _broadcast_first(value: tf.Tensor) -> tf.Tensor:
    """The first replica's value, bit by bit; a sum of numbers would lose the sign of zero, and bools have none."""
    if value.dtype.is_complex:
        return tf.complex(_broadcast_first(tf.math.real(value)), _broadcast_first(tf.math.imag(value)))
    if value.dtype.is_bool:
        return tf.cast(_broadcast_first(tf.cast(value, tf.uint8)), tf.bool)
    bits = tf.bitcast(value, _BITS[value.dtype.size])
    return tf.bitcast(xla.cross_replica_sum(tf.where(xla.replica_id() == 0, bits, tf.zeros_like(bits))), value.dtype)


_BITS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}
