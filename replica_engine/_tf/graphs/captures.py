"""What a traced `tf.function` has captured, and where this library looks on when one is called.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

# ConcreteFunction: one trace of a `tf.function`. Its method `_call_flat` makes all calls, with or without a tape.
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction as _ConcreteFunction

from replica_engine._tf import variables

OWNER: Any = _ConcreteFunction
NAME = "_call_flat"
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
    known = getattr(graph, _WRITES, None)  # a graph that has been traced does not change
    if known is None:
        known = {}
        setattr(graph, _WRITES, known)
    if index not in known:
        known[index] = variables.may_write(graph.inputs[index], set())
    return known[index]
