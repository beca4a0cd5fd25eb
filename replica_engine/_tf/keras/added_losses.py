"""The losses that layers add (`add_loss`, `activity_regularizer`), for replicas that share the layers.

A layer keeps what it added in a list, which the next call of the model empties. Replicas on threads call one model. If
they meet between a call and the sum of its losses (a synchronized batch normalization, a masked loss), the list is that
of the replica which called last. So each thread has a list of its own. Checked on Keras 3.15.1.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

MODULE, LAYER, LOSSES = "keras.src.layers.layer", "Layer", "_losses"
"""The module and the class of layers, and the attribute with the losses that a layer has added."""


class _OfThreads:
    """Stands for the attribute: for each replica its own list, and otherwise the list of the layer.

    Args:
        in_replica: whether the calling thread runs a replica.
    """

    def __init__(self, in_replica: Callable[[], bool]):
        self._in_replica = in_replica
        self._of_thread = threading.local()

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is None:
            return self
        if self._in_replica():
            if not hasattr(self._of_thread, "lists"):
                self._of_thread.lists = weakref.WeakKeyDictionary()
            return self._of_thread.lists.setdefault(layer, [])
        try:
            return vars(layer)[LOSSES]
        except KeyError:
            raise AttributeError(LOSSES) from None

    def __set__(self, layer: Any, value: Any) -> None:
        vars(layer)[LOSSES] = value


def for_each_replica(in_replica: Callable[[], bool]) -> None:
    """Gives each replica on a thread its own list, once Keras is imported; only once per process."""
    layer = getattr(sys.modules.get(MODULE), LAYER, None)
    if layer is not None and not hasattr(layer, LOSSES):
        setattr(layer, LOSSES, _OfThreads(in_replica))
