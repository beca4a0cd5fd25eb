"""Where the replicas of a traced step are, read from its graph while TensorFlow runs it.

While the step is traced, the coordinator adds marks to the graph: at the begin and the end of each replica, when a
replica has brought to a sync point all that it brings, and when it has got its part of the result. A mark is a time on
the replica's own device. In a loop, the begin of a replica is counted too.

What the marks guarantee, beside what they show: the ops of a merge function that write variables wait until every
replica has come to the sync point. So a step that is cancelled while a replica is on its way there has made none of
these updates, as in eager mode, and an op of the step that goes on later cannot make them.

The marks of one replica in one graph wait for each other, begin, arrival, departure, end, so that their times tell
which of them belong to the current step. What must never happen: an op of the user waits for a mark, except for those
writes.
"""

from __future__ import annotations

import dataclasses
import operator
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf.graphs import marks, subgraphs, waiting
from replica_engine._tf.graphs.marks import Mark
from replica_engine.diagnostics.traced_places import Updates
from replica_engine.engine import SyncPoint
from replica_engine.engine.sync_point import State
from replica_engine.errors import ReplicaRow
from replica_engine.values.structure import flatten


@dataclasses.dataclass
class MarkedPoint:
    """A sync point of a traced step, with those that follow at once.

    Attributes:
        points: the sync points of replica 0, at the time of the trace.
        arrived: for each replica, when it had brought all its values to the first of them.
        left: for each replica, when it had its part of the last result, and its device what the merges wrote there;
            None if neither is to be seen. Empty while further sync points may follow at once.
        writes: whether a merge writes variables.
    """

    points: list[SyncPoint]
    arrived: list[Mark]
    left: list[Mark | None]
    writes: bool = False

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(str, self.points)))


class Place(NamedTuple):
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

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the other replicas."""
        return self.state is State.PAUSED


class StepMarks:
    """The marks of one traced run.

    Args:
        devices: the full names of the replicas' devices.
        names: their short names, for tables.
        loops: whether the run is in a loop of the graph.

    Attributes:
        points: the sync points, in the order in which they were traced.
    """

    def __init__(self, devices: Sequence[str], names: Sequence[str], loops: bool):
        self.names = names
        self.points: list[MarkedPoint] = []
        self.loops = loops
        self._devices = devices
        self._graph: weakref.ref[Any] | None = None
        self._first_op = 0
        self._begun: list[Mark] = []
        self._counts: list[Mark] = []
        self._ended: list[Mark] = []
        self._last: Sequence[Mark] = []
        self._open: Meeting | None = None  # more sync points may follow at once
        self._merged: set[str] = set()  # the ops that write variables in merges
        self._own_writes: list[str] = []  # and those of the replicas
        self._nests = False  # whether replicas meet in branches or loops

    @property
    def graph(self) -> Any:
        """The graph in which the run was traced; None once it is gone."""
        return None if self._graph is None else self._graph()

    def begin(self, arguments: Sequence[Any]) -> None:
        """Marks the begin of each replica, once it has its arguments."""
        graph = tf.compat.v1.get_default_graph()
        self._graph = weakref.ref(graph)
        for device, own in zip(self._devices, arguments, strict=True):
            self._begun.append(marks.time(device, _leaves(own)))
            if self.loops:
                self._counts.append(marks.count(device, [self._begun[-1].op]))
        self._last = self._begun
        self._first_op = graph.num_operations()

    def met(self, point: SyncPoint, requests: Sequence[Any]) -> Meeting:
        """Marks the arrival of each replica at a sync point; what is returned marks how they leave it.

        Not the arrival at one that follows at once, such as the updates of all variables one after another.
        """
        graph = tf.compat.v1.get_default_graph()
        if self._open is not None and self._open.goes_on(graph, len(self._devices)):
            self._open.marked.points.append(point)
            return self._open
        self._close()
        before = self._last if graph is self.graph else [None] * len(self._devices)
        arrived = []
        for device, last, request in zip(self._devices, before, requests, strict=True):
            earlier = [] if last is None else [last.op]
            brought = _leaves((request.args, request.kwargs))
            arrived.append(marks.time(device, [*earlier, *request.control_inputs, *brought]))
        marked = MarkedPoint([point], arrived, [])
        self.points.append(marked)
        meeting = Meeting(graph, marked)
        if graph is self.graph:
            self._open, self._last = meeting, arrived
        else:
            self._nests = True
        return meeting

    def end(self, results: Sequence[Any]) -> None:
        """Marks the end of each replica: it has its results, and its device the effects of the step."""
        self._close()
        effects = marks.effects_in(self.graph, self._first_op)
        self._own_writes = [
            op.name
            for op in effects
            if marks.writes(op) and op.name not in self._merged and not (self._nests and subgraphs.runs_functions(op))
        ]
        for device, last, own in zip(self._devices, self._last, results, strict=True):
            on_device = [op for op in effects if op.device == device]
            self._ended.append(marks.time(device, [last.op, *_leaves(own), *on_device]))

    def _close(self) -> None:
        """Marks the end of the sync points that have followed each other at once so far."""
        if self._open is not None:
            self._open.close()
            left = self._open.marked.left
            self._last = [last if new is None else new for last, new in zip(self._last, left, strict=True)]
            self._merged |= self._open.written
            self._open = None

    def places(self, since: float) -> list[Place]:
        """Where each replica is now, in a call that began at `since`, in seconds since the epoch."""
        begun = [mark.read() for mark in self._begun]
        if not any(each >= since for each in begun):
            return [Place(State.IDLE, 0.0, next=mark) for mark in self._begun]
        reached = [[mark.read() for mark in point.arrived] for point in self.points]
        places = []
        for replica, start in enumerate(begun):
            if start < since:
                places.append(Place(State.IDLE, 0.0, next=self._begun[replica]))
                continue
            place, number, latest = Place(State.RUNNING, start), 0, start
            for point, times in zip(self.points, reached, strict=True):
                if times[replica] < latest:  # not reached in this step, or before another one
                    number += len(point.points) if times[replica] >= start else 0
                    continue
                number, latest = number + len(point.points), times[replica]
                gone = _gone(point.left[replica], times, begun)
                if gone >= latest:
                    place = Place(State.RUNNING, gone, number, point.points[-1])
                else:
                    place = Place(State.PAUSED, latest, number - len(point.points) + 1, point.points[0])
            ended = self._ended[replica].read() if self._ended else 0.0
            if ended >= max(start, place.since):
                place = place._replace(state=State.FINISHED, since=ended, points=number)
            places.append(place._replace(next=self._next(replica, reached, start)))
        return places

    def _next(self, replica: int, reached: Sequence[Sequence[float]], start: float) -> Mark | None:
        for point, times in zip(self.points, reached, strict=True):
            if times[replica] < start:
                return point.arrived[replica]
        return self._ended[replica] if self._ended else None

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

    def updates(self, since: float) -> Updates:
        """Which merges have written variables in the current step of a call that began at `since`."""
        begun = [mark.read() for mark in self._begun]
        graph = self.graph
        own = [] if graph is None else [graph.get_operation_by_name(name) for name in self._own_writes]
        updates = Updates([], [], [], own)
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

    def device_of(self, op: tf.Operation) -> int | None:
        """The replica on whose device an op is; None if it is on no replica's, or all are on one."""
        if len(set(self._devices)) < 2:
            return 0 if len(self._devices) == 1 else None
        names = [tf.DeviceSpec.from_string(device) for device in self._devices]
        own = tf.DeviceSpec.from_string(op.device or "")
        found = [
            replica
            for replica, name in enumerate(names)
            if (name.device_type, name.device_index) == (own.device_type, own.device_index)
        ]
        return found[0] if len(found) == 1 else None

    def iterations(self) -> list[int]:
        """How often each replica has begun so far, in a loop; an empty list outside."""
        return [int(mark.read()) for mark in self._counts]

    def rows(self, places: Sequence[Place], counted: Sequence[int]) -> list[ReplicaRow]:
        """The rows of a table.

        Args:
            places: what `places` returned.
            counted: what `iterations` returned when the call began.
        """
        now = time.time()
        iterations: list[int | None] = [None] * len(places)
        if counted:
            iterations = [each - before for each, before in zip(self.iterations(), counted, strict=True)]
        return [
            ReplicaRow(
                replica=replica,
                size=len(places),
                device=self.names[replica],
                state=place.state.value,
                merge_calls=place.points,
                where="" if place.last is None else str(place.last),
                seconds=max(0.0, now - place.since) if place.since else None,
                iteration=iteration,
            )
            for replica, (place, iteration) in enumerate(zip(places, iterations, strict=True))
        ]


class Meeting:
    """A sync point whose arrivals are marked, and those that follow at once.

    Args:
        graph: the graph in which the replicas meet.
        marked: their marks.

    Attributes:
        marked: their marks.
        written: the names of the ops that write variables.
    """

    def __init__(self, graph: Any, marked: MarkedPoint):
        self.marked = marked
        self.written: set[str] = set()
        self._graph = graph
        self._first_op = self._last_op = graph.num_operations()
        self._results: Sequence[Any] = [()] * len(marked.arrived)
        self._gates: dict[str, tf.Operation] = {}

    def goes_on(self, graph: Any, replicas: int) -> bool:
        """Whether replicas that meet now have done next to nothing since they left."""
        if graph is not self._graph:
            return False
        if graph.num_operations() - self._last_op > AT_ONCE * replicas:
            return False
        return not any(map(waiting.may_wait, graph.get_operations()[self._last_op :]))

    def left(self, results: Sequence[Any], closes: bool) -> None:
        """Notes that the replicas have their parts of the result, after the merge function was traced.

        Args:
            results: the part of each replica.
            closes: whether no sync point can follow at once, because the graph ends before that is known.
        """
        graph = self._graph
        writes = [op for op in marks.effects_in(graph, self._last_op) if marks.writes(op)]
        if writes:
            self.marked.writes = True
            self.written.update(op.name for op in writes)
            marks.hold_back(writes, self.marked.arrived, self._gates)
        self._results, self._last_op = results, graph.num_operations()
        if closes:
            self.close()

    def close(self) -> None:
        """Marks how the replicas leave."""
        effects = marks.effects_in(self._graph, self._first_op, self._last_op)
        for arrived, own in zip(self.marked.arrived, self._results, strict=True):
            after = [*_leaves(own), *(op for op in effects if op.device == arrived.device)]
            known = bool(marks.of_graph(self._graph, after))
            self.marked.left.append(marks.time(arrived.device, [arrived.op, *after]) if known else None)


def _gone(left: Mark | None, arrived: Sequence[float], begun: Sequence[float]) -> float:
    """When a replica left a sync point; if that is not to be seen, soon after the last replica has come; or 0.0."""
    if left is not None:
        return left.read()
    return max(arrived) if all(map(operator.ge, arrived, begun)) else 0.0


AT_ONCE = 8
"""Ops that each replica may make between two sync points of which the second follows at once."""


def _leaves(value: Any) -> list[Any]:
    return flatten(value, what="the values of a replica")[0]
