"""Finds sums over replicas of one tensor that all replicas share, which are an error as on replica threads.

A replica thread brings a tensor that only it has, or one that all have. A body is traced once: a tensor that the
caller passes to all replicas, and one that the body uses from outside, looks like any other there. So a body notes
what it adds up, and finds out where that comes from. An argument may be shared in one call and not in the next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from replica_engine._tf import distribute, variables
from replica_engine._tf.graphs import subgraphs
from replica_engine.diagnostics.op_lines import here
from replica_engine.errors import ReplicaValueError
from replica_engine.process import scoped
from replica_engine.xla.body import in_body
from replica_engine.xla.signature import argument_names
from replica_engine.xla.signature.arguments import Arguments

_thread = threading.local()


class SharedSums:
    """What one trace of a body adds up.

    Attributes:
        slots: for the index of each argument that is added up as it is: its name, and the user's line.
    """

    def __init__(self) -> None:
        self.slots: dict[int, tuple[str, str]] = {}
        self._added: list[tuple[tf.Tensor, str]] = []

    @contextlib.contextmanager
    def noted(self, placeholders: Sequence[tf.Tensor]) -> Iterator[None]:
        """Inside, a body with these arguments is traced.

        Raises:
            ReplicaValueError: at the end, if the body adds up a tensor from outside.
        """
        with scoped.attribute(_thread, "sums", self):
            yield
        graph = variables.graph()
        for tensor, where in self._added:
            origin = _origin(tensor, graph)
            index = next((index for index, each in enumerate(placeholders) if each is origin), None)
            if index is not None:
                self.slots[index] = argument_names.of(placeholders[index]), where
            elif origin is not None:
                raise ReplicaValueError.sum_of_one(subgraphs.captured(origin), False, where)
        self._added = []

    def check(self, arguments: Arguments) -> None:
        """Checks the arguments of a call.

        Raises:
            ReplicaValueError: all replicas share one that is added up.
        """
        for index, (name, where) in self.slots.items():
            if arguments.slots[index].is_shared:
                raise ReplicaValueError.sum_of_one(name, False, where)


def note(value: object) -> None:
    """Called with a value of which a body asks for the sum over its replicas.

    Raises:
        ReplicaValueError: it is one value for all replicas.
    """
    body = in_body()
    if body is None or body.own == 1:  # a worker with one replica has that replica's tensors
        return
    is_variable = isinstance(value, tf.Variable)
    if distribute.is_mirrored(value) or (is_variable and not isinstance(value, distribute.DistributedVariable)):
        raise ReplicaValueError.sum_of_one(value, is_variable)
    if tf.is_symbolic_tensor(value):
        _thread.sums._added.append((value, here()))
    elif isinstance(value, tf.Tensor):
        raise ReplicaValueError.sum_of_one(value, False)


def _origin(tensor: tf.Tensor, body: tf.Graph) -> tf.Tensor | None:
    """The input of a body's graph that a tensor in it is; None if an op makes the tensor."""
    while tensor.op.type == "Placeholder" and tensor.graph is not body:
        outside = subgraphs.captured(tensor)
        if outside is None:
            outside = _passed(tensor, body)
        if not tf.is_symbolic_tensor(outside):
            return None
        tensor = outside
    return tensor if tensor.op.type == "Placeholder" else None


def _passed(argument: tf.Tensor, graph: tf.Graph) -> tf.Tensor | None:
    """What a nested function is called with for an argument; None if a loop changes it, or if no call is found."""
    for op in filter(subgraphs.runs_functions, subgraphs.everywhere(graph)):
        inner = subgraphs.functions_of(op)
        if len(inner) == 1 and inner[0] is argument.graph:
            return op.inputs[next(index for index, each in enumerate(inner[0].inputs) if each is argument)]
    return None
