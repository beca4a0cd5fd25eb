"""The protocol: how the threads of one run take turns, meet, and come to an end.

**Who holds the baton.** At any moment either the coordinator (the thread that called `run`) or exactly one
replica runs; all others wait. A round begins when the coordinator hands the baton to replica 0. Replica 0
runs to its next pause, which is a merge call or the end of its body, and hands the baton to replica 1, and
so on. The last replica hands the baton back to the coordinator. A round takes N + 1 hand-overs; if each went
through the coordinator, it would take 2N. The order is part of the contract: programs rely on replica 0 to
be the first that creates a variable, traces a function, or appends to a list.

**Between rounds** the coordinator checks where each replica is:

- all replicas have finished: the run is over, and their values are the result;
- all replicas have paused in the same merge function: the coordinator merges their requests, stores each
  replica's part of the result, and begins the next round;
- anything else is a mismatch, and raises an error.

**With `concurrent=True`** the coordinator releases all replicas at once, and the last replica to pause hands
the baton back. If replica 0 may have to build objects that the other replicas reuse (`builds`), it gets a
head start: the others are released when replica 0 has paused, or when it has built nothing for a while.

**Errands.** A merge may need its replicas again: to build one branch or one loop for all of them, each replica must
trace its own part on its own thread, with its own tapes, contexts and thread-local state. So during a merge the
coordinator may send every paused replica on an errand (`Run.errands`). The replica runs the errand inside its
`pause`, where it may pause again at further sync points; the coordinator merges these there and then, inside the outer
merge. A replica that has done its errand waits at the end of the branch, and the merge goes on when all have. Replicas
on errands always take turns, because they build one graph. An exception that an errand raises waits with its replica:
if every errand raised, the merge is broken off (`ErrandsFailed`), and each replica raises its own exception out of its
`pause`, where the user may catch it; if only some did, the run is given up.

**When something fails** the run is given up: `given_up` is set, and the baton returns to the coordinator at
once. Replicas that have not had their turn in this round do not get it. The coordinator then wakes the other
replicas one by one, in order. A paused replica finds `given_up` set and raises ReplicaUnwound out of its
`pause`, so that its `finally` blocks run. A replica that has not started does not start. An exception that a
replica raises while it unwinds is kept and becomes a note. A replica that still runs (with `concurrent=True`,
or after Ctrl-C) gets a limited time to reach its next pause. After that time it is abandoned: its thread is
never used again.

**What must never happen:**

- Two replicas run at once without `concurrent=True`.
- An event that was set in one run is found set in the next. In a run that ends well, each `set` is matched by
  one `wait`. In any other run stray wake-ups are possible, because the baton and the unwinding may both wake
  a replica. So the threads of such a run are closed and not reused (`thread_pool.py`).
- An outcome is lost. A body's value or exception is kept on its replica before the baton moves on.
- A thread waits without supervision. The watchdog (`watch/watchdog.py`) watches each run, and measures the
  time since the baton last moved. If that time is long, it logs a table. If it exceeds the `timeout`, the
  watchdog ends the wait: it wakes the coordinator or, if the coordinator is in a merge function, raises an
  exception in the coordinator's thread. A paused replica checks from time to time whether its coordinator is
  alive.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replica_engine import errors
from replica_engine.engine.replica_state import Errand, Observer, Outcome, Replica, State
from replica_engine.engine.sync_point import SyncPoint
from replica_engine.engine.thread_pool import Event, SyncGroup
from replica_engine.errors import run_errors, timeouts
from replica_engine.process.interrupts import MISSED, break_off, take_back
from replica_engine.watch import timeline, watchdog

UNWIND_GRACE = 30.0  # seconds that the other replicas have to unwind after a failure
HEAD_START = 0.5  # seconds that replica 0 has to begin to build
INTERRUPT_GRACE = 0.5  # seconds to unwind after Ctrl-C, which must end the run within one second
SETTLING = 0.05  # seconds in which an exception that was requested in a thread arrives there


class ErrandsFailed(BaseException):
    """Breaks off a merge in which the errand of every replica raised; not an Exception, so that no code in between
    handles it. `outcomes` are the results of the merge: each replica raises its own exception."""

    def __init__(self, outcomes: list[Outcome]):
        super().__init__("every replica raised")
        self.outcomes = outcomes


class Run:
    """One run of N bodies on a sync group.

    Args:
        group: N parked threads.
        bodies: the function that each replica runs; it is called with its `Replica`, whose `pause` it calls.
        merge: the function that the coordinator calls with the N requests of a sync point, in the order of the
            replicas; it returns what each replica's `pause` returns, in the same order.
        concurrent: whether all replicas are released at once.
        builds: with `concurrent`, gives replica 0 a head start in each round. It is called after `HEAD_START`
            seconds and returns whether replica 0 is building, so that the others must wait for it. None gives no
            head start.
        timeout: seconds that a replica may take to reach its next sync point, or a merge to end; None waits for ever.
        warn_after: seconds without progress until a warning, which is repeated after each further period of that
            length; None takes the process-wide default.
        traces: whether the bodies only trace what runs later, so that timelines do not take the run for a step.

    Attributes:
        coordinator: the thread that called `run`.
        given_up: whether the run was given up, so that waiting is useless.
        replicas: the replicas, in order.
        record: the record of sync points.
        number: the number of this run.
        name: the name under which timelines show the run, such as the name of the strategy.
        observer: draws the run on a timeline; None if no timeline is being recorded.
        began: when this object was made, in seconds of `time.perf_counter`.
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
        traces: bool = False,
    ):
        self.coordinator = threading.current_thread()
        self.given_up = False
        self.record, self.name = group.record, group.name
        self.number = self.record.new_run()
        self.began = time.perf_counter()
        recorded = timeline.recording()
        self.observer = Observer(group.name, self.coordinator, self.began, traces) if recorded else None
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
        self._has_paused = Event()  # the baton returns to the coordinator
        self._first_has_paused = Event()  # with a head start: replica 0 has paused
        self._watch = watchdog.Wait(
            self._describe, warn_after, timeout, late=self._late, breaker=self._end_wait, insists=True
        )
        self._has_begun = False  # whether each replica's thread has its job; none runs before
        self._merging = False
        self._broken_off: type[BaseException] | None = None  # the exception raised in a merge when time ran out
        self._lock = threading.Lock()
        self._still_running = 0

    def __call__(self) -> list[Any]:
        """Runs the bodies until all have ended.

        Returns:
            What each body returned, in the order of the replicas.

        Raises:
            MergeCallMismatchError: the replicas did not meet at the same sync points.
            ReplicaTimeoutError: a replica did not reach its next sync point, or a merge did not end, within `timeout`
                seconds.
            Exception: what a body or `merge` raised, with notes.
        """
        try:
            with self._watch:
                for replica, body in zip(self.replicas, self._bodies, strict=True):
                    replica.thread.assign(functools.partial(replica.execute, body))
                self._has_begun = True
                self._round()
                while not all(replica.state is State.FINISHED for replica in self.replicas):
                    self._check_meeting()
                    self._meet()
                    self._round()
                if self.observer is not None:
                    self.observer.ended([(replica.track, replica.since) for replica in self.replicas])
                results = [replica.value for replica in self.replicas]
            if self._watch.error is not None:  # at the last moment: an exception may be on its way
                self._settle()
            return results
        except BaseException as error:  # an interrupt too: no replica may wait for a coordinator that has left
            self._watch.__exit__(None, None, None)  # another thread's exception may have come before its first line
            late = self._as_late(error)
            if late is None:
                self._give_up(error)
                raise
            self._give_up(late)
            raise late from None
        finally:
            # The run, its replicas and the bodies refer to each other. Breaking the cycle frees what they hold
            # now; if the garbage collector had to do so, tensors would outlive the step by many steps.
            for replica in self.replicas:
                replica.forget()
            self._watch.error = None  # whose traceback refers to the run
            del self._bodies, self._merge
            self._builds = None  # Not deleted: an abandoned replica may still call `hand_over`, which reads it.

    def _meet(self) -> None:
        """Merges at a sync point where all replicas have paused, and stores each replica's part of the result."""
        self._watch.beat()
        self._merging = True
        began = time.perf_counter()
        with contextlib.nullcontext() if self.observer is None else self.observer.merging(self.sync_point()[0]):
            results = self._merge([replica.request for replica in self.replicas])
        self.merged = began, time.perf_counter()
        self._merging = False
        for replica, result in zip(self.replicas, results, strict=True):
            replica.resume_with(result)

    def errands(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Calls a function on every replica's thread, one replica after another. Only during a merge.

        Args:
            calls: the function of each replica.

        Returns:
            What each call returned, in the order of the replicas.

        Raises:
            ErrandsFailed: every call raised. The merge must let it pass, and give its outcomes to the replicas.
            MergeCallMismatchError: the replicas did not meet at the same sync points during their errands.
            Exception: what one call raised while others did not; the run is over.
        """
        concurrent, self._concurrent, self._merging = self._concurrent, False, False
        try:
            for replica, call in zip(self.replicas, calls, strict=True):
                replica.resume_with(Errand(call))
            while True:
                self._round()
                outcomes = [replica.request for replica in self.replicas if replica.state is State.BACK]
                if len(outcomes) == len(self.replicas) and all(outcome.error is not None for outcome in outcomes):
                    raise ErrandsFailed(outcomes)
                self._raise_of_errands()
                if len(outcomes) == len(self.replicas):
                    return [outcome.value for outcome in outcomes]
                self._check_meeting()
                self._meet()
        finally:
            self._concurrent, self._merging = concurrent, True
            self._watch.beat()

    def _raise_of_errands(self) -> None:
        """Raises what the errand of a replica raised, as if its body had raised it."""
        for replica in self.replicas:
            if replica.state is State.BACK and replica.request.error is not None:
                replica.error = replica.request.error
        for replica in self.replicas:
            if replica.error is not None:
                raise replica.error

    def is_orphaned(self) -> bool:
        """Whether the coordinator has ended.

        The main thread counts as alive: Python reports it as ended while `atexit` functions run on it.
        """
        return not self.coordinator.is_alive() and self.coordinator is not threading.main_thread()

    def hand_over(self, replica: Replica) -> None:
        """Passes the baton on. Called by a replica's thread when the replica pauses or ends."""
        self._watch.beat()
        if self._concurrent:
            if replica.index == 0 and self._builds is not None:
                self._first_has_paused.set()
            with self._lock:
                self._still_running -= 1
                to_coordinator = self._still_running == 0
        else:
            to_coordinator = replica.index == len(self.replicas) - 1
        # After a failure the baton goes back at once: a replica that has not had its turn must not get it.
        if to_coordinator or self.given_up or replica.state is State.FAILED:
            self._has_paused.set()
        elif not self._concurrent:
            self.replicas[replica.index + 1].thread.should_run.set()

    def _round(self) -> None:
        """Runs every replica to its next pause; raises what a replica raised."""
        self._watch.beat()
        self._still_running = len(self.replicas)
        self._first_has_paused.wait(0)  # Clears the event: perhaps no thread waited for it in the last round.
        first, *others = self.replicas
        first.thread.should_run.set()
        if self._concurrent:
            if self._builds is not None and not self._first_has_paused.wait(HEAD_START) and self._builds():
                self._wait(self._first_has_paused)
            if first.state is not State.FAILED:
                for replica in others:
                    replica.thread.should_run.set()
        self._wait(self._has_paused)
        for replica in self.replicas:
            if replica.state is State.FAILED:
                assert replica.error is not None
                raise replica.error

    def _wait(self, event: Event) -> None:
        """Waits for the event; raises ReplicaTimeoutError if the time ran out first."""
        while not event.wait(MISSED):  # see `wait_for_ever`
            pass
        if self._watch.error is not None:
            raise self._watch.error

    def _describe(self, waited: float) -> str:
        """The text of the warning. Called by the watchdog."""
        return timeouts.slow_replicas(waited, *self._stand(), self._timeout)

    def _late(self) -> errors.ReplicaTimeoutError:
        """The error with the state of the run, because the time ran out. Called by the watchdog."""
        return errors.ReplicaTimeoutError.after(self._timeout or 0.0, *self._stand())

    def _end_wait(self) -> None:
        """Ends the wait. Called by the watchdog, again after each further `timeout`."""
        if self._merging and self.coordinator.ident is not None:
            again = self._watch.expired > 1  # by now code in `held_off` has had a further `timeout` to end
            self._broken_off = break_off(self.coordinator.ident, errors.ReplicaUnwound, at_once=again)
        else:
            self._has_paused.set()
            self._first_has_paused.set()

    def _as_late(self, error: BaseException) -> BaseException | None:
        """The error to raise instead of `error`, which ended the run, if the time ran out; None to raise `error`."""
        late = self._watch.error
        if late is None or isinstance(error, errors.ReplicaTimeoutError):
            return None
        broken_off = self._broken_off  # read once, like every field that the watchdog writes
        if broken_off is not None and not isinstance(error, broken_off):
            self._settle()
            return None  # the merge ended on its own account, at the last moment
        return late

    def _settle(self) -> None:
        """Waits here for an exception that was requested in a merge which has ended meanwhile, and drops it."""
        with contextlib.suppress(KeyboardInterrupt, errors.ReplicaUnwound):
            time.sleep(SETTLING)
        take_back(threading.get_ident())

    def _stand(self) -> tuple[list[errors.ReplicaRow], errors.CoordinatorRow]:
        """A row for each replica and one for the coordinator: where they are now."""
        rows = [replica.timed_row() for replica in self.replicas]
        thread = self.coordinator
        first = self.replicas[0].last
        if not self._merging or first is None:
            return rows, errors.CoordinatorRow(thread.name, "waiting for the replicas", self._watch.waited)
        state = f"{timeouts.IN_MERGE}{first}"
        return rows, errors.CoordinatorRow(
            thread.name, state, self._watch.waited, watchdog.format_thread_stack(thread.ident)
        )

    def _check_meeting(self) -> None:
        """Raises MergeCallMismatchError unless all replicas, which have paused or finished, met at one sync point."""
        if any(replica.state in (State.FINISHED, State.BACK) for replica in self.replicas):
            rows = self._rows()
            raise errors.MergeCallMismatchError.about(rows, _different_counts(rows))
        first, *others = self.replicas
        if any(replica.meets != first.meets for replica in others):
            rows = self._rows()
            raise errors.MergeCallMismatchError.about(rows, _different_points(rows, self.sync_point()))

    def _give_up(self, error: BaseException) -> None:
        """Unwinds every replica that has not ended, and adds notes about the failure to `error`."""
        self.given_up = True  # First of all: from now on no replica continues after a pause.
        rows = self._rows()  # the states before the replicas are unwound
        culprit = next((replica for replica in self.replicas if replica.error is error), None)
        no_patience = isinstance(error, errors.ReplicaTimeoutError) or (
            culprit is None and isinstance(error, KeyboardInterrupt)
        )
        deadline = time.monotonic() + (INTERRUPT_GRACE if no_patience else UNWIND_GRACE)
        # Waiting replicas unwind at once. Running ones may take all of the available time, so they are last.
        for replica in sorted(self.replicas, key=lambda replica: replica.state is State.RUNNING):
            if replica.over or not self._has_begun:
                continue
            if no_patience and replica.state is State.RUNNING:
                replica.thread.interrupt()
            replica.thread.should_run.set()
            while not replica.over and time.monotonic() < deadline:
                # Each replica that unwinds sets this event. It may be another replica, so check again.
                self._has_paused.wait(max(0.0, deadline - time.monotonic()))
        abandoned = [replica for replica in self.replicas if not replica.over and self._has_begun]
        stuck = [replica.timed_row() for replica in abandoned]
        if not no_patience:  # otherwise they were interrupted above, and each interrupt costs part of the second
            for replica in abandoned:
                replica.thread.interrupt()
        if culprit is not None:
            others = [replica for replica in self.replicas if replica is not culprit]
            failed = [(other.row(), other.error) for other in others if other.error is not None]
            run_errors.note_failure(error, rows[culprit.index], failed)
        run_errors.note_abandoned(error, stuck)

    def _rows(self) -> list[errors.ReplicaRow]:
        return [replica.row() for replica in self.replicas]

    def sync_point(self) -> list[SyncPoint]:
        """The sync point of each replica. Valid only between rounds, when all replicas have paused."""
        points = [replica.last for replica in self.replicas if replica.last is not None]
        assert len(points) == len(self.replicas), "all have paused"
        return points


def _different_counts(rows: Sequence[errors.ReplicaRow]) -> str:
    return (
        "Some replicas made a different number of merge_call() calls:\n"
        f"{timeouts.table(rows)}\n"
        "Every replica must make the same merge calls in the same order; all_reduce, all_gather, "
        "optimizer.apply_gradients and assignments to aggregated variables are merge calls too. Move the call out of "
        "the branch that only some replicas take, or let every replica make it (with zeros, for example, if it has "
        "nothing to add). If the branch depends on each replica's own values, reduce the condition first, so that it "
        'is equal on all: context.all_reduce("SUM", value).'
    )


def _different_points(rows: Sequence[errors.ReplicaRow], points: Sequence[SyncPoint]) -> str:
    kinds = {point.kind for point in points}
    if len(kinds) == 1 < len({point.how for point in points}):
        calls = (f"{point.kind}({point.how}) at {point.where}" for point in points)
        lines = "\n".join(f"  {row.name}: {call}" for row, call in zip(rows, calls, strict=True))
        return (
            f"The replicas met in different operations:\n{lines}\n"
            "One result is computed for all replicas, so every replica must ask for the same one. Choose the operation "
            "or the axis in the same way on all replicas, not by the replica id; or reduce twice, and let each replica "
            "take the result that it needs."
        )
    if kinds <= {"all_reduce", "all_gather"}:
        return (
            "The replicas met in different collectives:\n"
            f"{timeouts.table(rows)}\n"
            "One result is computed for all replicas. Make these calls in the same order on every replica. If only "
            "some replicas need one of them, let every replica make it, outside the branch on the replica id."
        )
    return (
        "The replicas met in different merge functions:\n"
        f"{timeouts.table(rows)}\n"
        "A merge call runs one function for all replicas, so every replica must pass the same function. Choose the "
        "function before the branch on the replica id, or pass the value that differs as an argument: "
        "merge_call(merge_fn, args=(value,))."
    )
