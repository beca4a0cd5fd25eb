"""Draws a step inside a `tf.function` on a timeline, from the marks in its graph, once its call has returned.

A mark holds its last time only, so of steps in a loop of the graph nothing is drawn.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence

from replica_engine.diagnostics.marked_step import MarkedStep
from replica_engine.telemetry import timeline


def draw(marks: MarkedStep, since: float) -> None:
    """Draws a step, and the call of the function on the track of the thread that called it.

    Args:
        marks: the marks of the run.
        since: when the call began, in seconds since the epoch.
    """
    offset = time.time() - timeline.now()
    steps = [_step(times, since) for times in marks.times()]

    def add(
        track: timeline.Track,
        name: str,
        kind: str,
        begin: float,
        end: float,
        details: Mapping[str, object] | None = None,
    ) -> None:
        if 0.0 < begin < end:
            timeline.add(track, name, kind, begin - offset, end - offset, details)

    for replica, (name, step) in enumerate(zip(marks.names, steps, strict=True)):
        track = timeline.Track(marks.group, f"replica {replica} of {len(steps)} ({name})", id(marks), replica + 1)
        left = step[0]
        for at, point in enumerate(marks.meetings()):
            arrived, gone = step[1 + 2 * at : 3 + 2 * at]
            if not arrived and not gone:  # a branch that was not taken
                continue
            come, where = [each[1 + 2 * at] for each in steps], {"where": point.where}
            last = max(come) if all(come) else 0.0
            add(track, "run", "run", left, arrived)
            add(track, f"waiting at {point.name}", "waiting", arrived, last, where)
            add(track, point.name, "merge", last, gone, where)
            left = gone
        add(track, "run", "run", left, step[-1])
    if all(step[-1] for step in steps):
        caller = threading.current_thread()
        track = timeline.Track(marks.group, f"coordinator ({caller.name})", caller.ident or 0)
        add(track, "run", "waiting", min(step[0] for step in steps), max(map(max, steps)), {"replicas": len(steps)})


def _step(times: Sequence[float], since: float) -> list[float]:
    """The times of a replica in a call that began at `since`, as `MarkedStep.times` has them; 0.0 if not reached."""
    begun = times[0] if times[0] >= since else math.inf
    step = [each if each >= begun else 0.0 for each in times]
    for at in range(1, len(step) - 1, 2):  # no departure waits for the mark of an arrival, so that may be late
        step[at] = min(step[at], step[at + 1] or math.inf)
    return step
