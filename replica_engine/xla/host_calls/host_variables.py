"""Variables of a strategy that no device can have, such as those of strings, in one launch that writes them."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from replica_engine._tf import variables
from replica_engine.xla.state.device_value import home_of


class HostVariables:
    """Gives each replica a variable of its own, so that what the body changes is changed once, and not once a replica.

    Replica 0 has the variable itself, and the others have copies of its value from before the launch. They go with the
    launch: what all replicas do alike gives equal values, and otherwise the value of replica 0 stays. An on-read
    variable has a variable for each replica anyway.

    Args:
        size: the number of replicas of this process.
    """

    def __init__(self, size: int):
        self._size = size
        self._lock = threading.Lock()
        self._own: dict[int, tuple[list[tf.Tensor], list[Any]]] = {}  # by the id of a handle: handles, and copies

    def handle(self, handle: tf.Tensor, replica: int) -> tf.Tensor:
        """The handle of a replica's own variable. No op may use the variable in this launch before a call of this."""
        with self._lock:
            own = self._own.get(id(handle))
            if own is None:
                own = self._own[id(handle)] = self._made(handle)
            return own[0][replica]

    def clear(self) -> None:
        """Called when the launch is over."""
        self._own = {}

    def _made(self, handle: tf.Tensor) -> tuple[list[tf.Tensor], list[Any]]:
        home = home_of(handle)
        assert home is not None, "a variable of a strategy"
        if len(home.handles) == self._size:
            return home.handles, []
        copies = []
        with tf.device("CPU:0"):
            for _ in range(1, self._size):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=home.dtype)
                copies.append(variables.ResourceVariable(value, trainable=False))
        return [handle, *map(variables.raw_handle, copies)], copies
