"""Exceptions that come from outside: raising one in another thread, and holding off Ctrl-C for a moment."""

from __future__ import annotations

import _signal  # of which `signal` is the public face, that turns every number into an enum and takes 5 us for it
import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from replica_engine.telemetry.stacks import in_users_code

_PATIENCE = 0.1  # seconds for a thread to come back to the user's code
_STEP = 0.001  # seconds between looks
_SIGINT = int(signal.SIGINT)
MISSED = 0.1  # seconds until a waiting thread looks again whether there was a signal


def wait_for_ever(wait: Callable[[float], bool]) -> None:
    """Waits until something has come, and lets Ctrl-C in at any moment.

    Python's locks wait without a limit as well, and a signal wakes the main thread from that; but not one that comes
    between Python's last look for signals and the moment when the thread sleeps. That one would wait with it, for ever
    if need be. So the wait is cut into pieces, and Python looks between them.

    Args:
        wait: waits for as many seconds as it is given at most, and says whether it has come.
    """
    while not wait(MISSED):
        pass


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raises an exception in a thread at its next Python instruction.

    This reaches a loop in Python; a thread that is inside C++, or asleep, sees it only when it comes back. The
    interpreter offers this to C alone, hence ctypes. Nobody can tell at which instruction it arrives: it is asked for
    while the thread is in code of the user's: code of TensorFlow in C++ that calls Python does not survive it. A thread
    that is not for a while is left alone.

    Args:
        thread: its ident.
        kind: the class of the exception, which is made without arguments.
    """
    until = time.monotonic() + _PATIENCE
    while not in_users_code(thread):
        if time.monotonic() > until:
            return
        time.sleep(_STEP)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def take_back(thread: int) -> None:
    """Takes back what `raise_in` asked for, if it has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def break_off(thread: int, kind: type[BaseException], at_once: bool = False) -> type[BaseException]:
    """Raises an exception in a thread, out of a sleep or a wait for a lock too if it is the main thread.

    Only a signal wakes a thread from those, and only the main thread takes signals; so there the exception is
    KeyboardInterrupt, as on Ctrl-C. Where the program has a handler of its own for that, it is left alone.

    Args:
        thread: its ident.
        kind: the class of the exception.
        at_once: whether what is to be done as a whole (`held_off`) is broken off as well.

    Returns:
        The class of the exception that will be raised.
    """
    held = _held.get(thread)
    if held is not None and not at_once:
        held.later = kind
        return kind
    is_main = thread == threading.main_thread().ident
    if is_main and hasattr(signal, "pthread_kill") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_kill(thread, signal.SIGINT)
        return KeyboardInterrupt
    raise_in(thread, kind)
    return kind


_held: dict[int, held_off] = {}  # by thread, the innermost


class held_off:
    """Ctrl-C, and `break_off`, are raised at the end of what runs inside, if they come while that runs.

    For what must be done as a whole or not at all.

    Args:
        passes: asked when it comes; whether it is to be raised at once all the same.
    """

    def __init__(self, passes: Callable[[], bool]):
        self._passes = passes
        self.later: type[BaseException] | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._outer = _held.get(thread)
        _held[thread] = self
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):
                _signal.signal(_SIGINT, self._note)
                self._handler = handler

    def __exit__(self, kind: Any, error: BaseException | None, frames: TracebackType | None) -> None:
        """Lets it come again."""
        thread = threading.get_ident()
        if self._outer is None:
            _held.pop(thread, None)
        else:
            _held[thread] = self._outer
        if self._handler is not None:
            _signal.signal(_SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)
        if self.later is not None:
            raise self.later

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._passes():
            self._handler(number, frame)
        else:
            self._came = number, frame


class held_off_once(held_off):
    """The same, for what may take long: Ctrl-C that comes again is raised at once."""

    def __init__(self) -> None:
        super().__init__(lambda: self._came is not None)
