"""A traced step with marks in its graph: where its replicas are while TensorFlow runs it.

`threads.step_marks` adds the marks.
"""

from __future__ import annotations

import dataclasses
import operator
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from replica_engine.diagnostics.flight_record import Executed
from replica_engine.engine import State, SyncPoint
from replica_engine.errors import ReplicaRow
from replica_engine.upstream.graphs.mark_ops import Mark


@dataclasses.dataclass
class MarkedPoint:
    """A sync point of a traced step, with those that follow at once.

    Attributes:
        points: the sync points of replica 0, at the time of the trace.
        arrived: for each replica, when it had brought all its values to the first of them.
        left: for each replica, when it had its part of the last result, and its device what the merges wrote there;
            None if no mark shows it. The list is empty while further sync points may follow at once; only then the
            point is not yet in `MarkedStep.points`.
        writes: whether a merge writes variables.
    """

    points: list[SyncPoint]
    arrived: list[Mark]
    left: list[Mark | None]
    writes: bool = False

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(str, self.points)))


class StepPlace(NamedTuple):
    """Where a replica is.

    Attributes:
        state: what it is doing.
        since: when it came there, in seconds since the epoch; 0.0 if it has not begun.
        points: how many sync points it has reached in the step.
        last: the last one; None if it has reached none.
        next: the mark that it has not reached; None at the end.
    """

    state: State
    since: float
    points: int = 0
    last: SyncPoint | None = None
    next: Mark | None = None


class StepUpdates(NamedTuple):
    """The merges of a step that write variables, in words with their lines: those made, under way, and to come.

    `own` are the ops by which replicas write variables without a merge.
    """

    made: list[str]
    under_way: list[str]
    to_come: list[str]
    own: list[tf.Operation]


class MarkedStep:
    """The marks of one traced run, which a subclass adds.

    Args:
        devices: the full names of the replicas' devices.
        names: their short names, for tables.
        group: the name under which timelines show the run, such as the name of the strategy.
        loops: whether the run is in a loop of the graph.

    Attributes:
        points: the sync points whose marks are whole, in the order in which they were traced. A trace that fails
            leaves its last ones out.
    """

    def __init__(self, devices: Sequence[str], names: Sequence[str], group: str, loops: bool):
        self.names, self.group, self.loops = names, group, loops
        self.points: list[MarkedPoint] = []
        self._devices = devices
        self._graph: weakref.ref[tf.Graph] | None = None
        self._begun: list[Mark] = []
        self._counts: list[Mark] = []
        self._ended: list[Mark] = []
        self._own_writes: list[str] = []  # the names of the ops by which replicas write variables without a merge

    @property
    def graph(self) -> tf.Graph | None:
        """The graph in which the run was traced; None once it is gone."""
        return None if self._graph is None else self._graph()

    def places(self, since: float) -> list[StepPlace]:
        """Where each replica is now, in a call that began at `since`, in seconds since the epoch."""
        begun = [mark.read() for mark in self._begun]
        if not any(each >= since for each in begun):
            return [StepPlace(State.IDLE, 0.0, next=mark) for mark in self._begun]
        reached = [[mark.read() for mark in point.arrived] for point in self.points]
        places = []
        for replica, start in enumerate(begun):
            if start < since:
                places.append(StepPlace(State.IDLE, 0.0, next=self._begun[replica]))
                continue
            place, number, latest = StepPlace(State.RUNNING, start), 0, start
            for point, times in zip(self.points, reached, strict=True):
                if times[replica] < latest:  # not reached in this step, or before another one
                    number += len(point.points) if times[replica] >= start else 0
                    continue
                number, latest = number + len(point.points), times[replica]
                gone = _gone(point.left[replica], times, begun)
                if gone >= latest:
                    place = StepPlace(State.RUNNING, gone, number, point.points[-1])
                else:
                    place = StepPlace(State.PAUSED, latest, number - len(point.points) + 1, point.points[0])
            ended = self._ended[replica].read() if self._ended else 0.0
            if ended >= max(start, place.since):
                place = place._replace(state=State.FINISHED, since=ended, points=number)
            missing = (point for point, times in zip(self.points, reached, strict=True) if times[replica] < start)
            marks = (point.arrived[replica] for point in missing)
            places.append(place._replace(next=next(marks, self._ended[replica] if self._ended else None)))
        return places

    def times(self) -> list[list[float]]:
        """The last times of each replica, in the order of its step, in seconds since the epoch.

        They are: begin; for each sync point arrival and departure; end. 0.0 stands for what was not reached.
        """
        times = [[mark.read()] for mark in self._begun]
        for marked in self.points:
            arrived = [mark.read() for mark in marked.arrived]
            for own, came, left in zip(times, arrived, marked.left, strict=True):
                own += [came, max(arrived) if left is None else left.read()]
        for own, mark in zip(times, self._ended, strict=True):
            own.append(mark.read())
        return times

    def executions(self) -> dict[tuple[int, int, int], Executed]:
        """The last execution of each sync point; see `flight_record.Executions`."""
        found: dict[tuple[int, int, int], Executed] = {}
        for marked in self.points:
            arrived = [mark.read() for mark in marked.arrived]
            for replica, (came, mark) in enumerate(zip(arrived, marked.left, strict=True)):
                if not came:
                    continue
                left = max(arrived) if mark is None else mark.read()
                last = Executed(came, max(arrived), left if left >= came else 0.0)
                for point in marked.points:
                    found[point.run, point.number, replica] = last
                    last = Executed(left, left, left) if last.left else last  # the next one followed at once
        return found

    def passed(self, since: float) -> list[tf.Operation]:
        """The ops of the marks that were reached in the current step of a call that began at `since`."""
        found: list[tf.Operation] = []
        for replica, mark in enumerate(self._begun):
            start = mark.read()
            if start >= since:
                own = [mark, *(point.arrived[replica] for point in self.points)]
                own += [each for point in self.points if (each := point.left[replica]) is not None]
                found += [each.op for each in own if each.read() >= start]
        return found

    def updates(self, since: float) -> StepUpdates:
        """Which merges have written variables in the current step of a call that began at `since`."""
        begun = [mark.read() for mark in self._begun]
        graph = self.graph
        own = [] if graph is None else [graph.get_operation_by_name(name) for name in self._own_writes]
        updates = StepUpdates([], [], [], own)
        for point in self.points:
            if not point.writes:
                continue
            times = [mark.read() for mark in point.arrived]
            all_left = all(mark is None or mark.read() >= came for mark, came in zip(point.left, times, strict=True))
            newer = [each >= start >= since for each, start in zip(times, begun, strict=True)]
            is_of_last = not any(newer) and min(times) >= since  # of the last step in a loop
            kind = updates.to_come
            if (all(newer) or is_of_last) and not all_left:
                kind = updates.under_way
            elif all(newer):
                kind = updates.made
            kind.append(str(point))
        return updates

    def find_op_replica(self, op: tf.Operation) -> int | None:
        """The replica on whose device an op is; None if it is on no replica's, or all are on one."""
        if len(set(self._devices)) < 2:
            return 0 if len(self._devices) == 1 else None
        specs = map(tf.DeviceSpec.from_string, [*self._devices, op.device or ""])
        *replicas, own = [(each.device_type, each.device_index) for each in specs]
        return replicas.index(own) if replicas.count(own) == 1 else None

    def iterations(self) -> list[int]:
        """How often each replica has begun so far, in a loop; an empty list outside."""
        return [int(mark.read()) for mark in self._counts]

    def rows(self, places: Sequence[StepPlace], counted: Sequence[int]) -> list[ReplicaRow]:
        """The rows of a table.

        Args:
            places: what `places` returned.
            counted: what `iterations` returned when the call began.
        """
        now = time.time()
        iterations: list[int | None] = [None] * len(places)
        if counted:
            iterations = [each - before for each, before in zip(self.iterations(), counted, strict=True)]
        rows = []
        for replica, (place, iteration) in enumerate(zip(places, iterations, strict=True)):
            where = "" if place.last is None else str(place.last)
            seconds = max(0.0, now - place.since) if place.since else None
            what = place.state.value, place.points, where, seconds
            rows.append(ReplicaRow(replica, len(places), self.names[replica], *what, iteration=iteration))
        return rows


def _gone(left: Mark | None, arrived: Sequence[float], begun: Sequence[float]) -> float:
    """When a replica left a sync point. Without a mark, the time at which the last replica came; 0.0 before that."""
    if left is not None:
        return left.read()
    return max(arrived) if all(map(operator.ge, arrived, begun)) else 0.0
