"""Starting threads.

`start` starts a thread while another thread may raise an exception in the calling one (`PyThreadState_SetAsyncExc`).
Until a new thread runs, CPython before 3.12 knows it by the ident of the thread that makes it. An exception that is
meant for the maker can then end the new thread before its first line, and `Thread.start` waits for ever. So one thread,
whose ident nobody uses, makes the others.
"""

from __future__ import annotations

import _thread
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from replica_engine.process.interrupts import MISSED

T = TypeVar("T")


NAME = "replica_engine: maker of threads"
"""The name of the thread that makes the others."""

_HAS_OWN_IDENT = sys.version_info >= (3, 12)


class _ThreadToStart:
    """A thread to start."""

    def __init__(self, thread: threading.Thread):
        self.thread = thread
        self.failures: list[BaseException] = []
        self.is_wanted = True  # false once the thread that asks for it waits no more
        self.done = _thread.allocate_lock()
        self.done.acquire()


class _Maker:
    """The thread that makes threads; it starts with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_ThreadToStart] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, job: _ThreadToStart) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name=NAME, daemon=True)
                thread.start()
                self._thread = thread
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._make(self._jobs.get())

    # A function of its own: its frame goes, while that of `_run` would hold the last thread until the next one comes.
    @staticmethod
    def _make(job: _ThreadToStart) -> None:
        try:
            if job.is_wanted:
                job.thread.start()
        except BaseException as error:  # for the thread that asked: an exception here would end the maker
            job.failures.append(error)
        job.done.release()


_maker = _Maker()


class LeftCall(threading.Thread, Generic[T]):
    """A thread that makes one call, while the thread that needs its result waits and can leave it at any point.

    Args:
        call: the call.
        name: what it is, for the name of the thread.
        ended: is called at its end.
    """

    def __init__(self, call: Callable[[], T], name: str, ended: Callable[[], None]):
        # Passed as arguments, since `Thread` drops its arguments when the call ends, even if somebody keeps the thread.
        super().__init__(target=self._make, args=(call, ended), name=f"replica_engine: {name}", daemon=True)
        self._results: list[T] = []
        self._failures: list[BaseException] = []
        self._is_left = False

    def _make(self, call: Callable[[], T], ended: Callable[[], None]) -> None:
        try:
            self._results.append(call())
        except BaseException as error:  # for the thread that asks for the result
            self._failures.append(error)
        finally:
            if self._is_left:
                self.leave()
            ended()

    def leave(self) -> None:
        """Lets go of what the call returns or raises, now and later: nobody asks for it, and it may hold arrays."""
        self._is_left = True
        self._results.clear()
        self._failures.clear()

    @property
    def has_result(self) -> bool:
        """Whether the call has returned or raised."""
        return bool(self._results or self._failures)

    def is_ready(self) -> bool:
        """Whether the thread has ended."""
        return not self.is_alive()

    def result(self) -> T:
        """What the call returned, for one that asks once; raises what the call raised."""
        if self._failures:
            raise self._failures.pop()
        return self._results.pop()


def start(thread: threading.Thread) -> None:
    """Does what `thread.start()` does."""
    if _HAS_OWN_IDENT:
        thread.start()
        return
    job = _ThreadToStart(thread)
    try:
        _maker.put(job)
        while not job.done.acquire(timeout=MISSED):  # see `wait_for_ever`
            pass
    finally:
        job.is_wanted = False  # it has been started, or this thread was interrupted and nobody asks for it any more
    if job.failures:
        raise job.failures.pop()


def _after_fork() -> None:
    """A forked child does not have the thread."""
    global _maker
    _maker = _Maker()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
