"""Refuses runs in a process that was forked from a process in which TensorFlow had started.

A fork copies the memory of a process, but only one of its threads. The child lacks the threads of TensorFlow's and
XLA's thread pools, and the replica threads. Code that waits for such a thread in the child waits for ever. So a run in
such a child raises ForkedError.
"""

from __future__ import annotations

import os

from replica_engine._tf import thread_state
from replica_engine.errors import ForkedError

_parent: int | None = None  # the parent's process id, in such a child; None in any other process


def check_not_forked() -> None:
    """Raises ForkedError in a child process that was forked after TensorFlow had started."""
    if _parent is not None:
        raise ForkedError(
            f"Process {os.getpid()} was forked from process {_parent}, in which TensorFlow had already started. A "
            "forked process has none of its parent's threads, so any code that waits for those threads, replicas "
            "included, would wait for ever. Start a new process instead, "
            "multiprocessing.get_context('spawn').Process(...), or fork before the first op of TensorFlow. The "
            "parent process is not affected."
        )


def _after_fork() -> None:
    global _parent
    if thread_state.started():
        _parent = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
