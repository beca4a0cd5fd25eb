"""What a check changes and puts back: values of variables, attributes of Keras objects, random numbers.

A model is checked as it is: a copy cannot be made of every model. Training changes it in three ways. Variables get
other values. Optimizers, metrics and losses that are used for the first time make variables, and keep them in
attributes, lists and dictionaries. Keras keeps the functions that it traced. `Attributes` notes the last two: the
attributes of each object, and what is in the containers among them. Restored, an optimizer that was not built is not
built again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import keras_model, keras_state, random_ops

_DEPTH = 4  # of containers in containers


class Attributes:
    """The attributes of some objects, and what is in their lists, dictionaries and sets.

    Args:
        objects: the objects.
    """

    def __init__(self, objects: Iterable[Any]):
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        for each in objects:
            self._note_attributes(each, _DEPTH)

    def restore(self) -> None:
        """Puts back what was there."""
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
            # The methods of list, dict and set themselves: those of Keras' own kinds track what is added.
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
        """Puts back those that have changed."""
        for variable, value in self._values:
            if variable.numpy().tobytes() != value.tobytes():
                variable.assign(value)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, all random numbers begin at a seed; afterwards they go on as if nothing had drawn any."""
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
    """TensorFlow variables that are attributes of objects, in lists and dictionaries too."""
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
