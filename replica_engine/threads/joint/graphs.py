"""Graphs that all replicas build: which replica made each op, and what each replica captures from outside.

Each replica's gradient is the gradient of its own outputs with respect to its own inputs, as a tape on its thread would
record it. So a joint graph knows for each op which replica made it. Ops of the coordinator belong to no replica: for
tapes the results of a merge are constants, as everywhere in `tf.distribute`.

Two replicas may use the same tensor of the graph outside. Each gets an alias of its own, which is made outside, on the
replica's device. Without it, the gradient of that tensor would be the sum over the replicas. It also avoids a fault of
TensorFlow's graph optimizer: `identity(x)` on CPU:0 plus `identity(x)` on CPU:1 in a branch becomes an empty tensor.
A resource has no alias, because TensorFlow orders reads and writes by the handle itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import eager
from replica_engine._tf.graphs import control_flow
from replica_engine._tf.graphs.subgraphs import capture_in
from replica_engine.engine import Replica, current_replica

_NOTES = "_replica_engine_notes"
# Ops that pass on a value, and which input it is. The gradients of If and While keep values of branches in such ops.
_PASSING = {"Identity": 0, "IdentityN": 0, "OptionalFromValue": 0, "StopGradient": 0, "TensorListPushBack": 1}


class Notes:
    """What is known of a graph that all replicas build.

    Attributes:
        owners: the replica that made each op, by the op's name; and the replica that a tensor of the coordinator's
            stands for, such as a loop variable, by the tensor's name.
        constants: the results of merges, through which no gradient goes.
        closures: eager tensors from outside that a replica uses, and what the graph captured for each.
        resources: the handles of variables that a replica uses.
        shared: the handles of variables that several replicas use.
    """

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}
        self.constants: list[tf.Tensor] = []
        self.closures: list[tuple[int, tf.Tensor, tf.Tensor]] = []
        self.resources: list[tuple[int, tf.Tensor]] = []
        self.shared: list[tf.Tensor] = []

    @classmethod
    def on(cls, graph: Any) -> Notes:
        """The notes on a graph, which becomes a joint graph."""
        notes = notes_of(graph)
        if notes is None:
            notes = cls()
            setattr(graph, _NOTES, notes)
        return notes

    def owner(self, tensor: tf.Tensor) -> int | None:
        """The replica that a tensor of the graph belongs to; None for what the coordinator made."""
        while True:
            op = tensor.op
            owner = self.owners.get(tensor.name, self.owners.get(op.name))
            if owner is not None:
                return owner
            if op.type not in _PASSING:
                return owner_inside(op, "outputs", tensor.value_index)
            tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else _PASSING[op.type]]

    def give(self, replica: int, tensors: Sequence[tf.Tensor]) -> None:
        """Notes that tensors of the coordinator's ops, such as loop variables, are a replica's own."""
        for tensor in tensors:
            self.owners.setdefault(tensor.name, replica)


def notes_of(graph: Any) -> Notes | None:
    """The notes on a joint graph; None for any other graph."""
    return getattr(graph, _NOTES, None)


def is_joint(op: tf.Operation) -> bool:
    """Whether an op is an operator that all replicas entered together, or the gradient of one."""
    return any(notes_of(graph) is not None for graph in control_flow.graphs_inside(op))


def owner_inside(op: tf.Operation, ends: str, position: int) -> int | None:
    """The replica to which an input or output of a joint operator belongs.

    Args:
        op: the op.
        ends: "inputs" or "outputs", of the graphs inside the op.
        position: the index among them.
    """
    for graph in reversed(control_flow.graphs_inside(op)):  # a loop's body, which has all that its condition has
        notes, tensors = notes_of(graph), getattr(graph, ends)
        owner = notes.owner(tensors[position]) if notes is not None and 0 <= position < len(tensors) else None
        if owner is not None:
            return owner
        if ends == "outputs" and "While" in op.type:
            return None  # the condition has one output, and it belongs to nobody
    return None


class Captures:
    """What each replica of one operator uses from outside it.

    Args:
        outer: the graph outside, in which the operator stands.
        replicas: the replicas.
        devices: the device of each replica, by its full name.

    Attributes:
        of_replica: for each replica, the tensors outside that it uses; aliases in the place of shared ones.
        shared: the handles of variables that several replicas use.
    """

    def __init__(self, outer: Any, replicas: Sequence[Replica], devices: Sequence[str]):
        self._outer, self._replicas, self._devices = outer, replicas, devices
        self.of_replica: list[list[tf.Tensor]] = [[] for _ in replicas]
        self._owners: dict[int, int] = {}
        self._aliases: dict[tuple[int, int], tf.Tensor] = {}
        self.shared: list[tf.Tensor] = []
        self._kept: list[Any] = []  # so that no id is used twice
        self._watched: list[Any] = []

    def watch(self, graph: Any, aliases: bool) -> None:
        """Begins to note the owners of ops in a graph that replicas build, and with `aliases` their captures."""
        if getattr(graph, "_replica_engine_captures", None) is self:
            return
        graph._replica_engine_captures = self
        self._watched.append(graph)
        notes, replicas = Notes.on(graph), self._replicas
        create, capture = graph._create_op_internal, graph.capture

        def create_noted(*args: Any, **kwargs: Any) -> Any:
            op = create(*args, **kwargs)
            replica = current_replica()
            if replica is not None and replica in replicas:
                notes.owners[op.name] = replica.index
            return op

        def capture_own(tensor: Any, name: str | None = None, shape: Any = None) -> Any:
            if getattr(tensor, "graph", None) is graph:
                return capture(tensor, name)
            replica = current_replica()
            if replica is None or replica not in replicas:
                # The coordinator captures as the replicas do, so that one tensor is one input.
                return capture(capture_in(self._outer, tensor) if notes_of(self._outer) is not None else tensor, name)
            own = capture(self._own(replica.index, tensor, notes), name)
            if own.dtype != tf.resource:  # also if the coordinator has captured the tensor before
                notes.owners.setdefault(own.op.name, replica.index)
            return own

        graph._create_op_internal = create_noted
        graph.capture = capture_own if aliases else capture

    def unwatch(self) -> None:
        """Ends all that `watch` began; the graphs keep their notes."""
        for graph in self._watched:
            del graph._create_op_internal, graph._replica_engine_captures, graph.capture
        self._watched, self._kept, self._aliases, self._owners = [], [], {}, {}

    def _own(self, replica: int, tensor: Any, notes: Notes) -> Any:
        """Returns the tensor that stands for `tensor` in this operator for one replica alone, and notes it."""
        if tensor.dtype == tf.resource:
            if self._owners.setdefault(id(tensor), replica) != replica:
                self.shared.append(tensor)
            self._kept.append(tensor)
            if all(known is not tensor or by != replica for by, known in notes.resources):
                notes.resources.append((replica, tensor))
        elif not hasattr(self._outer, "capture"):  # in eager mode
            tensor = self._eager_alias(replica, tensor, notes)
        else:
            tensor = self._alias(replica, capture_in(self._outer, tensor) if eager.is_eager(tensor) else tensor)
        if notes_of(self._outer) is not None:
            tensor = capture_in(self._outer, tensor)  # on the replica's thread, so that it is the replica's own there
        if all(tensor is not known for known in self.of_replica[replica]):
            self.of_replica[replica].append(tensor)
        return tensor

    def _alias(self, replica: int, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor of the graph outside that no other replica uses."""
        self._kept.append(tensor)
        if self._owners.setdefault(id(tensor), replica) == replica:
            return tensor
        key = replica, id(tensor)
        if key not in self._aliases:
            with self._outer.as_default(), tf.control_dependencies(None), tf.device(self._devices[replica]):
                alias = self._aliases[key] = tf.identity(tensor)
            self._kept.append(alias)
            self._owners[id(alias)] = replica
        return self._aliases[key]

    def _eager_alias(self, replica: int, tensor: tf.Tensor, notes: Notes) -> tf.Tensor:
        """A copy of an eager tensor for one replica alone."""
        key = replica, id(tensor)
        if key not in self._aliases:
            self._kept.append(tensor)
            with tf.init_scope(), tf.device(self._devices[replica]):
                self._aliases[key] = tf.identity(tensor)
            notes.closures.append((replica, tensor, self._aliases[key]))
        return self._aliases[key]
