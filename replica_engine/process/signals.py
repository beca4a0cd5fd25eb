"""Hearing of Ctrl-C at once, while the main thread is inside C++ code that does not return to Python.

Python's handler of a signal runs on the main thread, between two instructions of Python. But in the instant of the
signal Python writes a byte to a file descriptor, if one is set (`signal.set_wakeup_fd`), and another thread can read
it. asyncio and notebooks use the same descriptor: theirs gets its byte too, and is set again afterwards.

Only Python's own handler, which raises KeyboardInterrupt, counts as Ctrl-C. A program with a handler of its own may
want to save and go on.
"""

from __future__ import annotations

import _signal  # `signal` wraps it, and takes 5 us to turn each number into an enum
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

_SIGINT = int(signal.SIGINT)


class _Ear:
    """The descriptor, and the thread that reads it."""

    def __init__(self) -> None:
        self.ours, self._read = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs = -1  # the descriptor of the program, while ours is in its place
        self.told: Callable[[], None] | None = None
        threading.Thread(target=self._run, name="replica_engine: signals", daemon=True).start()

    def _run(self) -> None:
        while True:
            numbers = self._read.recv(16)
            if not numbers:
                return
            if self.theirs >= 0:
                with contextlib.suppress(OSError):
                    os.write(self.theirs, numbers)
            told = self.told
            if _SIGINT in numbers and told is not None:
                told()


_ear: _Ear | None = None


class heard_at_once:
    """A context manager: a Ctrl-C inside calls a function, on another thread. It does nothing but on the main thread.

    Args:
        told: the function. Python raises KeyboardInterrupt on the main thread as always, once that is back in Python.
    """

    __slots__ = ("_is_set", "_outer", "_told")

    def __init__(self, told: Callable[[], None]):
        self._told = told
        self._is_set = False
        self._outer: Callable[[], None] | None = None

    def __enter__(self) -> None:
        global _ear
        if threading.current_thread() is not threading.main_thread():
            return
        if _signal.getsignal(_SIGINT) is not signal.default_int_handler:
            return
        if _ear is None:
            _ear = _Ear()
        self._outer, _ear.told = _ear.told, self._told
        before = signal.set_wakeup_fd(_ear.ours.fileno(), warn_on_full_buffer=False)
        if before != _ear.ours.fileno():
            _ear.theirs = before
            self._is_set = True

    def __exit__(self, *_: object) -> None:
        if _ear is None or _ear.told is not self._told:
            return
        _ear.told = self._outer
        if self._is_set:
            signal.set_wakeup_fd(_ear.theirs, warn_on_full_buffer=False)
            _ear.theirs = -1


def _after_fork() -> None:
    """A forked child does not have the thread."""
    global _ear
    _ear = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
