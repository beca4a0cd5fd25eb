"""One launch of a program that calls the host: which calls failed, and the data that calls keep for later calls.

A loop whose condition comes from the host may never end on the zeros that calls return after a failure. So
after `_PATIENCE` further calls a call ends the program. The limit is the same number of calls on all replicas: if they
run in step, the same call ends it on all of them, and none waits for another.
"""

from __future__ import annotations

import _thread
import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol

import tensorflow as tf

from replica_engine.diagnostics.user_frames import is_internal
from replica_engine.errors import DebugError
from replica_engine.errors.base import add_note, in_words, is_alike
from replica_engine.errors.run_errors import note_failed_alike
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.upstream import eager, thread_state
from replica_engine.upstream.graphs import function_calls
from replica_engine.watch.watchdog import Wait
from replica_engine.xla.state.device_value import find_device_value

_PATIENCE = 10_000  # host calls of a replica; they take about a second
_STUCK_AFTER = 15.0  # seconds from a failure until the wait for the program ends


class SessionCall(Protocol):
    """The parts of a host call that a session uses; see `host_call.HostCall`."""

    index: int

    def describe(self) -> str:
        """The call as text, with the user's line, for messages."""


@dataclass(eq=False)  # the user's exceptions may not be comparable
class _RaisedCall:
    """A host call that raised.

    Attributes:
        error: the exception.
        replica: the replica it happened on.
        call: the call that raised it.
        times: how many times the replica had made this call, including this time.
    """

    error: BaseException
    replica: int
    call: SessionCall
    times: int


class Kept(dict[int, Any]):
    """The data that the calls of one replica keep for their gradients, by token.

    Attributes:
        on_host: values that no device can have, by number (`soft_placement`).
        tapes: gradient tapes of the Python functions of `tf.py_function`, by token: one for each call whose gradient
            has not used it yet.
        manager: ends host ops that wait, once the launch is given up.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self.manager = manager
        self.on_host: dict[int, Any] = {}
        self.tapes: dict[str, list[Any]] = {}

    def clear(self) -> None:
        """Called when the run is over."""
        super().clear()
        self.on_host, self.tapes = {}, {}


class Session:
    """One launch of a program with host calls.

    Args:
        devices: the devices it runs on.
        step: the step of a device loop that it runs, from 0; None outside of a loop.
        beat: called when a replica reaches a call, and when it leaves the call.

    Attributes:
        size: the number of replicas of this process.
        first: the id of the first of them.
        failures: calls that raised, in the order of time.
        kept: for each replica, the data that the gradients of its calls need.
        has_ended: whether the program has ended.
        draw: adds a call to timelines; takes the replica, the call, and its beginning and end in seconds. None without
            timelines.
        wake: ends the wait for the program; None if the main thread waits, and an interrupt ends that.
        arguments: values of the arguments that no device can have, by the index of the argument: one value, or one for
            each replica.
        host_variables: the variables of the strategy that no device can have and that the program writes.
    """

    def __init__(self, devices: DeviceGroup, step: int | None, beat: Callable[[], None]):
        size = self.size = devices.size
        self.first = devices.first
        self.has_ended = False
        self.failures: list[_RaisedCall] = []
        self._manager = function_calls.manager()
        self.kept = [Kept(self._manager) for _ in range(size)]
        self._beat = beat
        self.draw: Callable[[int, SessionCall, float, float], None] | None = None
        self.wake: Callable[[], None] | None = None
        self.arguments: Mapping[int, Sequence[Any]] = {}
        self.host_variables = HostVariables(size)
        self._inside: list[tuple[int, float] | None] = [None] * size  # each replica's call: its thread, since when
        self._last: list[SessionCall | None] = [None] * size
        self._times: dict[tuple[int, int], int] = {}
        self._made = [0] * size  # calls of each replica
        self._most: int | None = None  # no replica may make more calls than this; None while no call has failed
        self._tokens = list(range(size))
        self._lock = threading.Lock()
        self._devices = devices
        self._step = step
        self._is_awaited = False  # whether a thread waits for the program
        self._wait: Wait | None = None  # that wait, once a call has failed
        # The state that calls inherit from the launching thread: summary writers and similar.
        self._locals = thread_state.locals_of_thread()
        self._context = contextvars.copy_context()

    @property
    def is_over(self) -> bool:
        """Whether the run has failed, so that calls return zeros."""
        return self._most is not None

    def give_up(self) -> None:
        """Makes all later calls return zeros, and ends the program if it runs on for too long.

        Host ops that wait (for a queue, for example) are ended: they would wait on, and take what the next run is for.
        """
        with self._lock:
            if self._most is None:
                self._most = max(self._made) + _PATIENCE
        if self._manager is not None:
            self._manager.start_cancel()

    def enter(self, call: SessionCall, replica: int) -> None:
        """Notes that a replica makes a call.

        Raises:
            RuntimeError: the run has failed, and the program has had enough calls to end normally.
        """
        # Without the lock: a replica makes its calls one after the other, and these are its own entries.
        self._made[replica] += 1
        self._last[replica] = call
        self._inside[replica] = threading.get_ident(), time.perf_counter()
        self._beat()
        if self._most is None:
            self._times[call.index, replica] = self._times.get((call.index, replica), 0) + 1
        elif self._made[replica] > self._most:
            raise RuntimeError("The run has failed, and its program does not end by itself.")

    def leave(self, call: SessionCall, replica: int) -> None:
        """Notes that a replica's call is over."""
        inside, self._inside[replica] = self._inside[replica], None
        self._beat()
        if self.draw is not None and inside is not None:
            self.draw(replica, call, inside[1], time.perf_counter())

    def find_last_call(self, replica: int) -> tuple[int, str, tuple[int, float] | None]:
        """How many calls a replica has made, the last one as text, and its thread and start while it runs."""
        last = self._last[replica]
        return self._made[replica], "" if last is None else last.describe(), self._inside[replica]

    def threads_in_calls(self) -> list[int]:
        """The threads on which calls are running."""
        return [inside[0] for inside in self._inside if inside is not None]

    def running_calls(self) -> tuple[list[int], int]:
        """The threads on which calls are running, and how many calls were made."""
        return self.threads_in_calls(), sum(self._made)

    def argument(self, number: int, replica: int) -> Any:
        """A replica's value of an argument that no device can have."""
        values = self.arguments[number]
        return values[replica % len(values)]

    def new_token(self, replica: int) -> int:
        """A negative number that no other call has; it belongs to the replica."""
        self._tokens[replica] -= self.size
        return self._tokens[replica]

    def run(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` with the state of the thread that launched the program."""

        def inherited() -> Any:
            with thread_state.enter_locals(self._locals):
                return fn()

        return self._context.copy().run(inherited)

    def note(self, error: BaseException, replica: int, call: SessionCall) -> None:
        """Notes that a call raised."""
        if self.is_over and isinstance(error, tf.errors.CancelledError):
            return  # `give_up` ended it
        error = error.with_traceback(_skip_own_frames(error.__traceback__))
        failure = _RaisedCall(error, replica, call, self._times.get((call.index, replica), 0))
        with self._lock:
            self.failures.append(failure)
            self._limit_wait()
        self.give_up()

    def _limit_wait(self) -> None:
        """Limits the time that a thread waits for the program after a call has failed; with the lock.

        On zeros a replica may have taken another branch than the other replicas, which wait for it in a collective.
        Nothing can end that wait, but the exception must reach the user.
        """
        if self._is_awaited and self.failures and self._wait is None:
            breaker = self.wake or _thread.interrupt_main  # the runtime waits in C++, where only a signal reaches it
            # No `with` block: the thread that waits for the program leaves the wait, and another may have entered it.
            self._wait = Wait(None, timeout=_STUCK_AFTER, late=self._late, breaker=breaker)
            self._wait.__enter__()

    def _late(self) -> TimeoutError | None:
        """What ends the wait; None if it was left already: an interrupt would come in whatever the user does now."""
        return TimeoutError() if self._is_awaited else None

    def leave_wait(self) -> None:
        """Notes that no thread waits for the program. May be called again if an exception comes in it."""
        with self._lock:
            self._is_awaited = False
            if self._wait is not None:
                self._wait.__exit__(None, None, None)

    @property
    def _is_stuck(self) -> bool:
        return self._wait is not None and self._wait.error is not None

    def end(self, wait: Callable[[], None]) -> None:
        """Waits for the end of the program.

        Args:
            wait: waits for it.

        Raises:
            Exception: the first exception that a call raised, with notes that say where it and others were raised;
                otherwise the exception that `wait` raised.
        """
        try:
            with self._lock:
                self._is_awaited = True
                self._limit_wait()
            wait()
        except (Exception, KeyboardInterrupt) as error:
            # A call's exception comes first: it may be the reason why the program, or the wait for it, ended.
            if not self.failures or (isinstance(error, KeyboardInterrupt) and not self._is_stuck):
                raise
        finally:
            self.leave_wait()
        self.has_ended = not self._is_stuck
        for kept in self.kept:
            kept.clear()
        self.host_variables.clear()
        if self.failures:
            self._raise_first()

    def _raise_first(self) -> NoReturn:
        # Not kept: an exception holds the frames it passed through, and the compiled program holds this session.
        failures, self.failures = self.failures, []
        # Which of several equal failures came first is chance, so the replica with the lowest number counts as first.
        alike = [each for each in failures if each.call is failures[0].call and is_alike(each.error, failures[0].error)]
        first = min(alike, key=lambda failure: (failure.replica, failure.times))
        others = [failure for failure in failures if failure not in alike]
        for failure in [first, *others[:7]]:
            number, size = self.first + failure.replica, self._devices.replicas
            place = f"replica {number} of {size}, {self._devices.names[failure.replica]}"
            if self._step is not None:
                place += f", iteration {self._step} of the device loop"
            where = f"{place}, in {failure.call.describe()}, execution {failure.times} of it there"
            if failure is not first:
                add_note(first.error, f"also failed: {where}: {in_words(failure.error)}")
                continue
            if isinstance(first.error, DebugError):  # it names the replica, which need not be the one that compared
                continue
            add_note(first.error, where)
            same = [self.first + each.replica for each in alike if each.replica != first.replica]
            note_failed_alike(first.error, same)
        if self._step is not None:
            add_note(first.error, "what this step wrote is not kept")
        if len(others) > 7:
            add_note(first.error, f"and {len(others) - 7} more")
        if self._is_stuck:
            add_note(
                first.error,
                f"The program has not ended. Either it takes long, or its {self.size} replicas wait for each other: "
                "the replica of the failed call went on with zeros, and may have taken another path than the others. "
                "If the next run does not return, make a new strategy, and load the variables from a checkpoint.",
            )
        try:
            raise first.error
        finally:
            del first, failure, failures, alike, others  # the exception holds this frame too


def _skip_own_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame outside this library; the whole traceback if all frames are inside."""
    frame = frames
    while frame is not None and is_internal(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return frame or frames


class HostVariables:
    """Gives each replica a variable of its own, so that what the body changes is changed once, and not once a replica.

    Replica 0 has the variable itself, and the others have copies of its value from before the launch. They go with the
    launch: what all replicas do alike gives equal values, and otherwise the value of replica 0 stays. An on-read
    variable has a variable for each replica anyway.

    Args:
        size: the number of replicas of this process.
    """

    def __init__(self, size: int):
        self._size = size
        self._lock = threading.Lock()
        self._own: dict[int, tuple[list[tf.Tensor], list[Any]]] = {}  # by the id of a handle: handles, and copies

    def handle(self, handle: tf.Tensor, replica: int) -> tf.Tensor:
        """The handle of a replica's own variable. No op may use the variable in this launch before a call of this."""
        with self._lock:
            own = self._own.get(id(handle))
            if own is None:
                own = self._own[id(handle)] = self._made(handle)
            return own[0][replica]

    def clear(self) -> None:
        """Called when the launch is over."""
        self._own = {}

    def _made(self, handle: tf.Tensor) -> tuple[list[tf.Tensor], list[Any]]:
        home = find_device_value(handle)
        assert home is not None, "a variable of a strategy"
        if len(home.handles) == self._size:
            return home.handles, []
        copies = []
        with tf.device("CPU:0"):
            for _ in range(1, self._size):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=home.dtype)
                copies.append(eager.ResourceVariable(value, trainable=False))
        return [handle, *map(eager.raw_handle, copies)], copies
