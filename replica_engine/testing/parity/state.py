"""The state that a check changes and restores: values of variables, attributes of Keras objects, random numbers.

The check uses the model itself, because some models cannot be copied. Training changes a model in three ways. Variables
get other values. Optimizers, metrics and losses that are used for the first time make variables, and keep them in
attributes, lists and dictionaries. Keras keeps the functions that it traced. `Attributes` restores the last two: it
notes the attributes of each object and the contents of their containers. So an optimizer that was not built before is
not built after the check.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from replica_engine._tf.graphs import replaced_ops
from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import state as keras_state

_DEPTH = 5  # the depth of nested containers; the attributes of an object are the first


class Attributes:
    """The attributes of some objects, and the contents of the lists, dictionaries and sets among them.

    Args:
        objects: the objects.
    """

    def __init__(self, objects: Iterable[Any]):
        self._contents: dict[int, tuple[type[Any], Any, Any]] = {}  # by id: kind, container, content
        for each in objects:
            self._note(vars(each), _DEPTH)

    def restore(self) -> None:
        """Restores the attributes and contents."""
        for kind, container, content in self._contents.values():
            kind.clear(container)
            (kind.extend if kind is list else kind.update)(container, content)

    def _note(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._contents:
            return
        if keras_model.keeps_track(value):
            self._note(vars(value), depth)
        elif kind := next((kind for kind in (list, dict, set) if issubclass(type(value), kind)), None):
            # Calls the methods of list, dict and set themselves: Keras' subclasses would track what is added.
            content: Any = kind.copy(value)
            self._contents[id(value)] = kind, value, content
            for inner in content.values() if kind is dict else content:
                self._note(inner, depth - 1)
        elif issubclass(type(value), tuple):
            for inner in value:
                self._note(inner, depth - 1)


class Values:
    """The values of some variables.

    Args:
        variables: TensorFlow or Keras variables.
    """

    def __init__(self, variables: Iterable[Any]):
        self._values = [(variable, variable.numpy()) for variable in variables]

    def restore(self) -> None:
        """Restores the values that have changed."""
        for variable, value in self._values:
            put(variable, value)


def put(variable: Any, value: Any) -> None:
    """Assigns a value to a variable that has another one."""
    if variable.numpy().tobytes() != value.tobytes():
        variable.assign(value)


def named(variables: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Variables by name, from pairs of a name and a variable; equal names are numbered."""
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for name, variable in variables:
        counts[name] = counts.get(name, 0) + 1
        found[name if counts[name] == 1 else f"{name} ({counts[name]})"] = variable
    return found


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Starts all random numbers from a seed inside the block; on leaving, restores the old state of the generators."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with replaced_ops.seeded(seed), keras_state.seeded(seed):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
