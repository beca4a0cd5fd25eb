"""Interrupts: raising an exception in another thread, and keeping state whole where an exception may come at any time.

A handler of a signal may raise, and one thread may raise an exception in another one. Python looks for both where a
function in Python begins, after a call of a function in C, and where a loop jumps back. There are three ways to make
several steps one:

- Make them in one instruction, in which no Python runs, and note beforehand what follows, so that the next use can
  complete it. A launch does so (`pjrt.group.ProgramOrder`), because it is quick.
- Repair what was left half done (`strategies.updates`).
- Do them on a thread that no exception reaches (`Undisturbed`), where a tenth of a millisecond does not matter.
"""

from __future__ import annotations

import _signal  # `signal` wraps it, and takes 5 us to turn each number into an enum
import _thread
import contextvars
import ctypes
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable
from itertools import compress
from types import FrameType, TracebackType
from typing import Any, TypeVar

from replica_engine.telemetry.stacks import in_users_code

T = TypeVar("T")

_PATIENCE = 0.1  # seconds that a thread has to return to the user's code
_STEP = 0.001  # seconds between two checks
_SIGINT = int(signal.SIGINT)
_SIGNALS = sorted(map(int, signal.valid_signals()))
MISSED = 0.1  # seconds after which a waiting thread lets Python check for a missed signal


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


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raises an exception in a thread at its next Python instruction.

    The exception reaches a loop in Python. A thread that is inside C++, or asleep, gets it only when it returns to
    Python. CPython offers this function in its C API only, so it is called through ctypes.

    The exception may arrive at any instruction. TensorFlow's C++ code that calls Python does not survive such an
    exception, so this function requests it only while the thread is in the user's code. If the thread is not in the
    user's code within 0.1 seconds, nothing is raised.

    Args:
        thread: the ident of the thread.
        kind: the class of the exception, which is made without arguments.
    """
    until = time.monotonic() + _PATIENCE
    while not in_users_code(thread):
        if time.monotonic() > until:
            return
        time.sleep(_STEP)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def take_back(thread: int) -> None:
    """Cancels the exception that `raise_in` requested, if it has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def break_off(thread: int, kind: type[BaseException]) -> type[BaseException]:
    """Raises an exception in a thread; in the main thread, also out of a sleep or a wait for a lock.

    Only a signal wakes a thread from a sleep or a wait, and only the main thread receives signals. So in the main
    thread the exception is KeyboardInterrupt, as on Ctrl-C. If the program has its own handler for SIGINT, this
    function sends no signal, and uses `raise_in`.

    Args:
        thread: the ident of the thread.
        kind: the class of the exception.

    Returns:
        The class of the exception that will be raised.
    """
    is_main = thread == threading.main_thread().ident
    if is_main and hasattr(signal, "pthread_kill") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_kill(thread, signal.SIGINT)
        return KeyboardInterrupt
    raise_in(thread, kind)
    return kind


class held_off:
    """Delays the Python handlers of all signals until the end of the block, in the order in which the signals came.

    For short code that other workers or threads rely on. A second signal of the same number is handled at once, so a
    block that does not end can be interrupted.

    Args:
        passes: called when a signal arrives inside the block; returns whether to handle it at once nevertheless.
    """

    def __init__(self, passes: Callable[[], bool]):
        self._passes = passes
        self._handlers: dict[int, Any] = {}  # the program's, whose place this object has taken
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:  # a signal may arrive at each of these lines, and `__exit__` is not called after it
            for number in compress(_SIGNALS, map(callable, map(_signal.getsignal, _SIGNALS))):
                self._handlers[number] = _signal.getsignal(number)
                _signal.signal(number, self._note)
        except BaseException:
            self._let_through()
            raise

    def __exit__(self, kind: Any, error: BaseException | None, frames: TracebackType | None) -> None:
        """Restores the handlers, and calls those of the signals that arrived during the block."""
        self._let_through()
        self._handle()

    def _let_through(self) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._note:  # the block may have set another one
                _signal.signal(number, handler)

    def _handle(self) -> None:
        if self._came:
            number, frame = self._came.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._handle()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._passes() or any(number == other for other, _ in self._came):
            self._handlers[number](number, frame)
        else:
            self._came.append((number, frame))


class Undisturbed:
    """A thread for work that must be done to its end, once it has begun.

    Python runs signal handlers on the main thread only, and nobody raises an exception in a thread that he does not
    know. So no exception comes from outside while this thread works. The calling thread waits, and may be interrupted.

    Attributes:
        jobs: the functions that the thread calls, one after the other.
    """

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._outcome = _Outcome()
        # Not `threading.Thread`, whose `start` leaves a thread that cannot run if an exception comes in the middle.
        # It ends with this object: not by a `__del__`, in which Python would swallow an exception of a signal handler.
        gone = weakref.ref(self, self.jobs.put)
        _thread.start_new_thread(_work, (self.jobs, self._outcome, contextvars.copy_context(), gone))

    def wait(self) -> None:
        """Waits until the thread has nothing to do. Raises what a job has raised."""
        has_ended = threading.Event()
        self.jobs.put(has_ended.set)
        wait_for_ever(has_ended.wait)
        if (error := self._outcome.error) is not None:
            self._outcome.error = None
            raise error

    def do(self, job: Callable[[], Any]) -> None:
        """Gives the thread a job and waits for its end. Raises what the job raised.

        An exception that arrives meanwhile is raised at the end of the job, a second one at once.
        """
        try:
            self.jobs.put(job)
            self.wait()
        except BaseException:
            self.wait()
            raise


def around(before: Callable[[], None], call: Callable[[], T], after: Callable[[], None]) -> T:
    """Calls three functions, one after the other, and returns what the second returns.

    The first and the third change state: they are called on an `Undisturbed` thread. If the first one has ended well,
    the third is called, whatever `call`, signal handlers and other threads raise.
    """
    thread = Undisturbed()
    has_begun: list[None] = []

    def begin() -> None:
        before()
        has_begun.append(None)

    def end() -> None:
        if has_begun:
            after()

    jobs = thread.jobs
    try:
        thread.do(begin)
        return call()
    finally:
        # A signal handler may raise at the first instruction of any function in Python. `put` is a function in C.
        try:
            jobs.put(end)
        finally:
            try:
                thread.wait()
            finally:
                thread.wait()  # if an exception has ended the first wait


class _Outcome:
    error: BaseException | None = None  # the first that a job has raised


def _work(jobs: queue.SimpleQueue, outcome: _Outcome, context: contextvars.Context, gone: weakref.ref) -> None:
    while (job := jobs.get()) is not gone:
        try:
            context.run(job)
        except BaseException as error:
            outcome.error = outcome.error or error
        del job  # not kept while the thread waits for the next one
