"""One operator for all replicas, while the coordinator builds it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine.engine import Run
from replica_engine.errors import StructureMismatchError
from replica_engine.process import scoped
from replica_engine.threads.joint.graphs import Captures, Notes, notes_of
from replica_engine.values.regroup import regroup


class Part(NamedTuple):
    """What one replica brings to an operator that all replicas enter together.

    Attributes:
        context: the replica's context.
        payload: what `build` needs of this replica.
        taped: whether a gradient tape records on the replica's thread.
    """

    context: Any
    payload: Any
    taped: bool


class Built(NamedTuple):
    """What one replica gets back.

    Attributes:
        value: its outputs.
        backward: what differentiates them; None if nothing can.
        inputs: the tensors on which its outputs depend.
    """

    value: Any
    backward: Any = None
    inputs: Sequence[tf.Tensor] = ()


class JointOperator:
    """Builds one operator.

    Args:
        run: the run, in a merge.
        parts: what each replica brings.

    Attributes:
        outer: the graph in which the operator stands.
        parts: what each replica brings.
        payloads: what `build` needs of each replica.
        run: the run.
        kind: the name of the operator, such as "tf.cond".
        where: the user's line.
        captures: what each replica uses from outside.
    """

    def __init__(self, run: Run, parts: Sequence[Part]):
        self.run, self.parts = run, parts
        self.payloads: list[Any] = [part.payload for part in parts]
        self.outer = thread_state.default_graph()
        point = run.sync_point()[0]
        self.kind, self.where = point.kind, point.where
        devices = [part.context.device for part in parts]
        self.captures = Captures(self.outer, run.replicas, devices)

    def check_equal(self, described: Sequence[str], name: str) -> None:
        """Raises StructureMismatchError if the replicas gave different kinds of an argument.

        Args:
            described: the argument of each replica, in words.
            name: the argument.
        """
        for replica, each in enumerate(described):
            if each != described[0]:
                what = f"The arguments of {self.kind} ({self.where})"
                raise StructureMismatchError.between(what, name, (0, replica), (described[0], each))

    def trace(
        self,
        calls: Sequence[Callable[[], Any]],
        own: Sequence[Any] = (),
        aliases: bool = True,
        creators: list | None = None,
    ) -> list[Any]:
        """Calls a function on each replica's thread in the default graph, one after another; they may merge.

        Args:
            calls: the function of each replica.
            own: what the coordinator's ops in the graph, such as loop variables, have for each replica.
            aliases: whether each replica gets aliases of the tensors outside that others use as well.
            creators: the stack of variable creators of the graph; None leaves it empty.

        Returns:
            What each call returned. Variables, and tensors of other graphs, became tensors of this graph.
        """
        graph = thread_state.default_graph()
        thread_state.make_stacks_thread_local(graph)
        for replica, each in enumerate(own):
            Notes.on(graph).give(replica, flat_tensors(each))
        self.captures.watch(graph, aliases)
        errands = [
            functools.partial(part.context.in_graph, graph, functools.partial(_called_in, graph, call), creators)
            for part, call in zip(self.parts, calls, strict=True)
        ]
        results = self.run.errands(errands)
        regroup(results, f"The results of the replicas in {self.kind} ({self.where})")  # for its errors
        return results

    def building(self) -> contextlib.AbstractContextManager[object]:
        """Inside the block, gradients of joint graphs are computed by the replicas, each on its own thread."""
        return scoped.attribute(_building, "operator", self)

    def inputs(self, more: Sequence[Sequence[tf.Tensor]] | None = None) -> list[list[tf.Tensor]]:
        """For each replica, what its outputs can depend on: what it captured, and `more`."""
        found = []
        for replica, captured in enumerate(self.captures.of_replica):
            tensors = {id(each): each for each in [*(more[replica] if more else ()), *captured]}
            found.append([each for each in tensors.values() if is_differentiable(each) or each.dtype == tf.resource])
        return found


_building = threading.local()


def now_building() -> JointOperator | None:
    """The operator inside whose `building` this thread is."""
    return getattr(_building, "operator", None)


def flat_tensors(structure: Any) -> list[tf.Tensor]:
    """The tensors of a structure: components of composite tensors, and the contents of TensorArrays."""
    return [
        each.flow if isinstance(each, tf.TensorArray) else each
        for each in tf.nest.flatten(structure, expand_composites=True)
        if isinstance(each, (tf.Tensor, tf.TensorArray))
    ]


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant


def differentiable(structure: Any) -> list[tf.Tensor]:
    """The tensors of a structure that can have a gradient."""
    return [each for each in flat_tensors(structure) if is_differentiable(each)]


def note_constants(graph: Any, results: Any) -> None:
    """Notes in a joint graph which results of a merge the coordinator made: no gradient goes through these."""
    notes = notes_of(graph)
    if notes is not None:
        notes.constants += [
            each
            for each in tf.nest.flatten(results, expand_composites=True)
            if isinstance(each, tf.Tensor) and getattr(each, "graph", None) is graph and notes.owner(each) is None
        ]


def _called_in(graph: Any, call: Callable[[], Any]) -> Any:
    """Calls a function on a replica's thread, and makes its results the replica's own tensors of the graph."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable):
            return tf.convert_to_tensor(leaf)
        if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is not graph:
            return graph.capture(leaf)
        return leaf

    return tf.nest.map_structure(own, call(), expand_composites=True)
