"""Where the replicas of a call of a `tf.function` are, as far as the marks of its graph and its Python threads tell.

A call that has returned is drawn on a timeline from its marks. A mark holds its last time only, so of steps in a loop
of the graph nothing is drawn.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from replica_engine._tf.graphs import waiting
from replica_engine.diagnostics.marked_step import MarkedStep, Place
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.engine import State
from replica_engine.errors import CoordinatorRow, ReplicaRow
from replica_engine.errors.timeouts import IN_FUNCTION
from replica_engine.telemetry import timeline
from replica_engine.telemetry.stacks import stack_of


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
    """Where the replicas of one call are.

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

    def stand(self, graph: tf.Graph | None) -> tuple[list[ReplicaRow], CoordinatorRow]:
        """A row for each replica that has marks, and one for the calling thread.

        Args:
            graph: the graph of the function; None if it is gone.
        """
        seconds = time.time() - self._began
        coordinator = CoordinatorRow(self._thread.name, IN_FUNCTION, seconds, stack_of(self._thread.ident))
        rows: list[ReplicaRow] = []
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
        self, graph: tf.Graph, marks: MarkedStep, places: Sequence[Place], rows: list[ReplicaRow]
    ) -> list[ReplicaRow]:
        """Adds to each row the Python function that runs for the replica, or the ops in which it may wait."""
        python = waiting.python_ops(graph)
        for token, idents in waiting.threads_in(python).items():
            op = python[token]
            replica = marks.device_of(op)
            if replica is not None and not rows[replica].stack:
                waits = (f"the Python function at {user_line(op) or op.name}",)
                rows[replica] = dataclasses.replace(rows[replica], stack=stack_of(idents[0]), waits=waits)
        passed = marks.passed(self._began)
        for replica, (row, place) in enumerate(zip(rows, places, strict=True)):
            if row.stack or place.next is None or place.state is State.PAUSED:
                continue
            found = waiting.before(place.next.op, passed)
            lines = dict.fromkeys(f"{op.type} at {user_line(op) or op.name}" for op in found)
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
        own = [user_line(op) or op.name for of in found for op in of.own]
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
    """Draws a step, and the call of the function on the track of the thread that called it.

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
