"""Running a part of a function graph in eager mode. Checked on TensorFlow 2.21.0.

TensorFlow's lift_to_graph copies the ops that a tensor needs to another graph; it cannot take other values for tensors
in between. A function can: its inputs may be any tensors of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# context: the functions that TensorFlow knows by name; a graph's are registered there too.
from tensorflow.python.eager import context as _context

# from_func_graph: registers a part of a graph as a function under a name. call_flat: calls it.
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic_function

_numbers = itertools.count()


def captured(inside: tf.Tensor) -> Any | None:
    """What a placeholder of a function graph stands for outside of it; None if it is an argument of the function."""
    for outside, placeholder in getattr(inside.graph, "captures", ()):
        if placeholder is inside:
            return outside
    return None


def is_stateful(op: tf.Operation) -> bool:
    """Whether another run of the op may have other results, or an effect."""
    return bool(op._is_stateful)


def op_types_of_calls(op: tf.Operation) -> set[str]:
    """Types of the ops in the functions that an op calls: those of a loop, a branch, the call of a function."""
    found: set[str] = set()
    pending, seen = list(_called(op.node_def)), set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            for node in _context.context().get_function_def(name).node_def:
                found.add(node.op)
                pending += _called(node)
    return found


def run(
    graph: Any, operations: Iterable[tf.Operation], inputs: Sequence[tf.Tensor], values: Sequence[Any], outputs: Any
) -> list[tf.Tensor]:
    """Runs ops of a function graph in eager mode, on the host.

    Args:
        graph: their graph.
        operations: all that `outputs` need, but for those that make `inputs`.
        inputs: tensors of the graph that are given.
        values: eager values for them.
        outputs: tensors of the graph.

    Returns:
        The values of `outputs`.
    """
    part = _Part(graph, operations, inputs, outputs)
    with tf.init_scope(), tf.device("CPU:0"):
        function = _atomic_function.from_func_graph(f"replica_engine_part_{next(_numbers)}", part, {})
        return list(function.call_flat(*values))


class _Part:
    """What `from_func_graph` asks of a function graph, for some of its ops."""

    def __init__(self, graph: Any, operations: Iterable[tf.Operation], inputs: Sequence[Any], outputs: Sequence[Any]):
        self._graph = graph
        self._operations = list(operations)
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.control_outputs: list[tf.Operation] = []

    def get_operations(self) -> list[tf.Operation]:
        """The ops of the part."""
        return self._operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def _called(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name:
                yield function.name
