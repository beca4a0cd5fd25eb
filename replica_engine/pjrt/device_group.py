"""The devices of one replicated program, arrays on them, and programs that were abandoned there.

An array here has one value on each device, all of one shape and dtype. jax takes it for a replicated array. Only this
library and the program know that the values may differ by replica.

Nothing waits for an abandoned program, and it may never end. When a client of jaxlib is destroyed, it waits for its
threads, and so for its programs. If the garbage collector or the exit of the process destroyed it while an abandoned
program runs, it would wait forever. So devices with an abandoned program are kept alive (`add`). At exit the client of
devices on which such a program still runs is never destroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from replica_engine.errors import DeviceError, ProgramError, StuckProgramError, base
from replica_engine.pjrt import jaxlib
from replica_engine.pjrt.stablehlo.partition_local import WHOLE, Axes, ReplicaMesh
from replica_engine.process import interrupts, threads
from replica_engine.watch.watchdog import Wait
from replica_engine.workers import Member, Program
from replica_engine.workers.member import Leave

# Abandoned programs.
_LAST_CALLS = 5.0  # seconds at exit for a program that calls Python, whose calls return at once, or returns to it

_left: dict[DeviceGroup, bool] = {}  # devices with an abandoned program; whether the program may call the host


def add(devices: DeviceGroup, calls_host: bool = False) -> None:
    """Notes that the program launched last on these devices is abandoned, unless it has ended."""
    let_go()
    if not devices.ends_within(0.0):
        _left[devices] = calls_host or _left.get(devices, False)


def let_go() -> None:
    """Forgets the devices whose program has ended, so that they can be freed."""
    for devices in [devices for devices in list(_left) if devices.ends_within(0.0)]:  # other threads change it too
        _left.pop(devices, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_left.clear)


@atexit.register
def _at_exit() -> None:
    """At exit: no program may call Python once Python is gone, nor return to it, and none is waited for for long.

    A thread in the launch of a program with a limit returns at the end of the program, on some devices. If Python has
    gone by then, the process is aborted.
    """
    for devices, calls_host in list(_left.items()):
        seconds = _LAST_CALLS if calls_host or devices.is_left_to_a_thread else 0.0
        member = devices.member
        # The collective that the thread is in ends when another worker does. The one that is lost goes first, and the
        # others one after the other: whose thread returned while Python goes would be aborted.
        if member is not None and devices.is_left_to_a_thread and not member.is_cause:
            seconds += _LAST_CALLS + member.worker
        if not devices.ends_within(seconds):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(devices.devices[0].client))


Array: TypeAlias = jaxlib.ArrayImpl
"""An array on the devices of a group: a `jax.Array`."""

T = TypeVar("T")
Limits = tuple[float | None, float | None]
"""Of waits for other workers: the seconds until an error, and until a warning."""

_thread = threading.local()


class Computed(NamedTuple):
    """Which program computes an array.

    Attributes:
        name: its name.
        where: the file and the line of its function; "" if it has none.
        takes: whether it takes values that programs before it have computed: if one of those failed, so does this.
    """

    name: str
    where: str = ""
    takes: bool = False

    def __str__(self) -> str:
        """The program in an error that comes late, when others may have been launched since."""
        before = ", or a program before it whose values it took," if self.takes else ""
        return f"`{self.name}`{base.at(self.where)}{before}"


class needed_by_a_program:
    """Inside, a running program waits for this thread, so code inside must never wait for the program.

    Args:
        why: makes the error to raise if code inside is about to wait.
    """

    # Not of contextlib, which sets the traceback of an exception: one of the user's may be frozen, and refuse that.

    def __init__(self, why: Callable[[], Exception]):
        self._why = why

    def __enter__(self) -> None:
        self._before = getattr(_thread, "why", None)
        _thread.why = self._why

    def __exit__(self, *_: object) -> None:
        _thread.why = self._before


def is_needed_by_a_program() -> bool:
    """Whether a program waits for this thread."""
    return getattr(_thread, "why", None) is not None


def held_off() -> interrupts.held_off:
    """Holds off signals until the end of the block, for what other workers, threads or host calls rely on.

    On one device a launch may run the program, and its host calls, directly on this thread. Then a signal interrupts
    the user's code as usual, and the host call handles the exception.
    """
    return interrupts.held_off(is_needed_by_a_program)


class ProgramOrder:
    """A reentrant lock with which programs take turns.

    The end of a `with` block is the lock's own method, in C. A method in Python could be interrupted before its first
    line, by a signal handler or by an exception of another thread, and nobody would ever have a turn again.

    Raises:
        Exception: the error that `needed_by_a_program` makes, where a wait for the lock would never end.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sign = 0.0

    def __enter__(self) -> None:
        self.turn(self.enter).__enter__()

    def enter(self, taken: list[bool]) -> None:
        """Takes the lock.

        Args:
            taken: becomes [True] at the instant when the lock is taken. An exception of Ctrl-C may come right after
                that, so the caller prepares to release the lock before it calls.
        """
        if not self.enter_now(taken):
            interrupts.wait_for_ever(lambda seconds: self._acquire(taken, True, seconds))
            self.beat()

    def enter_now(self, taken: list[bool]) -> bool:
        """Takes the lock if no other thread has it; see `enter`. Returns whether it did."""
        if (why := getattr(_thread, "why", None)) is not None:
            raise why()
        if not self._acquire(taken, False, -1):
            return False
        self.beat()
        return True

    def enter_within(self, seconds: float, late: Callable[[], Exception], taken: list[bool]) -> None:
        """Takes the lock; see `enter`. Raises `late()` after `seconds` without the lock and without a sign of life."""
        if (why := getattr(_thread, "why", None)) is not None:
            raise why()
        began = time.monotonic()
        # In pieces: see `wait_for_ever`.
        while not self._acquire(taken, True, min(max(0.0, self._due(began, seconds)), interrupts.MISSED)):
            if self._due(began, seconds) <= 0:
                raise late()
        self.beat()

    def _acquire(self, taken: list[bool], blocking: bool, seconds: float) -> bool:
        # One instruction, in which no Python runs: Ctrl-C comes before both the lock and its note, or after both.
        taken[:] = map(self._lock.acquire, (blocking,), (seconds,))
        return taken[0]

    def beat(self) -> None:
        """Gives a sign of life, in the name of the program whose turn it is."""
        self._sign = time.monotonic()

    __exit__: Any = property(operator.attrgetter("_lock.__exit__"))

    def turn(self, enter: Callable[[list[bool]], None]) -> ProgramTurn:
        """Inside, holds the lock, which `enter` takes; see the method `enter`."""
        return ProgramTurn(self._lock, enter)

    def within(self, seconds: float, late: Callable[[], Exception]) -> ProgramTurn:
        """Inside, holds the lock; see `enter_within`."""
        return self.turn(functools.partial(self.enter_within, seconds, late))

    def _due(self, began: float, seconds: float) -> float:
        """Seconds until a thread that has waited since `began` has waited for too long."""
        return max(began, self._sign) + seconds - time.monotonic()


class ProgramTurn:
    """A turn of a program; see `ProgramOrder.turn`."""

    def __init__(self, lock: Any, enter: Callable[[list[bool]], None]):
        self._lock = lock
        self._enter = enter

    def __enter__(self) -> None:
        taken: list[bool] = []
        try:
            self._enter(taken)
        except BaseException:  # whatever it is: without `__exit__`, nobody would ever have a turn again
            if any(taken):
                self._lock.release()
            raise

    __exit__: Any = property(operator.attrgetter("_lock.__exit__"))  # in C; see `ProgramOrder`


# One lock for each platform; see `DeviceGroup.in_flight`.
_orders: dict[str, ProgramOrder] = {}


def _comes_within(seconds: float, is_ready: Callable[[], bool]) -> bool:
    began = time.monotonic()
    while not is_ready():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        # Late by a fiftieth of the time so far at most, however long that is.
        time.sleep(min(max(1e-4, waited / 50), 0.01))
    return True


def _are_ready(arrays: Sequence[Array]) -> bool:
    return all(array.is_ready() for array in arrays)


make_aval = functools.lru_cache(maxsize=1024)(jaxlib.ShapedArray)  # jax takes 4 us to make one


def on_host(shard: Any) -> np.ndarray:
    """The value of an array on one device: what `np.asarray` does after jax has asked for the sharding (5 us).

    The method is jaxlib's own; checked on jaxlib 0.8 to 0.10.
    """
    value: np.ndarray = shard._single_device_array_to_np_array_did_copy()[0]
    value.flags.writeable = False
    return value


class Agrees(Protocol):
    """What compares the launches of the workers: `agreement.Agreement`."""

    def launch(self, program: Program, limits: Limits, launch: Callable[[], T], left: Leave | None) -> T:
        """Calls `launch` once all workers are about to launch the program."""

    def launches(self, program: Program, is_compared_again: bool) -> None:
        """Notes that a program is launched."""

    def least(self, program: Program, number: int, limits: Limits, left: Leave | None) -> int:
        """The least of the numbers of all workers."""

    def leave_to(self, devices: DeviceGroup) -> None:
        """Has other devices wait for a comparison whose wait has been ended."""


class DeviceGroup:
    """The devices that the replicas of one program run on, replica i on device i.

    With several workers, each has the same number of devices, and the program runs on the devices of all. Arrays, puts
    and fetches have the parts of this worker only.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        devices: the PJRT devices of this process.
        size: the number of these devices, which is the number of this process' replicas.
        everywhere: the devices of all workers, in the order of the replicas.
        replicas: the number of replicas of all workers.
        first: the id of this process' first replica.
        member: the connection to the job of several workers; None in a process on its own.
        agreement: what compares the launches of the workers; None if the devices are of one worker.
        names: the names of the replicas' devices in messages: "CPU:0", ...; "CPU:0-3" if a replica has several.
        device_names: the names of the devices of this process.
        in_flight: the lock that is held from a program's launch to its end.
        running: an object that becomes ready when the program launched last ends; None if the program has ended.
        running_name: the name of that program's body.
        interrupted: whether nothing waits for that program, although it may not have ended.
        ahead: on devices with a queue, for each of the last launches what finds out, by a result, whether it failed.
        held_by: while the next launch waits for such a program, its name; otherwise "".
        programs: the cache of the programs that run without a strategy, which goes with the group; None before.
        mesh: the devices of each replica, if it has several; None if each has one.
        rows: whether arrays have a row for each replica (`stablehlo`).
        spans: whether a replica has devices of several workers.
        flat: the same devices, one for each replica.

    **Why one program at a time on CPU.** The replicas of a program meet in its collectives, and a replica that waits
    there holds a thread of the client. With two programs in flight, the replicas of one can hold all threads while they
    wait for replicas that have none. Then neither program ends, and after a while XLA aborts the process. So on CPU
    there is one lock for the whole process, held until the program is done. GPU and TPU devices have queues: each
    device runs programs in the order of their launches. There it is enough that the order is the same on all devices,
    which one lock for each platform ensures.
    """

    mesh: ReplicaMesh | None = None
    rows = False
    spans = False

    def __init__(self, platform: str, devices: tuple, everywhere: tuple | None = None, member: Member | None = None):
        jaxlib.collect_without_python()
        self.platform = platform
        self.devices = devices
        self.size = len(devices)
        self.everywhere = everywhere or devices
        self.replicas = len(self.everywhere)
        self.first = self.everywhere.index(devices[0])
        self.member = member
        self.agreement: Agrees | None = None
        place = "" if member is None else f"worker {member.worker}, "
        self.names = [f"{place}{platform.upper()}:{index}" for index in range(self.size)]
        self.device_names = tuple(self.names)
        mesh = jaxlib.Mesh(np.array(self.everywhere), ("replica",))
        self.sharding = jaxlib.NamedSharding(mesh, jaxlib.PartitionSpec())
        self._split = jaxlib.NamedSharding(mesh, jaxlib.PartitionSpec("replica"))
        self._single = [jaxlib.SingleDeviceSharding(device) for device in devices]
        self.in_flight = _orders.setdefault(platform, ProgramOrder())
        self.running: Any = None
        self.running_name = ""
        self.interrupted = False
        self.ahead: deque[tuple[Callable[[Array], ProgramError | None], Array]] = deque()
        self.held_by = ""
        self.programs: Any = None
        self.flat = self

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.everywhere) // len(self.devices)

    @property
    def is_chiefs(self) -> bool:
        """Whether this process is the first worker, or the only one."""
        return self.everywhere[0] is self.devices[0]

    @property
    def grid(self) -> np.ndarray:
        """The ids of the devices of all workers as XLA takes them: a row for each replica, a column for each part."""
        return np.array([device.id for device in self.everywhere]).reshape(-1, 1)

    def put(self, values: Sequence[np.ndarray], axes: Axes = WHOLE) -> Array:
        """An array with one value for each replica; a single value is used for all replicas.

        The values must never change while the array lives: on CPU the array may be a view of them.

        Args:
            values: the values.
            axes: how each is divided over the devices of its replica.
        """
        first = values[0]
        aval = make_aval(first.shape, first.dtype)
        if len(values) == 1:
            return self._put(aval, self.sharding, list(values) * self.size, list(self.devices))
        if first.ndim:  # as a sharded array: for a replicated one jax would use the first value for all
            whole = make_aval((first.shape[0] * self.replicas, *first.shape[1:]), first.dtype)
            return self._put(whole, self._split, list(values), list(self.devices))
        # A scalar has no dimension to divide: an array is put together from one for each device.
        parts = [
            self._put(aval, single, [value], [device])
            for single, value, device in zip(self._single, values, self.devices, strict=True)
        ]
        return jaxlib.ArrayImpl(aval, self.sharding, parts, committed=True, _skip_checks=True)

    def _put(self, aval: jaxlib.ShapedArray, sharding: Any, values: list[np.ndarray], devices: list[Any]) -> Array:
        try:
            return jaxlib.batched_device_put(aval, sharding, values, devices, True, enable_x64=True)
        except jaxlib.RUNTIME_ERRORS as error:
            names = [self.device_names[self.devices.index(device)] for device in devices]
            raise DeviceError(
                f"A value of {aval.str_short()} cannot be put on {', '.join(names)}:\n{str(error).strip()}\n"
                "Where memory is the cause, let go of values that are not needed, use a smaller batch, or divide the "
                'model over devices: TPUStrategy(distribution="fsdp").'
            ) from error

    def fetch(self, array: Array, replica: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """One replica's value, on the host. On CPU it is a view, valid after the array is gone.

        Args:
            array: the array.
            replica: which replica of this process.
            shape: the shape of the value, which may be stored in a larger array.
        """
        return on_host(array._arrays[replica])  # `addressable_data` assumes that all values are equal

    def is_equal(self, array: Array, replica: int, value: np.ndarray, axes: Axes) -> bool:
        """Whether a replica of this process has a value, bit by bit."""
        return self.fetch(array, replica).tobytes() == value.tobytes()

    def fetch_all(self, array: Array, shape: tuple[int, ...] | None = None) -> list[np.ndarray]:
        """All replicas' values, on the host."""
        return self.shards(array)

    @staticmethod
    def shards(array: Array) -> list[np.ndarray]:
        """What each device of this process has, on the host."""
        return list(map(on_host, array._arrays))

    @property
    def devices_each(self) -> int:
        """The number of devices of each replica."""
        return 1 if self.mesh is None else self.mesh.size

    def make_sharding(self, axes: Axes) -> Any:
        """The sharding of an array of values with these axes."""
        return self.sharding

    def stored(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of the array of a value with this shape and these axes."""
        return shape

    def on_each(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of what each device has of such a value."""
        return shape

    @staticmethod
    def views(array: Array) -> list[Any]:
        """All replicas' values as DLPack capsules: views of an array that is ready, on CPU devices.

        Raises:
            RuntimeError: DLPack has no name for the dtype.
        """
        jaxlib.collect_garbage()  # jaxlib only notes the array of a view that is gone
        return [jaxlib.buffer_to_dlpack_managed_tensor(shard, None) for shard in array._arrays]

    def wait_for_interrupted(self) -> bool:
        """Waits for a program whose wait was interrupted. The caller holds `in_flight`.

        Returns:
            Whether there was such a program.

        Raises:
            StuckProgramError: the program has not ended in time.
        """
        if not self.interrupted or self.running is threading.current_thread():  # which need not wait for itself
            return False
        name = self.held_by = self.running_name
        try:
            if not self.ends_within(StuckProgramError.PATIENCE):
                raise StuckProgramError.given_up(name, self.size)
        finally:
            self.held_by = ""
        self.running, self.interrupted = None, False
        return True

    @property
    def has_queue(self) -> bool:
        """Whether a launch returns before the program has run: each device runs programs in the order of launches."""
        return self.platform != "cpu"

    def wait_for(
        self, *arrays: Array, describe: Callable[[float], str] | None = None, of: Computed | None = None
    ) -> None:
        """Waits for arrays that a program may still be computing. Afterwards fetching them takes no time.

        Args:
            arrays: the arrays, which no program was given to overwrite.
            describe: the warning of the watchdog, given the seconds so far.
            of: the program that computes them; None for the one launched last.

        Raises:
            StuckProgramError: an interrupted program computes them, and they are not ready in time.
            ProgramError: the program that computes them has failed.
        """
        if not self.has_queue:
            if self.interrupted and not _comes_within(StuckProgramError.PATIENCE, lambda: _are_ready(arrays)):
                raise StuckProgramError.given_up(self.running_name, self.size)
            return
        try:
            if not _are_ready(arrays):
                with Wait(describe or self._slow):
                    interrupts.wait_for_ever(lambda seconds: _comes_within(seconds, lambda: _are_ready(arrays)))
            for array in arrays:
                array.block_until_ready()
        except jaxlib.RUNTIME_ERRORS as error:
            raise ProgramError.failed(str(of or Computed(self.running_name)), self.names, str(error)) from error
        except BaseException:  # nothing waits for the program any more, but the next launch must
            self.running, self.interrupted = arrays[0], True
            raise

    def _slow(self, seconds: float) -> str:
        return (
            f"The host has been waiting for a value on the devices for {seconds:.3g} s: the launched programs "
            f"have not ended. The last of them is `{self.running_name}`. Ctrl-C ends the wait."
        )

    def ends_within(self, seconds: float) -> bool:
        """Waits up to `seconds` for the program launched last. Returns whether it ended."""
        return _comes_within(seconds, self._is_ready)

    def leave_to(self, thread: threads.LeftCall[Any]) -> None:
        """Leaves the next launch to another thread. Until then, the program runs as long as that thread is alive."""
        self.running, self.interrupted = thread, True

    @property
    def is_left_to_a_thread(self) -> bool:
        """Whether another thread was left to launch the program, and has not ended; see `leave_to`."""
        running = self.running  # read once, see `_is_ready`
        return isinstance(running, threads.LeftCall) and not running.is_ready()

    def has_ended(self, replica: int) -> bool:
        """Whether the program launched last has ended on a replica's device, as far as can be seen."""
        running = self.running  # read once, see `_is_ready`
        shards = getattr(running, "_arrays", None)
        if shards is None:
            return running is None or running.is_ready()
        return self._parts_ready(shards, replica)

    def _parts_ready(self, shards: Sequence[Any], replica: int) -> bool:
        """Whether what the devices of a replica have of an array is ready."""
        return bool(shards[replica].is_ready())

    def _is_ready(self) -> bool:
        running = self.running  # read once: another thread may see that the program has ended, and reset it
        return running is None or running.is_ready()

    def __repr__(self) -> str:
        return f"DeviceGroup({self.platform!r}, size={self.size})"
