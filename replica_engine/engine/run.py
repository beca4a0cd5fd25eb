"""The protocol: how the threads of one run take turns, meet, and come to an end.

**Who holds the baton.** At any moment either the coordinator (the thread that called `run`) or exactly one
replica runs; the others wait. A round begins when the coordinator hands the baton to replica 0. Replica 0
runs to its next pause, which is a merge call or the end of its body, and hands the baton to replica 1, and
so on; the last one hands it back to the coordinator. N + 1 hand-overs a round; going through the
coordinator each time would take 2N. The order is part of the contract: programs rely on replica 0 being
the first to create a variable, to trace a function, to append to a list.

**Between rounds** the coordinator looks at where everybody stands:

- all finished: the run is over, the values are the result;
- all paused, in the same merge function: it merges their requests, lays each one's part of the result
  ready, and begins the next round;
- anything else is a mismatch, and an error.

**With `concurrent=True`** the coordinator releases all replicas at once, and the last one to pause hands the
baton back. Where replica 0 may have things to build that the others then find (`builds`), it gets a head
start: the others are released when it has paused, or when it has built nothing for a while.

**When something fails** the run is given up: `given_up` is set, and the baton comes back to the coordinator
at once; replicas that have not had their turn in this round do not get it. The coordinator then wakes the
others one by one, in order. A paused replica finds `given_up` and raises ReplicaUnwound out of its `pause`,
so that its `finally` blocks run; one that has not started does not start. Failures on the way down are
kept and become notes. A replica that still runs (with `concurrent=True`, or after Ctrl-C) is given a while
to reach its next pause. After that it is abandoned: its thread is never used again.

**What must never happen:**

- two replicas running at once without `concurrent=True`;
- an event set in one run and found set in the next. In a run that ends well each `set` is matched by one
  `wait`. In any other run stray wake-ups are possible (the baton and the unwinding may both wake a
  replica), and so its threads are closed, not reused (`group.py`);
- an outcome lost: a body's value or exception is kept on its replica before the baton moves on;
- a wait that nobody knows of. The watchdog (`telemetry/watchdog.py`) watches each run, and counts from when the baton
  last moved. When it has not for long, it logs a table. When there is a `timeout` it ends the wait: it wakes the
  coordinator, or, if that is in a merge function, has an exception raised in it. A paused replica looks now and then
  whether its coordinator still lives.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replica_engine import errors
from replica_engine.engine.event import Event
from replica_engine.engine.group import SyncGroup
from replica_engine.engine.observer import Observer
from replica_engine.engine.replica import Replica
from replica_engine.engine.sync_point import State, SyncPoint
from replica_engine.errors.timeouts import IN_MERGE
from replica_engine.process.interrupts import break_off, take_back, wait_for_ever
from replica_engine.telemetry import timeline
from replica_engine.telemetry.stacks import stack_of
from replica_engine.telemetry.watchdog import Watch

UNWIND_GRACE = 30.0  # seconds for the others to come down after a failure
HEAD_START = 0.5  # seconds that replica 0 has to begin to build
INTERRUPT_GRACE = 0.5  # seconds for the same after Ctrl-C, which must be answered within one
SETTLING = 0.05  # seconds for an exception that is on its way to a thread to arrive


class Run:
    """One run of N bodies on a sync group.

    Args:
        group: N parked threads.
        bodies: what each replica does, given its `Replica`, which it uses to pause.
        merge: called by the coordinator with the N requests of a sync point, in order of the replicas;
            returns what each replica's `pause` returns.
        concurrent: release all replicas at once.
        builds: with `concurrent`, gives replica 0 a head start in each round; called after a while of it,
            it says whether replica 0 is building and has to be waited for. None: no head start.
        timeout: seconds a replica may take to reach its next sync point, or a merge to end; None waits on.
        warn_after: seconds after which, and again after as many, there is a warning; None takes the process' own.

    Attributes:
        coordinator: the thread that called.
        given_up: whether nothing will come of waiting.
        replicas: in order.
        record: of sync points.
        number: of this run.
        name: of who runs, for timelines.
        observer: draws the run; None where no timeline is being recorded.
        began: when it was made, in seconds of `time.perf_counter`.
        merged: when the last merge began and ended, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        group: SyncGroup,
        bodies: Sequence[Callable[[Replica], Any]],
        merge: Callable[[list[Any]], Sequence[Any]],
        *,
        concurrent: bool = False,
        builds: Callable[[], bool] | None = None,
        timeout: float | None = None,
        warn_after: float | None = None,
    ):
        self.coordinator = threading.current_thread()
        self.given_up = False
        self.record, self.name = group.record, group.name
        self.number = self.record.new_run()
        self.began = time.perf_counter()
        recorded = timeline.recording()
        self.observer = Observer(group.name, self.coordinator, self.began) if recorded else None
        self.merged = (0.0, 0.0)
        self.replicas = [
            Replica(self, index, device, thread)
            for index, (device, thread) in enumerate(zip(group.devices, group.threads, strict=True))
        ]
        self._bodies = bodies
        self._merge = merge
        self._concurrent = concurrent
        self._builds = builds
        self._timeout = timeout
        self._has_paused = Event()  # the baton, on its way back to the coordinator
        self._first_has_paused = Event()  # with a head start: replica 0 has
        self._watch = Watch(self._describe, warn_after, timeout, self._expire)
        self._merging = False
        self._standstill: tuple[list[errors.ReplicaRow], errors.CoordinatorRow] | None = None  # when time ran out
        self._broken_off: type[BaseException] | None = None  # what is raised in a merge when time has run out
        self._lock = threading.Lock()
        self._still_running = 0

    def __call__(self) -> list[Any]:
        """Runs the bodies to their ends.

        Returns:
            What each body returned, in order of the replicas.

        Raises:
            MergeCallMismatchError: the replicas did not meet at the same sync points.
            ReplicaTimeoutError: a replica did not come back within `timeout`.
            Exception: what a body or `merge` raised, with notes.
        """
        try:
            with self._watch:
                results = self._rounds()
            if self._watch.expired:
                self._settle()
            return results
        except BaseException as error:
            late = self._as_late(error)
            if late is None:
                self._give_up(error)
                raise
            self._give_up(late)
            raise late from None
        finally:
            # Run, replicas and bodies refer to each other. Cut through, what they hold is freed now; left
            # to the garbage collector, tensors would outlive the step by many steps.
            for replica in self.replicas:
                replica.forget()
            del self._bodies, self._merge
            self._builds = None  # Not deleted: an abandoned replica may still hand over.

    def _rounds(self) -> list[Any]:
        """All rounds; the values at the end."""
        for replica, body in zip(self.replicas, self._bodies, strict=True):
            replica.thread.assign(functools.partial(replica.execute, body))
        while True:
            self._round()
            if all(replica.state is State.FINISHED for replica in self.replicas):
                if self.observer is not None:
                    self.observer.ended([(replica.track, replica.since) for replica in self.replicas])
                return [replica.value for replica in self.replicas]
            self._check_meeting()
            self._meet()

    def _meet(self) -> None:
        """All have paused at one sync point: merges, and lays each one's part of the result ready."""
        self._watch.beat()
        self._merging = True
        began = time.perf_counter()
        with contextlib.nullcontext() if self.observer is None else self.observer.merging(self.sync_point()[0]):
            results = self._merge([replica.request for replica in self.replicas])
        self.merged = began, time.perf_counter()
        self._merging = False
        for replica, result in zip(self.replicas, results, strict=True):
            replica.resume_with(result)

    def is_orphaned(self) -> bool:
        """Whether its coordinator is gone. The main thread never is, though Python says so in functions of `atexit`."""
        return not self.coordinator.is_alive() and self.coordinator is not threading.main_thread()

    def hand_over(self, replica: Replica) -> None:
        """Passes the baton on. Called by a replica's thread when it pauses or ends."""
        self._watch.beat()
        if self._concurrent:
            if replica.index == 0 and self._builds is not None:
                self._first_has_paused.set()
            with self._lock:
                self._still_running -= 1
                to_coordinator = self._still_running == 0
        else:
            to_coordinator = replica.index == len(self.replicas) - 1
        if to_coordinator or self.given_up or replica.state is State.FAILED:
            self._has_paused.set()
        elif not self._concurrent:
            self.replicas[replica.index + 1].thread.should_run.set()

    def _round(self) -> None:
        """Takes every replica to its next pause; raises what one of them raised."""
        self._watch.beat()
        self._still_running = len(self.replicas)
        self._first_has_paused.wait(0)  # Clears it: in the round before, nobody may have waited for it.
        first, *others = self.replicas
        first.thread.should_run.set()
        if self._concurrent:
            if self._builds is not None:
                self._give_head_start(self._builds)
            if first.state is not State.FAILED:
                for replica in others:
                    replica.thread.should_run.set()
        self._wait(self._has_paused)
        for replica in self.replicas:
            if replica.state is State.FAILED:
                assert replica.error is not None
                raise replica.error

    def _give_head_start(self, builds: Callable[[], bool]) -> None:
        if not self._first_has_paused.wait(HEAD_START) and builds():
            self._wait(self._first_has_paused)

    def _wait(self, event: Event) -> None:
        """Waits for the event, or for the time to run out."""
        wait_for_ever(event.wait)
        if self._watch.expired:
            raise self._timed_out()

    def _describe(self, waited: float) -> str:
        """The warning; called by the watchdog."""
        return errors.slow_replicas(waited, *self._stand())

    def _expire(self, waited: float) -> None:
        """The time has run out; called by the watchdog."""
        try:
            self._standstill = self._standstill or self._stand()
        finally:
            self._end_wait()

    def _end_wait(self) -> None:
        if self._merging and self.coordinator.ident is not None:
            again = self._watch.expired > 1  # what is to be done as a whole has had its time, too
            self._broken_off = break_off(self.coordinator.ident, errors.ReplicaUnwound, at_once=again)
        else:
            self._has_paused.set()
            self._first_has_paused.set()

    def _timed_out(self) -> errors.ReplicaTimeoutError:
        return errors.ReplicaTimeoutError.after(self._timeout or 0.0, *(self._standstill or self._stand()))

    def _as_late(self, error: BaseException) -> errors.ReplicaTimeoutError | None:
        """What is to be raised in the place of what ended the run, if time had run out."""
        if not self._watch.expired or isinstance(error, errors.ReplicaTimeoutError):
            return None
        if self._broken_off is not None and not isinstance(error, self._broken_off):
            self._settle()
            return None  # it ended by itself, at the last moment
        return self._timed_out()

    def _settle(self) -> None:
        """What was to be raised in the merge came too late for it: has it arrive here, and go no further."""
        with contextlib.suppress(KeyboardInterrupt, errors.ReplicaUnwound):
            time.sleep(SETTLING)
        take_back(threading.get_ident())

    def _stand(self) -> tuple[list[errors.ReplicaRow], errors.CoordinatorRow]:
        """Where everybody is now."""
        rows = [replica.timed_row() for replica in self.replicas]
        thread = self.coordinator
        first = self.replicas[0].last
        if not self._merging or first is None:
            return rows, errors.CoordinatorRow(thread.name, "waiting for the replicas", self._watch.waited)
        state = f"{IN_MERGE}{first}"
        return rows, errors.CoordinatorRow(thread.name, state, self._watch.waited, stack_of(thread.ident))

    def _check_meeting(self) -> None:
        """All replicas have paused or finished: did they meet?"""
        if any(replica.state is State.FINISHED for replica in self.replicas):
            raise errors.MergeCallMismatchError.different_counts(self._rows())
        first, *others = self.replicas
        if any(replica.meets != first.meets for replica in others):
            raise errors.MergeCallMismatchError.different_functions(self._rows())

    def _give_up(self, error: BaseException) -> None:
        """Takes down every replica that is not over, and writes what is known onto `error`."""
        self.given_up = True  # First of all: from here on no replica goes on, whatever else happens.
        rows = self._rows()  # as they stand now; a moment later all are unwound
        culprit = next((replica for replica in self.replicas if replica.error is error), None)
        no_patience = isinstance(error, errors.ReplicaTimeoutError) or (
            culprit is None and isinstance(error, KeyboardInterrupt)
        )
        deadline = time.monotonic() + (INTERRUPT_GRACE if no_patience else UNWIND_GRACE)
        # Those that wait come down at once. Those that run may take the whole time there is, so they are last.
        running = [replica for replica in self.replicas if replica.state is State.RUNNING]
        for replica in [replica for replica in self.replicas if replica not in running] + running:
            if replica.over:
                continue
            if no_patience and replica.state is State.RUNNING:
                replica.thread.interrupt()
            replica.thread.should_run.set()
            while not replica.over and time.monotonic() < deadline:
                # Whoever comes down sets this event; that may be another replica, so look again.
                self._has_paused.wait(deadline - time.monotonic())
        abandoned = [replica for replica in self.replicas if not replica.over]
        stuck = [replica.timed_row() for replica in abandoned]
        if not no_patience:  # else they have been, and each takes a moment of the second that Ctrl-C has
            for replica in abandoned:
                replica.thread.interrupt()
        if culprit is not None:
            others = [replica for replica in self.replicas if replica is not culprit]
            failed = [(other.row(), other.error) for other in others if other.error is not None]
            errors.note_failure(error, rows[culprit.index], failed)
        errors.note_abandoned(error, stuck)

    def _rows(self) -> list[errors.ReplicaRow]:
        return [replica.row() for replica in self.replicas]

    def sync_point(self) -> list[SyncPoint]:
        """Where the replicas have paused; for the time of a merge."""
        points = [replica.last for replica in self.replicas if replica.last is not None]
        assert len(points) == len(self.replicas), "all have paused"
        return points
