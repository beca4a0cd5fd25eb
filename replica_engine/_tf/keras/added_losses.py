"""The losses that layers add (`add_loss`, `activity_regularizer`), for replicas that share the layers.

A layer keeps what it added in a list, which the next call of the model empties. Replicas on threads call one model. If
they meet between a call and the sum of its losses (a synchronized batch normalization, a masked loss), the list is that
of the replica which called last. So replica 0 has the layer's list, and each other one a list of its thread. After a
run, `model.losses` are those of replica 0. Checked on Keras 3.15.1.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

from replica_engine._tf.hook import FIRST_SCOPE, Hook

LOSSES = Hook(
    "keras.src.layers.layer.Layer",
    "_losses",
    why="each replica on a thread has its own list of the losses that layers add",
    since=FIRST_SCOPE,
    until="outside replicas, the list of the layer, as before",
)
"""The attribute of a layer with the losses that it has added."""


class _OfThreads:
    """Stands for the attribute.

    Args:
        shares: whether the calling thread runs a replica that must not touch the list of the layer.
    """

    def __init__(self, shares: Callable[[], bool]):
        self._shares = shares
        self._of_thread = threading.local()

    def __get__(self, layer: object | None, owner: type) -> object:
        if layer is None:
            return self
        if self._shares():
            # By identity, since a layer may define equality. An id is free again when its layer is gone.
            lists: dict[int, tuple[weakref.ref[object], list[object]]] = vars(self._of_thread).setdefault("lists", {})
            known = lists.get(id(layer))
            if known is None or known[0]() is not layer:
                known = lists[id(layer)] = weakref.ref(layer, functools.partial(_forget, lists, id(layer))), []
            return known[1]
        try:
            return vars(layer)[LOSSES.name]
        except KeyError:
            raise AttributeError(LOSSES.name) from None

    def __set__(self, layer: object, value: object) -> None:
        vars(layer)[LOSSES.name] = value

    def __delete__(self, layer: object) -> None:
        del vars(layer)[LOSSES.name]


def _forget(lists: dict[int, tuple[weakref.ref[object], list[object]]], number: int, _: object) -> None:
    lists.pop(number, None)


def for_each_replica(shares: Callable[[], bool]) -> None:
    """Gives each replica on a thread its own list, once Keras is imported; only once per process.

    Args:
        shares: whether the calling thread runs a replica other than the first.
    """
    LOSSES.put(lambda there: there or _OfThreads(shares))
