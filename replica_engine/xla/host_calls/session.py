"""One launch of a program that calls the host: what failed, and what the calls have to remember.

A loop whose condition comes from the host may never end on the zeros that calls return after a failure. So after
`_PATIENCE` more calls of each replica a call does end the program. That is the same call on all replicas, if they run
in step, so none waits for another.
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

import numpy as np

from replica_engine._tf import thread_state
from replica_engine.diagnostics.user_frames import is_internal
from replica_engine.errors import add_note, is_alike, note_failed_alike, note_host_failure, note_stuck
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.xla.infeed import InputQueue

_PATIENCE = 10_000  # host calls of a replica, about a second
_STUCK_AFTER = 15.0  # seconds from a failure to the end of the program


class Call(Protocol):
    """What a session has to know of a host call; see `call.HostCall`."""

    index: int
    is_users: bool

    def describe(self) -> str:
        """The call in words, with the user's line, for messages."""


@dataclass(eq=False)  # the user's exceptions may not be comparable
class _Failure:
    """A host call that raised.

    Attributes:
        error: what.
        replica: on which replica.
        call: in which call.
        times: how many calls of this one the replica had made, with this.
        step: in which step of a device loop, from 0; None in no loop.
    """

    error: BaseException
    replica: int
    call: Call
    times: int
    step: int | None


class Kept:
    """What the calls of one replica keep for their gradients, by token.

    In a device loop it is kept for a step and the next: a gradient has no place in the order of the calls, so the
    call for the next batch may overtake it. But when the one after that comes, the whole step is over.

    Attributes:
        on_host: values that no device can have, by number (`soft_placement`).
        texts: the batch of a device loop that the replica is in, if there are strings in it.
        tapes: of the Python functions of `tf.py_function`, by token: of each call that its gradient has not asked yet.
    """

    def __init__(self) -> None:
        self._now: dict[int, Any] = {}
        self._before: dict[int, Any] = {}
        self.on_host: dict[int, Any] = {}
        self.tapes: dict[str, list[Any]] = {}
        self.texts: Sequence[np.ndarray] = ()

    def __setitem__(self, token: int, value: Any) -> None:
        self._now[token] = value

    def __getitem__(self, token: int) -> Any:
        return self._now[token] if token in self._now else self._before[token]

    def next_step(self) -> None:
        """Another batch is asked for."""
        self._before, self._now = self._now, {}
        self.tapes = {}

    def clear(self) -> None:
        """The run is over."""
        self._before, self._now = {}, {}
        self.on_host, self.tapes = {}, {}


class Session:
    """One launch of a program with host calls.

    Args:
        devices: where it runs.
        feed: the inputs of a device loop.

    Attributes:
        size: the number of replicas.
        failures: calls that raised, in the order of time.
        kept: for each replica what gradients of its calls need.
        has_ended: whether the program has.
        steps: for each replica the first step of the chunk of a device loop that it is in, from 0; None in no loop.
        beat: called when a replica comes to a call, and when it goes.
        draw: adds a call to timelines, of the replica, the call, its beginning and its end; None if there are none.
        wake: ends the wait for the program, where another thread than the waiting one launched it; else None.
        arguments: of those that no device can have, by number: one value, or one for each replica.
    """

    def __init__(self, devices: DeviceGroup, feed: InputQueue | None):
        size = self.size = devices.size
        self.has_ended = False
        self.failures: list[_Failure] = []
        self.kept = [Kept() for _ in range(size)]
        self.steps: list[int | None] = [None] * size
        self._next_steps = [0] * size
        self.beat: Callable[[], None] = _nothing
        self.draw: Callable[[int, Call, float, float], None] | None = None
        self.wake: Callable[[], None] | None = None
        self.arguments: Mapping[int, Sequence[Any]] = {}
        self._inside: list[tuple[int, float] | None] = [None] * size  # the thread of each replica's call, since when
        self._last: list[Call | None] = [None] * size
        self._times: dict[tuple[int, int], int] = {}
        self._made = [0] * size  # calls of each replica
        self._most: int | None = None  # how many more calls than this none may make
        self._tokens = list(range(size))
        self._lock = threading.Lock()
        self._devices = devices
        self._feed = feed
        self._waiting: int | None = None  # the thread that waits for the program
        self._timer: threading.Timer | None = None
        self._is_stuck = False
        # What the calls take over from the thread that launches: summary writers and the like.
        self._locals = thread_state.locals_of_thread()
        self._context = contextvars.copy_context()

    @property
    def is_over(self) -> bool:
        """Whether calls return zeros."""
        return self._most is not None

    def give_up(self) -> None:
        """Has all later calls return zeros, a device loop stop, and the program end if it does not by itself."""
        if self._feed is not None:
            self._feed.stop()
        with self._lock:
            if self._most is None:
                self._most = max(self._made) + _PATIENCE

    def enter(self, call: Call, replica: int) -> None:
        """A replica makes a call.

        Raises:
            RuntimeError: the run is over, and the program has had its time to end by itself.
        """
        self._made[replica] += 1
        self._come_to(call, replica)
        if self._most is None:
            self._times[call.index, replica] = self._times.get((call.index, replica), 0) + 1
        elif self._made[replica] > self._most:
            raise RuntimeError("The run has failed, and its program does not end by itself.")

    def _come_to(self, call: Call, replica: int) -> None:
        self._last[replica] = call
        self._inside[replica] = threading.get_ident(), time.perf_counter()
        self.beat()

    def leave(self, call: Call, replica: int) -> None:
        """A replica's call is over."""
        inside, self._inside[replica] = self._inside[replica], None
        self.beat()
        if self.draw is not None and inside is not None:
            self.draw(replica, call, inside[1], time.perf_counter())

    def place_of(self, replica: int) -> tuple[int, str, tuple[int, float] | None]:
        """How many calls a replica has made, the last of them, and the thread and time if it is in that."""
        last = self._last[replica]
        return self._made[replica], "" if last is None else last.describe(), self._inside[replica]

    def threads_in_calls(self) -> list[int]:
        """The threads on which calls are going on."""
        return [inside[0] for inside in self._inside if inside is not None]

    def argument(self, number: int, replica: int) -> Any:
        """A replica's value of an argument that no device can have."""
        values = self.arguments[number]
        return values[replica % len(values)]

    def new_token(self, replica: int) -> int:
        """A negative number of the replica's that no other call has."""
        self._tokens[replica] -= self.size
        return self._tokens[replica]

    def next_steps(self, call: Call, replica: int) -> tuple[list[list[np.ndarray]], bool]:
        """A replica goes on to the next steps of a device loop: its part of their batches, and whether more follow."""
        assert self._feed is not None, "launched with one"
        self.steps[replica] = self._next_steps[replica]
        self.kept[replica].next_step()
        self._come_to(call, replica)
        try:
            batches, more = self._feed.take(replica)
        finally:
            self.leave(call, replica)
        self._next_steps[replica] += len(batches)
        return batches, more

    def run(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` as if on the thread that launched."""

        def inherited() -> Any:
            with thread_state.enter_locals(self._locals):
                return fn()

        return self._context.copy().run(inherited)

    def note(self, error: BaseException, replica: int, call: Call) -> None:
        """A call raised."""
        error = error.with_traceback(_of_user(error.__traceback__))
        failure = _Failure(error, replica, call, self._times.get((call.index, replica), 0), self.steps[replica])
        with self._lock:
            self.failures.append(failure)
            if self._waiting is not None:
                self._limit_wait()
        self.give_up()

    def _limit_wait(self) -> None:
        """A call has failed, and somebody waits for the program."""
        if self._timer is None:
            self._timer = threading.Timer(_STUCK_AFTER, self._end_wait)
            self._timer.daemon = True
            self._timer.start()

    def _end_wait(self) -> None:
        """Ends the wait for a program that does not end after a failure.

        On zeros a replica may have taken another way than the others, who wait for it in a collective. Nothing ends
        that; but the exception must reach the user.
        """
        if self.wake is not None:
            self._is_stuck = True
            self.wake()
        else:
            with self._lock:  # or nobody would wait any more when it comes
                if self._waiting == threading.main_thread().ident:
                    self._is_stuck = True
                    _thread.interrupt_main()

    def end(self, wait: Callable[[], None]) -> None:
        """Waits for the end of the program.

        Raises:
            Exception: the first that a call raised, with notes of where it and others were raised; or what `wait`
                raised.
        """
        with self._lock:
            self._waiting = threading.get_ident()
            if self.failures:
                self._limit_wait()
        try:
            wait()
        except (Exception, KeyboardInterrupt) as error:
            # What a call raised comes first: the program may have ended for that, or the wait for it.
            if not self.failures or (isinstance(error, KeyboardInterrupt) and not self._is_stuck):
                raise
        finally:
            with self._lock:
                self._waiting = None
                if self._timer is not None:
                    self._timer.cancel()
        self.has_ended = not self._is_stuck
        for kept in self.kept:
            kept.clear()
        if self.failures:
            self._raise_first()

    def _raise_first(self) -> NoReturn:
        # Not kept: an exception holds the frames it went through, and the compiled program holds this.
        failures, self.failures = self.failures, []
        # Which of those that say the same came first is chance: the replica with the lowest number is taken for it.
        alike = [each for each in failures if each.call is failures[0].call and is_alike(each.error, failures[0].error)]
        first = min(alike, key=lambda failure: (failure.replica, failure.times))
        others = [failure for failure in failures if failure not in alike]
        for failure in [first, *others[:7]]:
            place = f"replica {failure.replica} of {self.size}, {self._devices.names[failure.replica]}"
            if failure.step is not None:
                place += f", iteration {failure.step} of the device loop"
            raised = None if failure is first else failure.error
            note_host_failure(first.error, place, failure.call.describe(), failure.times, raised)
            if failure is first:
                note_failed_alike(first.error, [each.replica for each in alike if each.replica != first.replica])
        if first.step is not None:
            add_note(first.error, "what the steps of this launch wrote is not kept")
        if len(others) > 7:
            add_note(first.error, f"and {len(others) - 7} more")
        if self._is_stuck:
            note_stuck(first.error, self.size)
        try:
            raise first.error
        finally:
            del first, failure, failures, alike, others  # this frame is one of those


class NoCalls:
    """A launch of a program without host calls."""

    @staticmethod
    def end(wait: Callable[[], None]) -> None:
        """As of `Session`."""
        wait()

    @staticmethod
    def place_of(replica: int) -> tuple[int, str, tuple[int, float] | None]:
        """As of `Session`."""
        return 0, "", None


def _nothing() -> None:
    """Nobody wants to know."""


def _of_user(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame that is not the library's own; whole if there is none."""
    frame = frames
    while frame is not None and is_internal(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return frame or frames
