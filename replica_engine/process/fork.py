"""A process that was forked from one in which TensorFlow had started.

A fork copies the memory of a process and one of its threads. TensorFlow's thread pools, XLA's, and the replica threads
are not in the child, and whoever waits for them there waits for ever. So a run in such a child is an error.
"""

from __future__ import annotations

import os

from replica_engine._tf import thread_state
from replica_engine.errors import ForkedError

_parent: int | None = None  # of which process this is such a child


def check_not_forked() -> None:
    """Raises ForkedError in a child in which nothing can run."""
    if _parent is not None:
        raise ForkedError.of_process(os.getpid(), _parent)


def _after_fork() -> None:
    global _parent
    if thread_state.started():
        _parent = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
