"""One replica in one run, its states, and how a run is drawn on a timeline."""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Protocol

from replica_engine.engine.sync_point import SyncPoint, SyncRecord
from replica_engine.engine.thread_pool import ReplicaThread
from replica_engine.errors import ReplicaRow, ReplicaUnwound
from replica_engine.watch import timeline, watchdog


class State(enum.Enum):
    """What a replica is doing in its run. The values are the words that error tables print."""

    IDLE = "not started"
    RUNNING = "running"
    PAUSED = "waiting in a merge call"
    READY = "merged, waiting for its turn"
    BACK = "at the end of the branch"
    FINISHED = "finished"
    UNWINDING = "being taken down"
    FAILED = "failed"
    UNWOUND = "unwound"


class Observer:
    """Draws one run on a timeline: one track for each replica, and one for the coordinator.

    A run has an observer only while a timeline is being recorded. A run that is not recorded pays one comparison with
    None at each place where something could be drawn.

    Args:
        name: the name under which timelines show the run, such as the name of the strategy.
        coordinator: the thread that called `run`.
        began: when the run began, in seconds of `time.perf_counter`, as are all times in this class.
        traces: whether the run is drawn as a trace.
    """

    def __init__(self, name: str, coordinator: threading.Thread, began: float, traces: bool = False):
        self._name = name
        self._what = "trace" if traces else "run"
        self._began = began
        self._coordinator = timeline.Track(name, f"coordinator ({coordinator.name})", coordinator.ident or 0, 0)

    def turn(self, track: timeline.Track, since: float) -> None:
        """Draws the wait of a replica for its first turn, which began at `since`."""
        timeline.add(track, "waiting for its turn", "waiting", self._began, since)

    def ran(self, track: timeline.Track, begin: float, end: float) -> None:
        """Draws the time in which a replica ran the user's code."""
        timeline.add(track, "run", "run", begin, end)

    def met(self, track: timeline.Track, point: SyncPoint) -> None:
        """Draws a sync point that a replica has left: the merge, and the waits before and after it."""
        began, ended = point.merged
        details = {"where": point.where}
        timeline.add(track, f"waiting at {point.name}", "waiting", point.arrived, began, details)
        timeline.add(track, point.name, "merge", began, ended, details)
        timeline.add(track, "waiting for its turn", "waiting", ended, point.left)

    @contextlib.contextmanager
    def merging(self, point: SyncPoint) -> Iterator[None]:
        """A context manager around the coordinator's merge, which it draws."""
        began = time.perf_counter()
        try:
            with timeline.profiled(f"merge {point.name}"):
                yield
        finally:
            where = {"where": point.where}
            timeline.add(self._coordinator, point.name, "merge", began, time.perf_counter(), where)

    def ended(self, replicas: list[tuple[timeline.Track, float]]) -> None:
        """Draws the end of a run that ended well.

        Args:
            replicas: the track of each replica, and when the replica finished.
        """
        now = time.perf_counter()
        for track, since in replicas:
            timeline.add(track, "waiting for the end of the run", "waiting", since, now)
        timeline.add(self._coordinator, self._what, "waiting", self._began, now, {"replicas": len(replicas)})


OVER = (State.FINISHED, State.FAILED, State.UNWOUND)
COORDINATOR_CHECK = 30.0  # seconds between two checks of a paused replica whether its coordinator is alive


class Round(Protocol):
    """The part of a run that its replicas use; see `run.Run`.

    Attributes:
        coordinator: the thread that called `run`.
        given_up: whether the run was given up, so that waiting is useless.
        merged: when the last merge began and ended, in seconds of `time.perf_counter`.
        name: the name under which timelines show the run, such as the name of the strategy.
        number: the number of the run.
        observer: draws the run on a timeline; None if no timeline is being recorded.
        record: the record of sync points, which all runs of a strategy have in common.
        replicas: all replicas of the run, in order.
    """

    coordinator: threading.Thread
    given_up: bool
    merged: tuple[float, float]
    name: str
    number: int
    observer: Observer | None
    record: SyncRecord
    replicas: list[Replica]

    def hand_over(self, replica: Replica) -> None:
        """Passes the baton on."""

    def is_orphaned(self) -> bool:
        """Whether the coordinator has ended."""


class Errand(NamedTuple):
    """What a paused replica does on its own thread before its `pause` returns; see `Run.errands`."""

    call: Callable[[], Any]


class Outcome(NamedTuple):
    """What came of an errand: the value of its call, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None


class Replica:
    """One replica in one run: the state that its thread and the coordinator share.

    Exactly one thread may use this object at a time: the replica's own thread while it holds the baton, the
    coordinator while the replica is paused or finished. The events between the two threads are the only
    synchronization, so a thread that does not hold the baton must never write to the object. Any thread may
    read `state` at any time, for reports.

    Attributes:
        run: the run.
        index: 0-based index of the replica in the run.
        device: its device, in the short form "CPU:1".
        state: what the replica is doing.
        since: when the state began, or when the replica last reached or left a sync point, in seconds of
            `time.perf_counter`.
        last: the last sync point that the replica reached in this run.
        meets: the identity of that sync point: replicas meet only if their identities are equal.
        merge_calls: the number of sync points that the replica has reached in this run.
        request: the argument of the latest `pause`, or the `Outcome` of an errand, until the coordinator takes it.
        value: what the body returned.
        error: what the body raised.
    """

    def __init__(self, run: Round, index: int, device: str, thread: ReplicaThread):
        self.index = index
        self.device = device
        self.thread = thread
        self.state = State.IDLE
        self.since = 0.0
        self.last: SyncPoint | None = None
        self.meets: object = None
        self.merge_calls = 0
        self.request: Any = None
        self.value: Any = None
        self.error: BaseException | None = None
        self._result: Any = None
        self.run = run

    def pause(self, point: SyncPoint, request: Any) -> Any:
        """Waits at a sync point until the coordinator has merged. Called on the replica's own thread.

        Args:
            point: the sync point; it is compared with those of the other replicas, and shown in reports.
            request: what the coordinator's `merge` receives from this replica.

        Returns:
            This replica's part of the result of the merge.

        Raises:
            ReplicaUnwound: the run was given up.
        """
        run = self.run
        if run.given_up:
            self._unwind()
        self.merge_calls += 1
        point.run, point.number, point.arrived = run.number, self.merge_calls, time.perf_counter()
        # The identity may be an object of the user. The record outlives the run, so it must not hold the identity.
        self.meets, point.identity = point.identity, None
        self.last = point
        run.record.rings[self.index].append(point)
        self.request = request
        self.state = State.PAUSED
        observer, began, self.since = run.observer, self.since, point.arrived
        if observer is None:
            self._wait()
        else:
            observer.ran(self.track, began, point.arrived)
            with timeline.profiled(f"{self} waiting at {point.name}"):
                self._wait()
        result, self._result = self._result, None
        while type(result) is Errand:
            result = self._run_errand(result)
        self.state = State.RUNNING
        point.merged, point.left = run.merged, time.perf_counter()
        if observer is not None:
            observer.met(self.track, point)
        self.since = point.left
        if type(result) is Outcome and result.error is not None:
            raise result.error
        return result

    def _run_errand(self, errand: Errand) -> Any:
        """Runs an errand, reports its outcome to the coordinator, and returns what the coordinator answers."""
        observer = self.run.observer
        self.state, self.since = State.RUNNING, time.perf_counter()
        try:
            outcome = Outcome(value=errand.call())  # it may pause at further sync points
        except Exception as error:  # of the user's code, for the coordinator to judge: see `Run.errands`
            if self.run.given_up:  # raised by a `finally` while the replica unwinds: nobody takes an outcome any more
                raise
            outcome = Outcome(error=error)
        if observer is not None:
            observer.ran(self.track, self.since, time.perf_counter())
        self.request, self.state, self.since = outcome, State.BACK, time.perf_counter()
        self._wait()
        result, self._result = self._result, None
        return result

    def _wait(self) -> None:
        """Passes the baton on, and waits until it comes back."""
        run = self.run
        run.hand_over(self)
        while True:
            woken = self.thread.should_run.wait(COORDINATOR_CHECK)
            if run.given_up or run.is_orphaned():
                self._unwind()
            if woken and self.state is State.READY:  # A wake-up before the merge is not a turn.
                return

    def _unwind(self) -> NoReturn:
        """Raises ReplicaUnwound, which runs the `finally` blocks and context managers of the body."""
        self.state, self.since = State.UNWINDING, time.perf_counter()
        raise ReplicaUnwound

    def resume_with(self, result: Any) -> None:
        """Stores the result that `pause` will return. Called by the coordinator."""
        self.request = None
        self._result = result
        # Set here, not when the thread wakes: until then another replica would take this one for paused, and would
        # conclude that it creates no more variables (`threads/shared_variables.py`).
        self.state = State.READY

    def execute(self, body: Callable[[Replica], Any]) -> None:
        """Runs the replica's body and keeps its value or exception. The job of the replica's thread; never raises."""
        run = self.run
        if run.given_up:
            self.state = State.UNWOUND
        else:
            self.thread.replica = self
            self.since = time.perf_counter()
            self.state = State.RUNNING
            try:
                self.value = body(self) if run.observer is None else self._observed(body, run.observer)
                self.state = State.FINISHED
            except ReplicaUnwound:
                self.state = State.UNWOUND
            except BaseException as error:  # an outcome is data: this thread has nobody to raise it to
                self.error = error
                self.state = State.FAILED
            finally:
                self.thread.replica = None
        run.hand_over(self)

    def _observed(self, body: Callable[[Replica], Any], observer: Observer) -> Any:
        """Runs the body for a timeline."""
        observer.turn(self.track, self.since)
        try:
            with timeline.profiled(f"{self} run"):
                return body(self)
        finally:
            if self.state is State.RUNNING:  # and was not unwound while it waited
                began, self.since = self.since, time.perf_counter()
                observer.ran(self.track, began, self.since)

    @functools.cached_property
    def track(self) -> timeline.Track:
        """The track that shows the replica in timelines."""
        return timeline.Track(self.run.name, self.thread.name, self.thread.ident or 0, self.index + 1)

    def forget(self) -> None:
        """Drops the references to values and exceptions, after the coordinator has taken them."""
        self.value = self.request = self.error = self.meets = self._result = None

    @property
    def over(self) -> bool:
        """Whether the body has ended: with a value, with an exception, or unwound."""
        return self.state in OVER

    def row(self, state: State | None = None) -> ReplicaRow:
        """The replica's row in the table of an error; `state` is its state if that was read already."""
        last, words = self.last, (state or self.state).value
        where = "" if last is None else str(last)
        return ReplicaRow(self.index, len(self.run.replicas), self.device, words, self.merge_calls, where)

    def timed_row(self) -> ReplicaRow:
        """The same row, with the seconds in the state, and with the stack of the thread if the replica runs."""
        state = self.state  # read once: the replica may go on meanwhile, and all of the row is about one state
        row = self.row(state)
        if state in OVER or state is State.IDLE:
            return row
        runs = state in (State.RUNNING, State.UNWINDING)
        stack = watchdog.format_thread_stack(self.thread.ident) if runs else ""
        return replace(row, seconds=max(0.0, time.perf_counter() - self.since), stack=stack)

    def __str__(self) -> str:
        return f"replica {self.index} of {len(self.run.replicas)} ({self.device})"


def current_replica() -> Replica | None:
    """The replica that the calling thread is running; None outside a replica."""
    replica = getattr(threading.current_thread(), "replica", None)
    return replica if isinstance(replica, Replica) else None
