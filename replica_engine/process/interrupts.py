"""Exceptions that come from outside: of signals, and of other threads.

- `afterwards`: what is done after a `with` block, whose own exception stays the one that is raised.
- `set_for_block`, `variable_for_block`: a value for the time of a `with` block, however the block ends.
- `wait_for_ever`, `wait_within`: waits that Ctrl-C ends at any moment.
- `raise_in`, `break_off`: raise an exception in another thread.
- `held_off`: delays signals and `break_off` while a block of code runs.
- `heard_at_once`: hears of Ctrl-C while the main thread is inside C++ code that does not return to Python.
"""

from __future__ import annotations

import _signal  # `signal` wraps it, and takes 5 us to turn each number into an enum
import contextlib
import contextvars
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

from replica_engine.errors.base import add_note, in_words
from replica_engine.watch.watchdog import in_users_code


class afterwards:
    """Calls a function when the block ends, however it ends.

    If the block raises an exception and the function another one, the block's is raised: it is the cause, and the
    user's. The other one becomes a note of it. An interrupt in the function, such as Ctrl-C, is raised in any case.

    Not a generator: an interrupt then has no line more to come at than in a `finally`.

    Args:
        do: the function.
        what: what it does, in words: "giving the model back".
    """

    def __init__(self, do: Callable[[], object], what: str):
        self._do = do
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> None:
        if error is None:
            self._do()
            return
        try:
            self._do()
        except Exception as other:  # whatever the function raises: the block's exception must not be lost to it
            add_note(error, f"also failed, while {self._what}: {in_words(other)}")


T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object]

_PATIENCE = 0.1  # seconds that a thread has to return to the user's code
_STEP = 0.001  # seconds between two checks
_SIGINT = int(signal.SIGINT)
_SIGNALS = sorted(map(int, signal.valid_signals()))
MISSED = 0.1  # seconds after which a waiting thread lets Python check for a missed signal


# A value for the time of a `with` block; the one before it comes back however the block ends.
#
# These are generators, although classes were faster: an exception of a signal may come before the first line of
# `__exit__`, and then Python still ends the generator, which restores the value.


@contextlib.contextmanager
def set_for_block(owner: object, name: str, value: T) -> Iterator[T]:
    """Inside, an attribute has a value, which the block gets; afterwards the one before, or None if there was none.

    Args:
        owner: the object, such as a `threading.local`.
        name: the attribute.
        value: its value.
    """
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield value
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def variable_for_block(which: contextvars.ContextVar[Any], value: T) -> Iterator[T]:
    """Inside, a context variable has a value, which the block gets."""
    token = which.set(value)
    try:
        yield value
    finally:
        which.reset(token)


def reach_this_thread() -> bool:
    """Whether an interrupt can end what the calling thread does: only on the main thread, if SIGINT has a handler.

    A shell without job control ignores SIGINT in what it starts in the background.
    """
    return threading.current_thread() is threading.main_thread() and callable(_signal.getsignal(_SIGINT))


def wait_for_ever(wait: Callable[[float], bool]) -> None:
    """Waits without a limit, and lets Ctrl-C end the wait at any moment.

    Python's locks can also wait without a limit, and a signal wakes the main thread from such a wait. But a signal
    that arrives between Python's last check for signals and the moment when the thread sleeps does not wake it, and
    would stay pending as long as the wait lasts. So the wait is cut into pieces, and Python checks for signals between
    them.

    Args:
        wait: a function that waits for at most the given number of seconds, and returns whether the wait is over.
    """
    while not wait(MISSED):
        pass


def wait_within(limit: float | None, wait: Callable[[float], bool]) -> bool:
    """Like `wait_for_ever`, for at most `limit` seconds; None for no limit. Returns whether the wait is over."""
    began = time.monotonic()
    while not wait(MISSED):
        if limit is not None and time.monotonic() - began > limit:
            return False
    return True


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raises an exception in a thread at its next Python instruction.

    The exception reaches a loop in Python. A thread that is inside C++, or asleep, gets it only when it returns to
    Python. CPython offers this function in its C API only, so it is called through ctypes.

    The exception may arrive at any instruction. TensorFlow's C++ code that calls Python does not survive such an
    exception, so this function requests it only while the thread is in the user's code. If the thread is not in the
    user's code within 0.1 seconds, nothing is raised.

    Nor is it under a debugger or coverage on Python 3.11. While an exception waits for a thread that sleeps, no traced
    thread gets beyond the first instruction of a function there.

    Args:
        thread: the ident of the thread.
        kind: the class of the exception, which is made without arguments.
    """
    if sys.version_info[:2] == (3, 11) and (sys.gettrace() or threading.gettrace()):
        return
    until = time.monotonic() + _PATIENCE
    while not in_users_code(thread):
        if time.monotonic() > until:
            return
        time.sleep(_STEP)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def take_back(thread: int) -> None:
    """Cancels the exception that `raise_in` requested, if it has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def break_off(thread: int, kind: type[BaseException], at_once: bool = False) -> type[BaseException]:
    """Raises an exception in a thread; in the main thread, also out of a sleep or a wait for a lock.

    Only a signal wakes a thread from a sleep or a wait, and only the main thread receives signals. So in the main
    thread the exception is KeyboardInterrupt, as on Ctrl-C. If the program has its own handler for SIGINT, this
    function sends no signal, and uses `raise_in`.

    Args:
        thread: the ident of the thread.
        kind: the class of the exception.
        at_once: whether to break off code inside `held_off` as well.

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


_last: tuple[list[object], list[tuple[int, Handler]]] = ([], [])  # all handlers, and those that are functions in Python


def _handlers() -> list[tuple[int, Handler]]:
    """The signals with handlers in Python, and these. It is on the way of each launch: asking for all takes 1 us."""
    global _last
    handlers = list(map(_signal.getsignal, _SIGNALS))
    if handlers != _last[0]:
        _last = handlers, [pair for pair in zip(_SIGNALS, handlers, strict=True) if callable(pair[1])]
    return _last[1]


def around(block: contextlib.AbstractContextManager[object], call: Callable[[], T]) -> T:
    """Calls a function inside a block, and leaves it in any case; its `__exit__` may be called twice.

    An exception of another thread may come before the first line of `__exit__`, and a `with` statement would not leave
    the block then.
    """
    try:
        block.__enter__()
        result = call()
        block.__exit__(None, None, None)
        return result
    except BaseException as error:  # also one that came before the first line of `__exit__` above
        block.__exit__(type(error), error, error.__traceback__)
        raise


_held: dict[int, held_off] = {}  # the innermost one of each thread, by thread ident


class held_off:
    """Delays handlers of signals and `break_off` until the end of the block, for code that runs whole or not at all.

    Any handler of the program may raise: that of Ctrl-C, of the SIGTERM that ends a preempted job, of an alarm. So the
    handlers of all signals are called when the block has ended, in the order in which the signals came.

    An exception of another thread (`PyThreadState_SetAsyncExc`) is not delayed, and may come before the first line of
    `__exit__`. So code calls `around` instead of a `with` statement, or calls `__exit__` a second time as that does.

    Args:
        passes: called when a signal arrives inside the block; returns whether to handle it at once nevertheless.
    """

    def __init__(self, passes: Callable[[], bool]):
        self._passes = passes
        self._outer: held_off | None = None
        self._handlers: dict[int, Handler] = {}  # the program's, by signal, once this object has taken their place
        self._came: list[tuple[int, FrameType | None]] = []  # the signals that arrived inside the block
        self.later: type[BaseException] | None = None

    def around(self, call: Callable[[], T]) -> T:
        """Calls a function inside the block."""
        return around(self, call)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._outer = _held.get(thread)
        try:  # a signal may arrive at each of these lines, and `__exit__` is not called after it
            _held[thread] = self
            if threading.current_thread() is threading.main_thread():
                for number, handler in _handlers():
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:
            self._let_through(thread)
            raise

    def __exit__(self, *_: object) -> None:
        """Restores the handlers, calls those of the signals that arrived during the block, and raises `later`."""
        self._let_through(threading.get_ident())
        self._handle()
        later, self.later = self.later, None
        if later is not None:
            raise later

    def _handle(self) -> None:
        if self._came:
            number, frame = self._came.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._handle()

    def _let_through(self, thread: int) -> None:
        """Undoes what `__enter__` did, if it did anything and if nothing has undone it.

        The handlers come last: from then on a signal may end this function.
        """
        if _held.get(thread) is self:
            if self._outer is None:
                del _held[thread]
            else:
                _held[thread] = self._outer
        for number, handler in reversed(self._handlers.items()):
            if _signal.getsignal(number) == self._note:  # a host call in the block may have set another one
                _signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._passes():
            self._handlers[number](number, frame)
        else:
            self._came.append((number, frame))


class held_off_once(held_off):
    """Like `held_off`, for code that may take long: a second signal is handled at once."""

    def __init__(self) -> None:
        super().__init__(lambda: bool(self._came))


class _Ear:
    """The descriptor of `heard_at_once`, and the thread that reads it."""

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
                # The program may have closed it: its loop has ended, and the signal still counts here.
                with contextlib.suppress(OSError):
                    os.write(self.theirs, numbers)
            told = self.told
            if _SIGINT in numbers and told is not None:
                told()


_ear: _Ear | None = None


class heard_at_once:
    """A context manager: a Ctrl-C inside calls a function, on another thread. It does nothing but on the main thread.

    The function is called at once, also while the main thread is inside C++ code that does not return to Python.
    Python's handler of a signal runs on the main thread, between two instructions of Python. But in the instant of the
    signal Python writes a byte to a file descriptor, if one is set (`signal.set_wakeup_fd`), and another thread can
    read it. asyncio and notebooks use the same descriptor: theirs gets its byte too, and is set again afterwards.

    Only Python's own handler, which raises KeyboardInterrupt, counts as Ctrl-C. A program with a handler of its own may
    want to save and go on.

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
