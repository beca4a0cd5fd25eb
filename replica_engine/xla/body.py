"""The replica body while it is traced: how many replicas there are, and which of them is running.

A body is traced once and stands for all replicas at once, so a replica's id is a tensor in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from replica_engine._compat import xla_ops
from replica_engine.errors import NotInBodyError
from replica_engine.xla.random_numbers import RandomState

_thread = threading.local()


def replica_id() -> tf.Tensor:
    """The id of the replica that runs this, from 0: a scalar int32 tensor, another on each replica.

    Raises:
        NotInBodyError: called outside a replicated body.

    Example:
        >>> from replica_engine import xla
        >>> [int(result) for result in xla.replicate(xla.replica_id, num_replicas=2)]
        [0, 1]
    """
    if current("replica_id").size == 1:
        return tf.constant(0)  # known while tracing
    return xla_ops.replica_id()


def num_replicas() -> int:
    """How many replicas run the body that is being traced.

    Raises:
        NotInBodyError: called outside a replicated body.

    Example:
        >>> from replica_engine import xla
        >>> xla.replicate(lambda: xla.num_replicas(), num_replicas=2)
        [2, 2]
    """
    return current("num_replicas").size


class Body:
    """A replicated body that is being traced on this thread.

    Args:
        size: the number of replicas.
        random: what its random ops draw from.
    """

    def __init__(self, size: int, random: RandomState):
        self.size = size
        self._random = random

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Ops made inside belong to the body."""
        before, _thread.body = in_body(), self
        try:
            with xla_ops.xla_context(), self._random.replacing():
                yield
        finally:
            _thread.body = before


def in_body() -> Body | None:
    """The body that this thread is tracing, if it is."""
    return getattr(_thread, "body", None)


def current(name: str) -> Body:
    """The body that this thread is tracing; `name` is the public function that needs one."""
    body = in_body()
    if body is None or tf.executing_eagerly():
        raise NotInBodyError(name)
    return body
