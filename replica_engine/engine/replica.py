"""One replica in one run: what its own thread and the coordinator both see of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from replica_engine.engine.sync_point import State, SyncPoint
from replica_engine.engine.thread import ReplicaThread
from replica_engine.errors import ReplicaRow, ReplicaUnwound
from replica_engine.telemetry import timeline
from replica_engine.telemetry.stacks import stack_of
from replica_engine.telemetry.trace_file import Track

if TYPE_CHECKING:
    from replica_engine.engine.run import Run

COORDINATOR_CHECK = 30.0  # seconds between looks at whether a paused replica's coordinator still lives


class Replica:
    """One replica in one run.

    Exactly one thread may touch it at a time: its own while it holds the baton, the coordinator while the
    replica is paused or finished. The events between them are the only synchronisation, so whoever does
    not hold the baton must not write here; `state` may be read at any time, for reports.

    Attributes:
        index: which replica of the run, from 0.
        device: its device, in the short form "CPU:1".
        state: what it is doing.
        since: when that began, or when it last came to or went from a sync point, in seconds of `time.perf_counter`.
        last: the sync point that it reached last in this run.
        meets: what that was made for: only replicas with equal ones meet.
        merge_calls: how many it reached in this run.
        request: what it passed to its latest `pause`, until the coordinator takes it.
        value: what its body returned.
        error: what its body raised.
    """

    def __init__(self, run: Run, index: int, device: str, thread: ReplicaThread):
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
        self._run = run

    def pause(self, point: SyncPoint, request: Any) -> Any:
        """Stops at a sync point until the coordinator has merged. Called on the replica's own thread.

        Args:
            point: where this is, for comparison with the other replicas and for reports.
            request: what the coordinator's `merge` receives for this replica.

        Returns:
            This replica's part of the merge's result.

        Raises:
            ReplicaUnwound: the run was given up.
        """
        run = self._run
        if run.given_up:
            self._unwind()
        self.merge_calls += 1
        point.run, point.number, point.arrived = run.number, self.merge_calls, time.perf_counter()
        # Not in the record, which outlives the run: it may be an object of the user's.
        self.meets, point.identity = point.identity, None
        self.last = point
        run.record.rings[self.index].append(point)
        self.request = request
        self.state = State.PAUSED
        if run.recorded:
            self._draw("run", "run", self.since, point.arrived)
        self.since = point.arrived
        if run.recorded:
            with timeline.profiled(f"{self} waiting at {point.name}"):
                self._wait()
        else:
            self._wait()
        self.state = State.RUNNING
        point.merged, point.left = run.merged, time.perf_counter()
        if run.recorded:
            self._draw_meeting(point)
        self.since = point.left
        result, self._result = self._result, None
        return result

    def _wait(self) -> None:
        """Hands the baton on, and waits for it."""
        run = self._run
        run.hand_over(self)
        while True:
            woken = self.thread.should_run.wait(COORDINATOR_CHECK)
            if run.given_up or run.is_orphaned():
                self._unwind()
            if woken and self.state is State.READY:  # Woken before the merge, it is nobody's turn.
                return

    def _unwind(self) -> NoReturn:
        """Begins to come down: what the replica has open is closed on the way."""
        self.state, self.since = State.UNWINDING, time.perf_counter()
        raise ReplicaUnwound

    def resume_with(self, result: Any) -> None:
        """Lays ready what `pause` will return. Called by the coordinator."""
        self.request = None
        self._result = result
        # Not only when its thread wakes: until then another replica could take it for stopped.
        self.state = State.READY

    def execute(self, body: Callable[[Replica], Any]) -> None:
        """Runs the replica's body, and keeps its value or exception. Its thread's job; never raises."""
        run = self._run
        if run.given_up:
            self.state = State.UNWOUND
        else:
            self.thread.replica = self
            self.since = time.perf_counter()
            self.state = State.RUNNING
            try:
                if run.recorded:
                    self.value = self._recorded(body)
                else:
                    self.value = body(self)
                self.state = State.FINISHED
            except ReplicaUnwound:
                self.state = State.UNWOUND
            except BaseException as error:
                self.error = error
                self.state = State.FAILED
            finally:
                self.thread.replica = None
        run.hand_over(self)

    def _recorded(self, body: Callable[[Replica], Any]) -> Any:
        """Runs the body for a timeline."""
        self._draw("waiting for its turn", "waiting", self._run.began, self.since)
        try:
            with timeline.profiled(f"{self} run"):
                return body(self)
        finally:
            if self.state is State.RUNNING:  # and was not unwound while it waited
                began, self.since = self.since, time.perf_counter()
                self._draw("run", "run", began, self.since)

    def draw_end(self, now: float) -> None:
        """Adds the wait for the others after its end to the timeline. Called by the coordinator."""
        self._draw("waiting for the end of the run", "waiting", self.since, now)

    def _draw_meeting(self, point: SyncPoint) -> None:
        """Adds a sync point that is over to the timeline: the waits before and after, and the merge."""
        began, ended = point.merged
        details = {"where": point.where}
        self._draw(f"waiting at {point.name}", "waiting", point.arrived, began, details)
        self._draw(point.name, "merge", began, ended, details)
        self._draw("waiting for its turn", "waiting", ended, point.left)

    def _draw(self, name: str, kind: str, begin: float, end: float, details: dict[str, Any] | None = None) -> None:
        timeline.add(self.track, name, kind, begin, end, details)

    @property
    def track(self) -> Track:
        """Where it is drawn in timelines."""
        return Track(self._run.name, self.thread.name, self.thread.ident or 0, self.index + 1)

    def forget(self) -> None:
        """Lets go of values and exceptions, once the coordinator has taken them."""
        self.value = self.request = self.error = self.meets = self._result = None

    @property
    def coordinator(self) -> threading.Thread:
        """The thread that called `run`."""
        return self._run.coordinator

    @property
    def given_up(self) -> bool:
        """Whether its run was given up, so that nothing will come of waiting."""
        return self._run.given_up

    @property
    def over(self) -> bool:
        """Whether its body has come to its end, one way or another."""
        return self.state in (State.FINISHED, State.FAILED, State.UNWOUND)

    def row(self) -> ReplicaRow:
        """What is known of it, for an error's table."""
        where = "" if self.last is None else str(self.last)
        return ReplicaRow(self.index, len(self._run.replicas), self.device, self.state.value, self.merge_calls, where)

    def timed_row(self) -> ReplicaRow:
        """The same, with how long it has been there, and the stack of its thread if it runs."""
        row = self.row()
        if self.over or self.state is State.IDLE:
            return row
        runs = self.state in (State.RUNNING, State.UNWINDING)
        stack = stack_of(self.thread.ident) if runs else ""
        return replace(row, seconds=max(0.0, time.perf_counter() - self.since), stack=stack)

    def __str__(self) -> str:
        return f"replica {self.index} of {len(self._run.replicas)} ({self.device})"


def current_replica() -> Replica | None:
    """The replica that the calling thread is running, or None outside any."""
    replica = getattr(threading.current_thread(), "replica", None)
    return replica if isinstance(replica, Replica) else None
