"""The exit of the process while daemon threads are in the middle of a run.

When the interpreter exits, it ends each daemon thread that returns to Python by unwinding the thread's stack. Frames of
TensorFlow or jaxlib on that stack cannot be unwound, and the process is aborted. Threads that are not daemons have
ended by then. So this module must ensure that no daemon thread, and no thread that works for one, is inside a run at
that moment: once the exit has begun, only the main thread may start a run, and runs that have already started get 5
seconds to end.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

PATIENCE = 5.0  # seconds that the exit waits for runs that have started

_changed = threading.Condition()
_running = 0
_closed = False
_thread = threading.local()


class running:
    """A context manager around a run on the calling thread; it may be nested.

    Once the exit has begun, entering it on a thread other than the main thread blocks until the process ends.
    """

    def __enter__(self) -> None:
        global _running
        depth = getattr(_thread, "depth", 0)
        if not depth:
            with _changed:
                comes_late = _closed and threading.current_thread() is not threading.main_thread()
                _running += not comes_late
            if comes_late:
                threading.Event().wait()  # blocks until the process ends, which is soon
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
    """A forked child has only the forking thread, so the runs of other threads do not exist there."""
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
