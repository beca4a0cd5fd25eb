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
import tensorflow as tf

from replica_engine._tf.graphs import random_ops
from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import state as keras_state

_DEPTH = 4  # the depth of nested containers


class Attributes:
    """The attributes of some objects, and the contents of the lists, dictionaries and sets among them.

    Args:
        objects: the objects.
    """

    def __init__(self, objects: Iterable[Any]):
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        for each in objects:
            self._note_attributes(each, _DEPTH)

    def restore(self) -> None:
        """Restores the attributes and contents."""
        for each, attributes in self._objects.values():
            vars(each).clear()
            vars(each).update(attributes)
        for container, content in self._containers.values():
            _fill(container, content)

    def _note_attributes(self, each: Any, depth: int) -> None:
        if id(each) not in self._objects:
            self._objects[id(each)] = each, dict(vars(each))
            for value in self._objects[id(each)][1].values():
                self._note(value, depth)

    def _note(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._containers:
            return
        if keras_model.keeps_track(value):
            self._note_attributes(value, depth - 1)
        elif kind := next((kind for kind in (list, dict, set) if issubclass(type(value), kind)), None):
            # Calls the methods of list, dict and set themselves: Keras' subclasses would track what is added.
            content: Any = kind.copy(value)
            self._containers[id(value)] = value, content
            for inner in content.values() if kind is dict else content:
                self._note(inner, depth - 1)
        elif issubclass(type(value), tuple):
            for inner in value:
                self._note(inner, depth - 1)


class Values:
    """The values of some variables.

    Args:
        variables: TensorFlow variables.
    """

    def __init__(self, variables: Iterable[Any]):
        self._values = [(variable, variable.numpy()) for variable in variables]

    def restore(self) -> None:
        """Restores the values that have changed."""
        for variable, value in self._values:
            if variable.numpy().tobytes() != value.tobytes():
                variable.assign(value)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Starts all random numbers from a seed inside the block; on leaving, restores the old state of the generators."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with random_ops.seeded(seed), keras_state.seeded(seed):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def bare_variables(objects: Iterable[Any]) -> list[tf.Variable]:
    """The TensorFlow variables among the attributes of objects, also in lists and dictionaries."""
    found: dict[int, tf.Variable] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, tf.Variable):
            found[id(value)] = value
        elif isinstance(value, (list, tuple, dict)) and depth:
            for inner in value.values() if isinstance(value, dict) else value:
                look(inner, depth - 1)

    for each in objects:
        for value in vars(each).values():
            look(value, _DEPTH)
    return list(found.values())


def _fill(container: Any, content: Any) -> None:
    if isinstance(content, list):
        if len(container) != len(content) or any(
            a is not b for a, b in zip(list.copy(container), content, strict=True)
        ):
            list.__setitem__(container, slice(None), content)
    elif isinstance(content, dict):
        now = dict.copy(container)
        if list(now) != list(content) or any(now[key] is not value for key, value in content.items()):
            dict.clear(container)
            dict.update(container, content)
    elif set.copy(container) != content:
        set.clear(container)
        set.update(container, content)
