"""Calls of a `tf.function` in which replicas run: watched, and ended on Ctrl-C or when time runs out.

TensorFlow runs the step, on its own threads. What this module knows of it are the marks in its graph, and the threads
that run Python functions of it. What it can do is to start TensorFlow's cancellation: ops that wait (for a queue, an
iterator, a transfer, a collective) and loops end then, and so the call. An op that computes ends by itself. An op that
calls Python ends when the Python code returns: it is interrupted, and if it sleeps, abandoned.

Therefore a graph that calls Python is run on another thread, which the caller can leave. So is one with a limit that
takes batches from an iterator, because its dataset may call Python. Other graphs run on the calling thread, which costs
less. There, Ctrl-C reaches Python only when the call has returned, so a thread of `process.signals` hears of the signal
at once and cancels.

What must never happen:

- A step that is healthy is cut off in the middle of its updates. On Ctrl-C a step gets time to end by itself, and is
  not cancelled while its merge functions write variables, unless it stands still there; then the error says so.
- A call returns while its own cancellation may still reach another one: each call has its own manager.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from replica_engine._tf import collectives, thread_state
from replica_engine._tf.graphs import calls, waiting
from replica_engine.diagnostics.traced_places import TracedRun, Whereabouts, draw
from replica_engine.engine import ReplicaThread
from replica_engine.errors import ReplicaTimeoutError, ReplicaUnwound
from replica_engine.errors.base import add_note
from replica_engine.errors.threads import note_abandoned, note_workers
from replica_engine.errors.timeouts import FINISHED, NOT_STARTED, slow_function
from replica_engine.process import interrupts, signals, threads
from replica_engine.process.interrupts import wait_for_ever
from replica_engine.telemetry import timeline
from replica_engine.telemetry.watchdog import Wait, describe_replicas, forget_replicas, has_workers, workers

GRACE = 0.4  # seconds that a step has to end by itself on Ctrl-C, before it is cancelled
WRITING_GRACE = 0.3  # seconds more, while variables are written
UNWIND_GRACE = 0.5  # seconds that a cancelled step has to end, before it is abandoned
_LOOK = 0.003  # seconds between two looks at a step that is about to be cancelled


def supervise(graph: Any, runs: Sequence[TracedRun]) -> calls.Supervise:
    """What begins the calls of a function; see `calls.choose`."""
    return functools.partial(_Call, _Function(graph, runs))


class _Function:
    """A function in which replicas run."""

    def __init__(self, graph: Any, runs: Sequence[TracedRun]):
        self.name: str = graph.name
        self.runs = runs
        self.timeout = min((run.timeout for run in runs if run.timeout is not None), default=None)
        self.warn_after = min((run.warn_after for run in runs if run.warn_after is not None), default=None)
        self.launches = all(run.launches for run in runs)
        self.loops = any(run.loops for run in runs)
        self.marked = all(run.marks is not None for run in runs)
        # A loop without marks may be a whole epoch.
        self.is_watched = not self.launches and (self.marked or not self.loops)
        self.graph = weakref.ref(graph)

    @functools.cached_property
    def may_stay(self) -> bool:
        """Whether a call may stay in Python code, which TensorFlow cannot end."""
        draws = self.timeout is not None and waiting.draws(self.graph())
        return draws or waiting.calls_python(self.graph())


class _Call:
    """One call of the function."""

    def __init__(self, function: _Function, manager: Any):
        self._function = function
        self._places = Whereabouts(function.runs, function.launches, function.loops, function.marked)
        self._manager = manager
        self._is_over = False
        self._woken: threading.Event | None = None  # the call has ended, or is cancelled
        self._wait = Wait(
            self._describe,
            function.warn_after,
            function.timeout if self._manager is not None else None,
            late=self._late,
            breaker=self._cancel,
            progress=self._places.moved,
        )

    def __call__(self, execute: Callable[[], Any]) -> Any:
        try:
            if self._function.is_watched:
                self._wait.__enter__()
            if self._function.marked and has_workers():
                describe_replicas(self._places.brief)
            make = self._apart if self._function.may_stay and self._can_be_left() else self._here
            result = self._drawn(make, execute) if timeline.recording() else make(execute)
            collectives.ended()  # here too: a concrete function may be called without its tf.function
            self._leave()
            return result
        except BaseException as error:
            try:
                collectives.left(error)
            finally:
                self._leave()
            raise

    def _leave(self) -> None:
        """Ends the watch over the call. May be called again if an exception comes in it."""
        self._is_over = True
        forget_replicas(self._places.brief)
        self._wait.__exit__(None, None, None)  # which lets go of this call; also if it was not entered
        self._wait.error = None  # whose traceback has frames of this call

    def _drawn(self, make: Callable[..., Any], execute: Callable[[], Any]) -> Any:
        since = time.time()
        try:
            return make(execute)
        finally:
            for run in self._function.runs:
                if run.marks is not None and not run.loops:
                    draw(run.marks, since)

    def _can_be_left(self) -> bool:
        return self._manager is not None and (self._function.timeout is not None or interrupts.reach_this_thread())

    def _here(self, execute: Callable[[], Any]) -> Any:
        """Makes the call on this thread."""
        try:
            if self._manager is None:
                return execute()
            # On Ctrl-C, while the main thread is inside TensorFlow, it is called on another thread.
            with signals.heard_at_once(lambda: self._cancel_between_updates(KeyboardInterrupt())):
                return execute()
        except BaseException as error:
            self._is_over = True
            ended_by = self._wait.error
            if ended_by is not None:
                if isinstance(ended_by, KeyboardInterrupt) and isinstance(error, KeyboardInterrupt):
                    ended_by = error  # Python's own handler has come before, or comes now
                try:
                    self._say_what_was_updated(ended_by)
                    raise ended_by from None
                finally:
                    del ended_by  # the exception holds this frame too
            if not isinstance(error, Exception) and self._places.have_begun():
                collectives.ended()  # TensorFlow was not told to stop, so the step has come to its end before Ctrl-C
            raise

    def _apart(self, execute: Callable[[], Any]) -> Any:
        """Makes the call on another thread, which this one leaves if it does not come back."""
        woken = self._woken = threading.Event()
        done = threading.Event()
        outcome: list[Any] = []
        failures: list[BaseException] = []
        policy = thread_state.device_policy()

        def work() -> None:
            try:
                with thread_state.enter_device_policy(policy):
                    outcome.append(execute())
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()
                woken.set()

        worker = _lent()
        try:
            worker.assign(work)
            worker.should_run.set()
            wait_for_ever(woken.wait)
        except BaseException as error:
            self._end(done, error, worker)
            if outcome:
                collectives.ended()
            raise
        late = self._wait.error
        if late is not None and not outcome:
            self._end(done, late, worker)
            if not outcome:
                try:
                    raise late
                finally:
                    del late  # the exception holds this frame too
        else:
            _idle.append(worker)
        if failures:
            raise failures.pop()
        return outcome.pop()

    def _end(self, done: threading.Event, error: BaseException, worker: ReplicaThread) -> None:
        """Ends the call on the other thread, or abandons it, and says so in `error`."""
        if self._wait.error is None:
            self._cancel_between_updates(error, done)
        self._interrupt_python()
        if done.wait(UNWIND_GRACE):
            _idle.append(worker)
        else:
            stuck = [row for row in self._places.stand(self._function.graph())[0] if row.stack or row.state != FINISHED]
            note_abandoned(error, [row for row in stuck if row.stack] or stuck)
            _abandoned[:] = [each for each in _abandoned if not each[1].is_set()]
            _abandoned.append((self._function.name, done))
            worker.close()
        self._is_over = True
        self._say_what_was_updated(error)

    # Ending the call.

    def _cancel_between_updates(self, error: BaseException, done: threading.Event | None = None) -> None:
        begin = time.monotonic()
        while not (self._is_over or (done is not None and done.is_set())):
            waited = time.monotonic() - begin
            is_long = self._places.loops or waited > GRACE
            if is_long and (waited > GRACE + WRITING_GRACE or not self._places.writes_now()):
                break
            time.sleep(_LOOK)
        else:
            return
        self._wait.end(error)

    def _cancel(self) -> None:
        try:
            self._manager.start_cancel()
        finally:
            if self._woken is not None:
                self._woken.set()

    def _late(self) -> ReplicaTimeoutError | None:
        """The error, if the time that has run out was that of a step. Called by the watchdog."""
        rows, coordinator = self._places.stand(self._function.graph())
        is_waiting = bool(rows) and all(row.state == NOT_STARTED for row in rows)
        if is_waiting or self._places.worked() > self._wait.since:
            return None  # the first call optimizes the graph; and waiting for a batch is not part of a step
        return ReplicaTimeoutError.after(self._function.timeout or 0.0, rows, coordinator)

    def _interrupt_python(self) -> None:
        """Ends Python functions of the step that run Python code; one that sleeps goes on until it wakes up."""
        graph = self._function.graph()
        if graph is not None:
            for idents in waiting.threads_in(waiting.python_ops(graph)).values():
                for ident in idents:
                    interrupts.raise_in(ident, ReplicaUnwound)

    def _describe(self, waited: float) -> str:
        function = self._function
        rows, coordinator = self._places.stand(function.graph())
        earlier = [f"The tf.function `{name}`" for name, done in _abandoned if not done.is_set()]
        return slow_function(function.name, waited, rows, coordinator, function.timeout, earlier)

    def _say_what_was_updated(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # a failure here must not hide the error itself
            add_note(error, self._places.what_was_updated())
            if isinstance(error, ReplicaTimeoutError):
                note_workers(error, workers())


_idle: list[ReplicaThread] = []  # threads for calls that may be left
_abandoned: list[tuple[str, threading.Event]] = []  # what was given up: the function, and whether it has ended


def _lent() -> ReplicaThread:
    with contextlib.suppress(IndexError):
        return _idle.pop()
    thread = ReplicaThread("replica_engine: step")
    threads.start(thread)
    return thread
