"""The devices of one replicated program, and arrays on them.

An array here has one value on each device, all of one shape and dtype. To jax it is a replicated array; that
the values may differ by replica is between us and the program.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from replica_engine.errors import StuckProgramError
from replica_engine.pjrt.jaxlib import (
    ArrayImpl,
    Mesh,
    NamedSharding,
    PartitionSpec,
    ShapedArray,
    SingleDeviceSharding,
    batched_device_put,
)
from replica_engine.process.interrupts import MISSED, wait_for_ever

Array = Any
"""An array on the devices of a group: a `jax.Array`."""

_thread = threading.local()


class needed_by_a_program:
    """A program waits for what runs inside, on this thread. So that must not wait for the program.

    Args:
        why: the error to raise if it is about to.
    """

    def __init__(self, why: Callable[[], Exception]):
        self._why = why

    def __enter__(self) -> None:
        self._before = getattr(_thread, "why", None)
        _thread.why = self._why

    def __exit__(self, *_: object) -> None:
        _thread.why = self._before


def is_needed_by_a_program() -> bool:
    """Whether a program waits for what this thread does."""
    return getattr(_thread, "why", None) is not None


class ProgramOrder:
    """A lock that programs take turns with; a thread may take it again that has it.

    Raises:
        Exception: as `needed_by_a_program` says, where waiting for it would be waiting for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sign = 0.0

    def __enter__(self) -> None:
        if not self.enter_now():
            wait_for_ever(lambda seconds: self._lock.acquire(timeout=seconds))
            self.beat()

    def enter_now(self) -> bool:
        """As `with`, if it is nobody else's turn; whether it was not."""
        if (why := getattr(_thread, "why", None)) is not None:
            raise why()
        if not self._lock.acquire(blocking=False):
            return False
        self.beat()
        return True

    def beat(self) -> None:
        """The program whose turn it is gives a sign of life."""
        self._sign = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def within(self, seconds: float, late: Callable[[], Exception]) -> Iterator[None]:
        """The lock. When it has not come, and nobody has given a sign of life, for so long, `late` is raised."""
        if (why := getattr(_thread, "why", None)) is not None:
            raise why()
        began = time.monotonic()
        while not self._lock.acquire(timeout=min(max(0.0, self._due(began, seconds)), MISSED)):  # as `wait_for_ever`
            if self._due(began, seconds) <= 0:
                raise late()
        self.beat()
        try:
            yield
        finally:
            self._lock.release()

    def _due(self, began: float, seconds: float) -> float:
        """Seconds until somebody who has waited since then has waited for too long."""
        return max(began, self._sign) + seconds - time.monotonic()


# One for each platform: see `DeviceGroup.in_flight`.
_orders: dict[str, ProgramOrder] = {}


class _Work:
    """What a thread does, as something that becomes ready."""

    def __init__(self, thread: threading.Thread):
        self.thread = thread

    def is_ready(self) -> bool:
        """Whether the thread has ended."""
        return not self.thread.is_alive()


def _is_of_this_thread(running: Any) -> bool:
    """Whether it is what this thread itself does, for which it need not wait."""
    return isinstance(running, _Work) and running.thread is threading.current_thread()


def _comes_within(seconds: float, is_ready: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


class DeviceGroup:
    """The devices that the replicas of one program run on, replica i on device i.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        devices: the PJRT devices.
        size: how many; the number of replicas.
        names: for messages: "CPU:0", ...
        in_flight: held from a program's launch to its end.
        running: what becomes ready when the program that was launched last ends; None if it has ended.
        running_name: of which body that program is.
        interrupted: whether nobody is waiting for that program, though it may not have ended.

    **Why one program at a time on CPU.** Replicas of a program meet in its collectives, and a replica that
    waits there holds a thread of the client. With two programs in flight, replicas of one can hold all threads
    while they wait for replicas that have none: neither ends, and after a while XLA aborts the process. So on
    CPU the lock is one for the whole process and is held until the program is done. GPU and TPU devices have
    queues: programs run on each device in the order of their launches, and that order, which the lock, one for each
    platform, keeps the same on all devices, is all that is needed.
    """

    def __init__(self, platform: str, devices: tuple):
        self.platform = platform
        self.devices = devices
        self.size = len(devices)
        self.names = [f"{platform.upper()}:{index}" for index in range(self.size)]
        mesh = Mesh(np.array(devices), ("replica",))
        self.sharding = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("replica"))
        self._single = [SingleDeviceSharding(device) for device in devices]
        self.in_flight = _orders.setdefault(platform, ProgramOrder())
        self.running: Any = None
        self.running_name = ""
        self.interrupted = False

    def put(self, values: Sequence[np.ndarray]) -> Array:
        """An array of one value for each replica; of a single one, the same for all.

        The values must not change while the array lives: on CPU it may be a view of them.
        """
        first = values[0]
        aval = ShapedArray(first.shape, first.dtype)
        if len(values) == 1:
            return self._put(aval, self.sharding, list(values) * self.size, list(self.devices))
        if first.ndim:  # Of a replicated array jax would take the first value for all; of a sharded one it does not.
            whole = ShapedArray((first.shape[0] * self.size, *first.shape[1:]), first.dtype)
            return self._put(whole, self._split, list(values), list(self.devices))
        parts = [
            self._put(aval, single, [value], [device])
            for single, value, device in zip(self._single, values, self.devices, strict=True)
        ]
        return ArrayImpl(aval, self.sharding, parts, committed=True, _skip_checks=True)

    @staticmethod
    def _put(aval: ShapedArray, sharding: Any, values: list[np.ndarray], devices: list[Any]) -> Array:
        return batched_device_put(aval, sharding, values, devices, True, enable_x64=True)

    @staticmethod
    def fetch(array: Array, replica: int) -> np.ndarray:
        """One replica's value, on the host. On CPU it is a view, valid after the array is gone."""
        return np.asarray(array._arrays[replica])  # addressable_data takes them for equal

    @staticmethod
    def fetch_all(array: Array) -> list[np.ndarray]:
        """All replicas' values, on the host."""
        return [np.asarray(shard) for shard in array._arrays]

    @functools.cache  # noqa: B019 (groups live as long as the process)
    def alone(self, replica: int) -> DeviceGroup:
        """The group of one replica's device."""
        return DeviceGroup(self.platform, (self.devices[replica],))

    @staticmethod
    def parts(array: Array) -> list[Array]:
        """Each replica's value, on its device."""
        return list(array._arrays)

    def join(self, parts: Sequence[Array]) -> Array:
        """An array of one value on each device."""
        shards = [part._arrays[0] for part in parts]
        aval = ShapedArray(parts[0].shape, parts[0].dtype)
        return ArrayImpl(aval, self.sharding, shards, committed=True, _skip_checks=True)

    def wait_for_interrupted(self) -> None:
        """Waits for a program that somebody stopped waiting for; the caller holds `in_flight`.

        Raises:
            StuckProgramError: it has not ended.
        """
        if self.interrupted and not _is_of_this_thread(self.running):
            if not self.ends_within(StuckProgramError.PATIENCE):
                raise StuckProgramError.given_up(self.running_name, self.size)
            self.interrupted = False

    def wait_for(self, array: Array) -> None:
        """Waits for an array that a program which was interrupted may have to make.

        Raises:
            StuckProgramError: it has not.
        """
        if self.interrupted and not _comes_within(StuckProgramError.PATIENCE, array.is_ready):
            raise StuckProgramError.given_up(self.running_name, self.size)

    def ends_within(self, seconds: float) -> bool:
        """Waits for the program that was launched last; whether it ended."""
        return _comes_within(seconds, self._is_ready)

    def leave_to(self, thread: threading.Thread) -> None:
        """That thread will launch a program; until it says what becomes ready, that is the end of the thread."""
        self.running, self.interrupted = _Work(thread), True

    def has_ended(self, replica: int) -> bool:
        """Whether the program that was launched last has ended on a replica's device, as far as can be seen."""
        shards = getattr(self.running, "_arrays", None)
        return self._is_ready() if shards is None else shards[replica].is_ready()

    def _is_ready(self) -> bool:
        running = self.running  # once: another thread may see that it has ended
        return running is None or running.is_ready()

    def __repr__(self) -> str:
        return f"DeviceGroup({self.platform!r}, size={self.size})"
