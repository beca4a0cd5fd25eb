"""Draws the steps inside a `tf.function` on a timeline, from the marks in its graph.

A single step is read when its call has returned. In a loop of the graph each mark holds only its last time, so a thread
reads the marks again and again while the loop runs, and keeps the times that are new. The graph counts the begins of
steps. A step is drawn if its begin and the next one were both seen: then what lies between them belongs to it. So
of steps that are shorter than the time between two looks only some are drawn. A look takes some time, and the thread
takes at most a fifth of a core: it rests four times as long as the look took.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from replica_engine.engine import SyncPoint
from replica_engine.process import threads
from replica_engine.telemetry import timeline
from replica_engine.telemetry.trace_file import Track

REST = 4  # times as long as a look took
LEAST = 0.002  # seconds between two looks


class MarkedTimes(Protocol):
    """The marks of a traced run, as `threads.marks.StepMarks` has them."""

    names: Sequence[str]
    group: str

    def meetings(self) -> list[SyncPoint]:
        """The sync points that have marks, in the order in which they were traced."""

    def times(self) -> list[list[float]]:
        """The last times of each replica, in the order of its step, in seconds since the epoch.

        They are: begin; for each sync point arrival and departure; end. 0.0 stands for what was not reached.
        """

    def iterations(self) -> list[int]:
        """How often each replica has begun so far, in a loop."""


class Drawing:
    """Draws the steps of one run in one call of a function.

    Args:
        marks: the marks of the run.
        thread: the thread that called the function.
    """

    def __init__(self, marks: MarkedTimes, thread: threading.Thread):
        self._marks = marks
        self._points = marks.meetings()
        self._since = time.time()
        self._offset = self._since - timeline.now()
        self._counted = marks.iterations()
        size = len(marks.names)
        names = [f"replica {index} of {size} ({name})" for index, name in enumerate(marks.names)]
        self._tracks = [Track(marks.group, name, id(marks), index + 1) for index, name in enumerate(names)]
        self._caller = Track(marks.group, f"coordinator ({thread.name})", thread.ident or 0)
        self._numbers: list[dict[float, int]] = [{} for _ in names]  # by replica and begin: the number of the step
        kinds = range(2 * len(self._points) + 1)
        self._seen: list[list[set[float]]] = [[set() for _ in kinds] for _ in names]  # all times but the begins

    def look(self) -> None:
        """Keeps the times that are new since the last look."""
        times, counted = self._marks.times(), self._marks.iterations()
        for replica, (begun, *others) in enumerate(times):
            if begun < self._since:
                continue
            number = counted[replica] - self._counted[replica] if counted else 1
            self._numbers[replica][begun] = max(number, self._numbers[replica].get(begun, 0))
            for seen, each in zip(self._seen[replica], others, strict=True):
                if each >= self._since:
                    seen.add(each)

    def end(self) -> None:
        """Draws what was seen, and on the track of the thread that called the function the steps."""
        steps = [self._steps(replica) for replica in range(len(self._tracks))]
        reached = [any(of) for of in zip(*([bool(each) for each in seen] for seen in self._seen), strict=True)]
        for number in sorted({number for of in steps for number in of}):
            own = [of.get(number) for of in steps]
            for replica, times in enumerate(own):
                if times is not None:
                    self._draw(replica, times, own)
            whole = [
                times for times in own if times is not None and all(map(operator.ge, map(bool, times[1:]), reached))
            ]
            if len(whole) == len(own):
                begin, end = min(times[0] for times in whole), max(map(max, whole))
                self._add(self._caller, "run", "waiting", begin, end, {"replicas": len(own)})

    def _steps(self, replica: int) -> dict[int, list[float]]:
        """The times of each step that was seen, by its number, in the order of `MarkedTimes.times`."""
        begins = sorted(self._numbers[replica].items())
        seen = [sorted(each) for each in self._seen[replica]]
        found = {}
        for (begin, number), (following, next_number) in itertools.pairwise([*begins, (math.inf, -1)]):
            if next_number in (number + 1, -1):
                found[number] = times = [begin, *(_between(each, begin, following) for each in seen)]
                # No departure waits for the mark of an arrival, so that may be late.
                for at in range(1, len(times) - 1, 2):
                    times[at] = min(times[at], times[at + 1] or math.inf)
        return found

    def _draw(self, replica: int, times: Sequence[float], every: Sequence[list[float] | None]) -> None:
        track, left = self._tracks[replica], times[0]
        for number, point in enumerate(self._points):
            arrived, gone = times[1 + 2 * number : 3 + 2 * number]
            if not arrived and not gone:  # a branch that was not taken, or the replica was not seen here
                continue
            self._add(track, "run", "run", left, arrived)
            come = [0.0 if of is None else of[1 + 2 * number] for of in every]
            last = max(come) if all(come) else 0.0
            self._add(track, f"waiting at {point.name}", "waiting", arrived, last, {"where": point.where})
            self._add(track, point.name, "merge", last, gone, {"where": point.where})
            left = gone
        self._add(track, "run", "run", left, times[-1])

    def _add(self, track: Track, name: str, kind: str, begin: float, end: float, details: Any = None) -> None:
        if 0.0 < begin < end:
            timeline.add(track, name, kind, begin - self._offset, end - self._offset, details)


def _between(times: Sequence[float], begin: float, end: float) -> float:
    """The last of some times in a stretch; 0.0 if there is none."""
    at = bisect.bisect_left(times, end)
    return times[at - 1] if at and times[at - 1] >= begin else 0.0


class drawn:
    """A context manager around a call of a function: draws its steps, if a timeline records.

    Args:
        every: the marks of the runs in the function.
        loops: whether a run is in a loop of the graph.
    """

    def __init__(self, every: Sequence[MarkedTimes], loops: bool):
        self._drawings: list[Drawing] = []
        if every and timeline.recording():
            self._drawings = [Drawing(marks, threading.current_thread()) for marks in every]
        self._loops = loops
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._drawings and self._loops:
            # Not a method of this object, which the thread would keep alive.
            look = functools.partial(_look_again_and_again, self._drawings, self._over)
            self._thread = threading.Thread(target=look, name="replica_engine: timeline of a loop", daemon=True)
            threads.start(self._thread)

    def __exit__(self, *_: object) -> None:
        if not self._drawings:
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for each in self._drawings:
            each.look()
            each.end()


def _look_again_and_again(drawings: Sequence[Drawing], over: threading.Event) -> None:
    took = 0.0
    while not over.wait(max(LEAST, REST * took)):
        began = time.perf_counter()
        for each in drawings:
            each.look()
        took = time.perf_counter() - began
