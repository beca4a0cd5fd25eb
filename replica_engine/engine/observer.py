"""Draws a run on a timeline: one track for each replica, and one for the coordinator.

A run has an observer only while a timeline is being recorded. A run that is not recorded pays one comparison with None
at each place where something could be drawn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from replica_engine.engine.sync_point import SyncPoint
from replica_engine.telemetry import timeline


class Observer:
    """Draws one run.

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
