"""The exit of the process while daemon threads are in the middle of a run.

When the interpreter ends, it ends each thread that comes back to it, by unwinding the thread's stack; what of that is
in TensorFlow or jaxlib cannot be unwound, and the process is aborted. Threads that are no daemons end before. Of
daemons, and of the threads that work for them, it is for us to see that none is in there then. So at exit no run begins
but on the main thread, and those that are on their way get some seconds to end.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

PATIENCE = 5.0  # seconds

_changed = threading.Condition()
_running = 0
_closed = False
_thread = threading.local()


class running:
    """A run is on its way inside, on this thread; it may be nested."""

    def __enter__(self) -> None:
        global _running
        depth = getattr(_thread, "depth", 0)
        if not depth:
            with _changed:
                comes_late = _closed and threading.current_thread() is not threading.main_thread()
                _running += not comes_late
            if comes_late:
                threading.Event().wait()  # to the end of the process, which is near
        _thread.depth = depth + 1

    def __exit__(self, *_: Any) -> None:
        global _running
        _thread.depth -= 1
        if not _thread.depth:
            with _changed:
                _running -= 1
                if _closed:
                    _changed.notify_all()


def _after_fork() -> None:
    """A child has none of the other threads, and so none of their runs."""
    global _running, _changed
    _changed = threading.Condition()
    _running = 1 if getattr(_thread, "depth", 0) else 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close() -> None:
    global _closed
    with _changed:
        _closed = True
        _changed.wait_for(lambda: _running == 0, PATIENCE)
