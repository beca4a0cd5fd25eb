"""The logs of a step that devices with a queue may still run: they are copied to the host when somebody reads them.

Keras makes floats of the logs of each batch before it calls callbacks, and takes what cannot be made one for something
else. Here a callback gets floats that are made when it looks, and a failure of the step comes out there. If no callback
looks, it comes out of `fit` at the end of the epoch, where Keras looks, if no later step has met it. An `evaluate` that
no `fit` calls has Keras' own list of callbacks, which looks at each batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine.upstream.distribute import LaterPerReplica
from replica_engine.upstream.keras import keras_training
from replica_engine.values.regroup import select


class LateLogs(dict[str, Any]):
    """Logs whose values come when somebody looks at one of them.

    Args:
        names: the names of the values.
        make: makes the values.
    """

    def __init__(self, names: Iterable[str], make: Callable[[], Mapping[str, Any]]):
        super().__init__(dict.fromkeys(names))
        self._make: Callable[[], Mapping[str, Any]] | None = make

    def read(self) -> None:
        """Waits for the values.

        Raises:
            ProgramError: the step has failed.
        """
        make = self._make
        if make is not None:
            super().update(make())
            self._make = None


def _reading(name: str) -> Callable[..., Any]:
    """The method of a dict with this name, which reads the values first."""
    own = getattr(dict, name)

    def method(logs: LateLogs, *args: Any, **kwargs: Any) -> Any:
        logs.read()
        return own(logs, *args, **kwargs)

    return method


# Those of `dict` that give values or change them. Python asks for `keys` and `__iter__` where it copies all.
for _name in (
    *("__getitem__", "__iter__", "__reversed__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__"),
    *("__setitem__", "__delitem__", "get", "items", "keys", "values", "copy", "pop", "popitem", "setdefault", "update"),
):
    setattr(LateLogs, _name, _reading(_name))


def late(logs: Any) -> Any:
    """The logs of replica 0, read later if all can be."""
    if type(logs) is dict and all(isinstance(value, LaterPerReplica) for value in logs.values()):
        return LateLogs(logs, lambda: select(0, logs))
    return select(0, logs)


def _plain(value: tf.Tensor) -> Any:
    """A value as Keras gives it to callbacks: as a float, if it is a number."""
    array = np.asarray(value)
    return float(array.reshape([])) if array.size == 1 and array.dtype.kind not in "OSU" else array


class _Callbacks(keras.callbacks.CallbackList):
    """The callbacks of a `fit`, also while it validates."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._on_end_of_batch("on_train_batch_end", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._on_end_of_batch("on_test_batch_end", batch, logs)

    def _on_end_of_batch(self, name: str, batch: int, logs: Any) -> None:
        if not isinstance(logs, LateLogs):
            getattr(super(), name)(batch, logs)
            return
        names = sorted(dict.__iter__(logs))
        floats = LateLogs(names, lambda: {name: _plain(logs[name]) for name in names})
        for callback in self.callbacks:
            getattr(callback, name)(batch, logs=floats)


def expect(model: keras.Model) -> None:
    """Has the callbacks of each `fit` of a model look at its logs late."""
    _models.add(model)
    keras_training.LOGS.around(_begin)


_models: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def _begin(
    own: Callable[..., object], callbacks: keras.callbacks.CallbackList, *args: object, **kwargs: object
) -> None:
    """Called in the place of the `on_train_begin` of a list of callbacks, which is `own`."""
    if type(callbacks) is keras.callbacks.CallbackList and callbacks.model in _models:
        callbacks.__class__ = _Callbacks
    own(callbacks, *args, **kwargs)
