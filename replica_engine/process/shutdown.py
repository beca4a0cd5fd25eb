"""The exit of the process while daemon threads are in the middle of a run.

When the interpreter exits, it ends each daemon thread that returns to Python by unwinding the thread's stack. Frames of
TensorFlow or jaxlib on that stack cannot be unwound, and the process is aborted. Threads that are not daemons have
ended by then. So this module must ensure that no daemon thread, and no thread that works for one, is inside a run at
that moment: once the exit has begun, only the main thread may start a run, and runs that have already started get 5
seconds to end.

Between two runs a thread calls TensorFlow itself, and is aborted there just the same. A thread that left a run a moment
ago is likely on its way to the next one, which it may not start; so the exit waits for it too, half a second.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

PATIENCE = 5.0  # seconds that the exit waits for runs that have started
_ON_THE_WAY = 0.5  # seconds after its last run in which a thread is taken to be on its way to the next one
_LOOKS = 0.05  # seconds

_changed = threading.Condition()
_depths: dict[int, int] = {}  # by thread ident: how many runs it is inside of; a thread changes only its own entry
_left: dict[int, float] = {}  # by thread ident: when it left its last run
_blocked: set[int] = set()  # the threads that came to a run after the exit had begun
_closed = False


class running:
    """A context manager around a run on the calling thread; it may be nested.

    Once the exit has begun, entering it on a thread other than the main thread blocks until the process ends.
    """

    def __enter__(self) -> None:
        thread = threading.get_ident()
        depth = _depths.get(thread, 0)
        _depths[thread] = depth + 1  # before `_closed` is read: `_close` sets it first, and then reads the entries
        if _closed and not depth and threading.current_thread() is not threading.main_thread():
            del _depths[thread]
            _blocked.add(thread)
            _tell()
            threading.Event().wait()  # blocks until the process ends, which is soon

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        depth = _depths[thread] - 1
        if depth:
            _depths[thread] = depth
            return
        _left[thread] = time.monotonic()
        del _depths[thread]
        if _closed:
            _tell()


def _tell() -> None:
    with _changed:
        _changed.notify_all()


def _after_fork() -> None:
    """A forked child has only the forking thread, so the runs of other threads do not exist there."""
    global _changed
    _changed = threading.Condition()
    own = threading.get_ident()
    for known in (_depths, _left):
        for thread in [each for each in known if each != own]:
            del known[thread]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close() -> None:
    global _closed
    with _changed:
        _closed = True
        ends = time.monotonic() + PATIENCE
        while _something_runs() and time.monotonic() < ends:
            _changed.wait(_LOOKS)


def _something_runs() -> bool:
    """Whether another thread is inside a run or on its way to one.

    Only threads that live count: an entry may be left of a run that an exception from outside has ended.
    """
    # Not `threading.enumerate`, which lacks threads that C++ has made and that run Python.
    others = sys._current_frames().keys() - {threading.get_ident()} - _blocked
    recently = time.monotonic() - _ON_THE_WAY
    return any(each in _depths or _left.get(each, 0.0) > recently for each in others)
