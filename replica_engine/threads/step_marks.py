"""Marks in the graph of a traced step, which tell where its replicas are while TensorFlow runs it.

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

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine.engine import SyncPoint
from replica_engine.traced_steps.marked_step import MarkedPoint, MarkedStep
from replica_engine.upstream.graphs import graph_walk, mark_ops
from replica_engine.values.structure import flatten


class StepMarks(MarkedStep):
    """Adds the marks of one run while it is traced; see `MarkedStep`."""

    def __init__(self, devices: Sequence[str], names: Sequence[str], group: str, loops: bool):
        super().__init__(devices, names, group, loops)
        self._first_op = 0
        self._last: Sequence[mark_ops.Mark] = []
        self._open: Meeting | None = None  # more sync points may follow at once
        self._merged: set[str] = set()  # the ops that write variables in merges
        self._nests = False  # whether replicas meet in branches or loops

    def begin(self, arguments: Sequence[Any]) -> None:
        """Marks the begin of each replica, once it has its arguments."""
        graph = tf.compat.v1.get_default_graph()
        self._graph = weakref.ref(graph)
        for device, own in zip(self._devices, arguments, strict=True):
            self._begun.append(mark_ops.time(device, _leaves(own)))
            if self.loops:
                self._counts.append(mark_ops.count(device, [self._begun[-1].op]))
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
            arrived.append(mark_ops.time(device, [*earlier, *request.control_inputs, *brought]))
        meeting = Meeting(graph, MarkedPoint([point], arrived, []), self.points)
        if graph is self.graph:
            self._open, self._last = meeting, arrived
        else:
            self._nests = True
        return meeting

    def end(self, results: Sequence[Any]) -> None:
        """Marks the end of each replica: it has its results, and its device the effects of the step."""
        self._close()
        effects = mark_ops.effects_in(self.graph, self._first_op)
        known = self._merged | self._names_of_marks()
        self._own_writes = [
            op.name
            for op in effects
            if mark_ops.writes(op) and op.name not in known and not (self._nests and graph_walk.runs_functions(op))
        ]
        for device, last, own in zip(self._devices, self._last, results, strict=True):
            on_device = [op for op in effects if op.device == device]
            self._ended.append(mark_ops.time(device, [last.op, *_leaves(own), *on_device]))

    def _names_of_marks(self) -> set[str]:
        of_points = (mark for point in self.points for mark in (*point.arrived, *point.left))
        return {mark.op.name for mark in (*self._begun, *self._counts, *of_points) if mark is not None}

    def _close(self) -> None:
        """Marks the end of the sync points that have followed each other at once so far."""
        if self._open is not None:
            self._open.close()
            left = self._open.marked.left
            self._last = [last if new is None else new for last, new in zip(self._last, left, strict=True)]
            self._merged |= self._open.written
            self._open = None


class Meeting:
    """A sync point whose arrivals are marked, and those that follow at once.

    Args:
        graph: the graph in which the replicas meet.
        marked: their marks.
        points: where the marks go once they are whole. Those of a merge that fails never are.

    Attributes:
        marked: their marks.
        written: the names of the ops that write variables.
    """

    def __init__(self, graph: Any, marked: MarkedPoint, points: list[MarkedPoint]):
        self.marked = marked
        self._points = points
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
        return not any(map(graph_walk.may_take_long, graph.get_operations()[self._last_op :]))

    def left(self, results: Sequence[Any], closes: bool) -> None:
        """Notes that the replicas have their parts of the result, after the merge function was traced.

        Args:
            results: the part of each replica.
            closes: whether no sync point can follow at once, because the graph ends before that is known.
        """
        graph = self._graph
        writes = [op for op in mark_ops.effects_in(graph, self._last_op) if mark_ops.writes(op)]
        if writes:
            self.marked.writes = True
            self.written.update(op.name for op in writes)
            mark_ops.hold_back(writes, self.marked.arrived, self._gates)
        self._results, self._last_op = results, graph.num_operations()
        if closes:
            self.close()

    def close(self) -> None:
        """Marks how the replicas leave."""
        effects = mark_ops.effects_in(self._graph, self._first_op, self._last_op)
        for arrived, own in zip(self.marked.arrived, self._results, strict=True):
            after = [*_leaves(own), *(op for op in effects if op.device == arrived.device)]
            known = bool(mark_ops.select_from_graph(self._graph, after))
            self.marked.left.append(mark_ops.time(arrived.device, [arrived.op, *after]) if known else None)
        self._points.append(self.marked)


AT_ONCE = 8
"""The most ops that each replica makes between two sync points, if the second counts as following at once."""


def _leaves(value: Any) -> list[Any]:
    return flatten(value, what="the values of a replica")[0]
