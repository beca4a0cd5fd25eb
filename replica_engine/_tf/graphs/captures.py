"""What a traced `tf.function` has captured, and where this library looks on when one is called.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from replica_engine._tf import variables
from replica_engine._tf.graphs.kept import kept_on
from replica_engine._tf.hook import REPLICATED, Hook

CALL_FLAT = Hook(
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction",
    "_call_flat",  # makes all calls of one trace of a `tf.function`, with or without a tape
    why="a function that was traced before, called in a callback, has the weights of then",
    since=REPLICATED,
)
_WRITES = "_replica_engine_writes"


def marked(function: Any, mark: str) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """The captured handles of variables that have an attribute `mark`.

    Args:
        function: a concrete function.
        mark: the name of the attribute.

    Yields:
        The value of the attribute, and what tells whether the function may write to the variable.
    """
    captured = function._captured_inputs
    for index, handle in enumerate(captured):
        if (found := getattr(handle, mark, None)) is not None:
            yield found, functools.partial(_may_write, function.graph, index - len(captured))


def _may_write(graph: Any, index: int) -> bool:
    known: dict[int, bool] = kept_on(graph, _WRITES, dict)  # a graph that has been traced does not change
    if index not in known:
        known[index] = variables.may_write(graph.inputs[index], set())
    return known[index]
