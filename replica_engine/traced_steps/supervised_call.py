"""Calls of a `tf.function` in which replicas run: watched, limited, ended, and where their replicas are.

TensorFlow runs the step, on its own threads. This module sees the marks in the step's graph, and the threads that run
Python functions of it. It can start TensorFlow's cancellation: then loops end, and ops that wait (for a queue, an
iterator, a transfer, a collective), and so does the call. An op that computes ends by itself. An op that calls Python
ends when the Python code returns: this module interrupts that code, and abandons it if it sleeps.

Therefore a graph that calls Python is run on another thread, which the caller can leave. So is one with a limit that
takes batches from an iterator, because its dataset may call Python. Other graphs run on the calling thread, which costs
less. There, Ctrl-C reaches Python only when the call has returned, so a thread of `process.interrupts` hears of the
signal at once and cancels.

What must never happen:

- A step that is healthy is cut off in the middle of its updates. On Ctrl-C a step gets time to end by itself, and is
  not cancelled while its merge functions write variables, unless it stands still there; then the error says so.
- A call returns while its own cancellation may still reach another one: each call has its own manager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine import errors
from replica_engine.diagnostics import misuse, tracebacks, user_frames
from replica_engine.engine import ReplicaThread, State, current_replica
from replica_engine.errors import base, run_errors, timeouts
from replica_engine.process import interrupts, threads
from replica_engine.traced_steps.marked_step import MarkedStep, StepPlace
from replica_engine.upstream import distribute, eager, hook, thread_state, worker_collectives
from replica_engine.upstream.graphs import function_calls, function_graphs, graph_walk, operators
from replica_engine.watch import timeline, watchdog


def install() -> None:
    """Puts the functions of this module around TensorFlow's, once. Both backends need them for errors about replicas.

    On a thread that runs a replica, each wrapper calls TensorFlow's function unchanged. The exception are calls of a
    `tf.function`, in which replicas on threads may have to merge (`install_nested`).
    """
    hook.hide_frames(user_frames.FOLDERS)
    distribute.install_numbers()
    misuse.install()
    operators.CALL.around(_call)
    function_calls.install()


def install_nested(call: Callable[..., object]) -> None:
    """Has `call(original, function, *args, **kwargs)` make the calls of a `tf.function` by a replica on a thread.

    One function of ours stands around each call of a `tf.function`, whichever backends the program uses.
    """
    global _nested
    _nested = call


_nested: Callable[..., object] | None = None


def _call(original: Callable[..., object], self: Any, *args: object, **kwargs: object) -> object:
    """A call of a `tf.function`, whose errors may be those of replicas in it."""
    if function_graphs.is_inlining():
        return self.python_function(*args, **kwargs)
    if current_replica() is not None:
        return original(self, *args, **kwargs) if _nested is None else _nested(original, self, *args, **kwargs)
    notes = function_calls.notes
    try:
        result = original(self, *args, **kwargs)
        worker_collectives.ended()
        return result
    except BaseException as error:  # an interrupt too: other workers may wait for a collective of this call
        worker_collectives.left(error)
        if not isinstance(error, (Exception, KeyboardInterrupt)):
            raise
        ours = function_calls.notes != notes or function_calls.has_replicas(self)
        if ours and eager.is_replaced_interrupt(error):
            raise KeyboardInterrupt from error
        own = function_graphs.raised_in_op(error)
        if own is not None:
            raise tracebacks.shortened(own) from None
        ours = ours or isinstance(error, errors.ReplicaEngineError)
        raise tracebacks.shortened_of_graph(error, self) if ours else tracebacks.without_ours(error)


# Where the replicas of a call are.


@dataclasses.dataclass(frozen=True)
class TracedRun:
    """The replicas of one run in the graph of a function.

    Attributes:
        timeout: `timeout=` of the strategy.
        warn_after: `warn_after=` of the strategy.
        marks: the marks of the run; None if it has none.
        loops: whether the run is in a loop of the graph.
        launches: whether the run is a launch of a compiled program, which is watched and limited by itself.
    """

    timeout: float | None
    warn_after: float | None
    marks: MarkedStep | None
    loops: bool
    launches: bool = False


class Whereabouts:
    """Where the replicas of one call are, as far as the marks of its graph and its Python threads tell.

    Args:
        runs: the runs in the graph.
        launches: whether all are launches of compiled programs.
        loops: whether a run is in a loop.
        marked: whether all runs have marks.
    """

    def __init__(self, runs: Sequence[TracedRun], launches: bool, loops: bool, marked: bool):
        self.launches, self.loops, self.marked = launches, loops, marked
        self._runs = [(run.marks, run.marks.iterations() if run.loops else []) for run in runs if run.marks is not None]
        self._thread = threading.current_thread()
        self._began = time.time()
        self._offset = self._began - time.perf_counter()

    def stand(self, graph: tf.Graph | None) -> tuple[list[errors.ReplicaRow], errors.CoordinatorRow]:
        """A row for each replica that has marks, and one for the calling thread.

        Args:
            graph: the graph of the function; None if it is gone.
        """
        seconds = time.time() - self._began
        coordinator = errors.CoordinatorRow(
            self._thread.name, timeouts.IN_FUNCTION, seconds, watchdog.format_thread_stack(self._thread.ident)
        )
        rows: list[errors.ReplicaRow] = []
        for marks, counted in self._runs:
            places = marks.places(self._began)
            own = marks.rows(places, counted)
            rows += own if graph is None else self._with_ops(graph, marks, places, own)
        return rows, coordinator

    def have_begun(self) -> bool:
        """Whether a replica has begun in this call, as far as it is known."""
        return any(place.since for marks, _ in self._runs for place in marks.places(self._began))

    def brief(self) -> str:
        """Where the replicas are, in a line for other workers; "" if the step has just begun or gone on."""
        if time.perf_counter() - max(self.worked(), self._began - self._offset) < LONG:
            return ""
        rows = [row for marks, counted in self._runs for row in marks.rows(marks.places(self._began), counted)]
        return "; ".join(map(str, rows))

    def _with_ops(
        self, graph: tf.Graph, marks: MarkedStep, places: Sequence[StepPlace], rows: list[errors.ReplicaRow]
    ) -> list[errors.ReplicaRow]:
        """Adds to each row the Python function that runs for the replica, or the ops in which it may wait."""
        python = graph_walk.python_ops(graph)
        for token, idents in graph_walk.threads_in(python).items():
            op = python[token]
            replica = marks.find_op_replica(op)
            if replica is not None and not rows[replica].stack:
                waits = (f"the Python function at {user_frames.user_line(op) or op.name}",)
                rows[replica] = dataclasses.replace(
                    rows[replica], stack=watchdog.format_thread_stack(idents[0]), waits=waits
                )
        passed = marks.passed(self._began)
        for replica, (row, place) in enumerate(zip(rows, places, strict=True)):
            if row.stack or place.next is None or place.state is State.PAUSED:
                continue
            found = graph_walk.before(place.next.op, passed)
            lines = dict.fromkeys(f"{op.type} at {user_frames.user_line(op) or op.name}" for op in found)
            rows[replica] = dataclasses.replace(row, waits=tuple(lines))
        return rows

    def moved(self) -> float:
        """When a replica last came to a mark, in seconds of `time.perf_counter`; now, between two steps of a loop."""
        return self._moved(self.loops)

    def worked(self) -> float:
        """The same for a limit, which does not count what comes before the first mark either."""
        return self._moved(True)

    def _moved(self, between_counts: bool) -> float:
        places = [place for marks, _ in self._runs for place in marks.places(self._began)]
        between = all(place.state in (State.IDLE, State.FINISHED) for place in places)
        if places and between and between_counts and self.marked:
            return time.perf_counter()
        last: float = max((place.since for place in places), default=0.0)
        return last - self._offset if last else 0.0

    def writes_now(self) -> bool:
        """Whether a merge is writing variables, perhaps."""
        return any(marks.updates(self._began).under_way for marks, _ in self._runs)

    def what_was_updated(self) -> str:
        """Which updates of the step were made before it was cancelled, in words."""
        if self.launches:
            return "Each compiled step is made whole or not at all: variables have the values of the last one."
        if not self.marked:
            return "The step was cancelled. It has no marks, so it is not known which of its updates were made."
        found = [marks.updates(self._began) for marks, _ in self._runs]
        made, torn = [each for of in found for each in of.made], [each for of in found for each in of.under_way]
        to_come = [each for of in found for each in of.to_come]
        own = [user_frames.user_line(op) or op.name for of in found for op in of.own]
        if torn:
            said = "The step was cancelled while it wrote variables; perhaps some have the new values and some not: "
            said += f"{_listed(torn)}."
        elif made and to_come:
            said = f"The step was cancelled. These updates were made: {_listed(made)}. Not made: {_listed(to_come)}."
        else:
            said = "The step was cancelled between updates: variables have the values of the last whole step."
        if own:
            said += f" What each replica writes on its own may be written on some and not on others: {_listed(own)}."
        return said


LONG = 1.0  # seconds without progress after which other workers are told where the replicas are
_MOST = 4  # places in a note


def _listed(places: Sequence[str]) -> str:
    different = list(dict.fromkeys(places))
    return ", ".join([*different[:_MOST], *(["..."] if len(different) > _MOST else [])])


def draw(marks: MarkedStep, since: float) -> None:
    """Draws a step, and the call of the function on the track of the thread that called it, from its marks.

    It is for a call that has returned. A mark holds its last time only, so of steps in a loop of the graph nothing is
    drawn.

    Args:
        marks: the marks of the run.
        since: when the call began, in seconds since the epoch.
    """
    offset = time.time() - timeline.now()
    steps = [_step(times, since) for times in marks.times()]

    def add(track: timeline.Track, name: str, kind: str, begin: float, end: float, **details: object) -> None:
        if 0.0 < begin < end:
            timeline.add(track, name, kind, begin - offset, end - offset, details or None)

    for replica, (name, step) in enumerate(zip(marks.names, steps, strict=True)):
        track = timeline.Track(marks.group, f"replica {replica} of {len(steps)} ({name})", id(marks), replica + 1)
        left = step[0]
        for at, marked in enumerate(marks.points):
            arrived, gone = step[1 + 2 * at : 3 + 2 * at]
            if not arrived and not gone:  # a branch that was not taken
                continue
            point, come = marked.points[0], [each[1 + 2 * at] for each in steps]
            last = max(come) if all(come) else 0.0
            add(track, "run", "run", left, arrived)
            add(track, f"waiting at {point.name}", "waiting", arrived, last, where=point.where)
            add(track, point.name, "merge", last, gone, where=point.where)
            left = gone
        add(track, "run", "run", left, step[-1])
    if all(step[-1] for step in steps):
        caller = threading.current_thread()
        track = timeline.Track(marks.group, f"coordinator ({caller.name})", caller.ident or 0)
        add(track, "run", "waiting", min(step[0] for step in steps), max(map(max, steps)), replicas=len(steps))


def _step(times: Sequence[float], since: float) -> list[float]:
    """The times of a replica in a call that began at `since`, as `MarkedStep.times` has them; 0.0 if not reached."""
    begun = times[0] if times[0] >= since else math.inf
    step = [each if each >= begun else 0.0 for each in times]
    next_ = math.inf
    for at in reversed(range(1, len(step))):  # what follows a mark does not wait for it, so a mark may be late
        if step[at]:
            step[at] = next_ = min(step[at], next_)
    return step


# One call, watched and ended.

GRACE = 0.4  # seconds that a step has to end by itself on Ctrl-C, before it is cancelled
WRITING_GRACE = 0.3  # seconds more, while variables are written
UNWIND_GRACE = 0.5  # seconds that a cancelled step has to end, before it is abandoned
_LOOK = 0.003  # seconds between two looks at a step that is about to be cancelled


def supervise(graph: Any, runs: Sequence[TracedRun]) -> function_calls.Supervise:
    """What begins the calls of a function; see `function_calls.choose`."""
    return functools.partial(_SupervisedCall, _SupervisedFunction(graph, runs))


class _SupervisedFunction:
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
        draws = self.timeout is not None and graph_walk.draws(self.graph())
        return draws or graph_walk.calls_python(self.graph())


class _SupervisedCall:
    """One call of the function."""

    def __init__(self, function: _SupervisedFunction, manager: Any):
        self._function = function
        self._places = Whereabouts(function.runs, function.launches, function.loops, function.marked)
        self._manager = manager
        self._is_over = False
        self._woken: threading.Event | None = None  # the call has ended, or is cancelled
        self._wait = watchdog.Wait(
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
            if self._function.marked and watchdog.has_workers():
                watchdog.describe_replicas(self._places.brief)
            make = self._apart if self._function.may_stay and self._can_be_left() else self._here
            result = self._drawn(make, execute) if timeline.recording() else make(execute)
            worker_collectives.ended()  # here too: a concrete function may be called without its tf.function
            self._leave()
            return result
        except BaseException as error:  # an interrupt too, as in `_call`
            try:
                worker_collectives.left(error)
            finally:
                self._leave()
            raise

    def _leave(self) -> None:
        """Ends the watch over the call. May be called again if an exception comes in it."""
        self._is_over = True
        watchdog.forget_replicas(self._places.brief)
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
            with interrupts.heard_at_once(lambda: self._cancel_between_updates(KeyboardInterrupt())):
                return execute()
        except BaseException as error:  # what ends a call is what the watchdog or Ctrl-C asked for, whatever came of it
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
                # TensorFlow was not told to stop, so the step has come to its end before Ctrl-C.
                worker_collectives.ended()
            raise

    def _apart(self, execute: Callable[[], Any]) -> Any:
        """Makes the call on another thread, which this one leaves if it does not come back."""
        woken = self._woken = threading.Event()
        done = threading.Event()
        outcome: list[Any] = []
        failures: list[BaseException] = []
        # What else the call needs of this thread's state comes with it: see `call_function` of `function_calls`.
        policy = thread_state.device_policy()

        def work() -> None:
            try:
                with thread_state.enter_device_policy(policy):
                    outcome.append(execute())
            except BaseException as error:  # for the thread that waits: nobody else hears of it
                failures.append(error)
            finally:
                done.set()
                woken.set()

        # From a pool: to start a thread for each step would take longer.
        worker = _lent()
        try:
            worker.assign(work)
            worker.should_run.set()
            interrupts.wait_for_ever(woken.wait)
        except BaseException as error:  # an interrupt of the wait; the call itself keeps its exception in `failures`
            self._end(done, error, worker)
            if outcome:
                worker_collectives.ended()
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
            rows, _ = self._places.stand(self._function.graph())
            stuck = [row for row in rows if row.stack or row.state != timeouts.FINISHED]
            run_errors.note_abandoned(error, [row for row in stuck if row.stack] or stuck)
            # Those that have ended meanwhile hold no thread any more, and must not be named.
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

    def _late(self) -> errors.ReplicaTimeoutError | None:
        """The error, if the time that has run out was that of a step. Called by the watchdog."""
        rows, coordinator = self._places.stand(self._function.graph())
        is_waiting = bool(rows) and all(row.state == timeouts.NOT_STARTED for row in rows)
        if is_waiting or self._places.worked() > self._wait.since:
            return None  # the first call optimizes the graph; and waiting for a batch is not part of a step
        return errors.ReplicaTimeoutError.after(self._function.timeout or 0.0, rows, coordinator)

    def _interrupt_python(self) -> None:
        """Ends Python functions of the step that run Python code; one that sleeps goes on until it wakes up."""
        graph = self._function.graph()
        if graph is not None:
            for idents in graph_walk.threads_in(graph_walk.python_ops(graph)).values():
                for ident in idents:
                    interrupts.raise_in(ident, errors.ReplicaUnwound)

    def _describe(self, waited: float) -> str:
        function = self._function
        rows, coordinator = self._places.stand(function.graph())
        earlier = [f"The tf.function `{name}`" for name, done in _abandoned if not done.is_set()]
        return timeouts.slow_function(function.name, waited, rows, coordinator, function.timeout, earlier)

    def _say_what_was_updated(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # a failure here must not hide the error itself
            base.add_note(error, self._places.what_was_updated())
            if isinstance(error, errors.ReplicaTimeoutError):
                run_errors.note_workers(error, watchdog.workers())


_idle: list[ReplicaThread] = []  # threads for calls that may be left
_abandoned: list[tuple[str, threading.Event]] = []  # what was given up: the function, and whether it has ended


def _lent() -> ReplicaThread:
    with contextlib.suppress(IndexError):
        return _idle.pop()
    thread = ReplicaThread("replica_engine: step")
    threads.start(thread)
    return thread
