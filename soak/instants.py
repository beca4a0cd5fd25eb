"""Interrupts at every instant of a piece of code, one after the other: the opposite of random moments.

CPython looks for signals and for exceptions from other threads at few instructions only: where a Python function
begins, after a call of a C function, and where a loop jumps back. So an interrupt that is *requested* before each
instruction that may look arrives at each place where a real one can arrive, and at no other.
"""

from __future__ import annotations

import _thread
import ctypes
import dis
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

_LOOKING = ("CALL", "PRECALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "WITH_EXCEPT_START", "BEFORE_WITH", "SETUP_WITH")
_LOOKS = {code for name, code in dis.opmap.items() if name.startswith((*_LOOKING, "LOAD_ATTR"))}

Request = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function in C that requests an interrupt, and its arguments."""


def of_signal(number: int) -> Request:
    """Requests that the handler of a signal runs on the main thread, as if the signal had come."""
    return _thread.interrupt_main, (number,)


def of_exception(kind: type[BaseException]) -> Request:
    """Requests an exception on the calling thread, as another thread does."""
    return ctypes.pythonapi.PyThreadState_SetAsyncExc, (ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind))


def interrupted(
    block: Callable[[], None], request: Request, of: Callable[[CodeType], bool], first: int = 1, step: int = 1
) -> Iterator[tuple[int, BaseException | None]]:
    """Runs a block again and again, with an interrupt at the first instant, at the second, and so on.

    Args:
        block: the code; it runs once for each instant.
        request: makes the interrupt.
        of: whether an interrupt shall come in functions of this code.
        first: the number of the first instant.
        step: the distance between two instants.

    Yields:
        The number of the instant, and what the block raised; ends after the block has run without an interrupt.
    """
    number = first
    while True:
        has_come, error = _once(block, request, of, number)
        if not has_come:
            return
        yield number, error
        del error
        number += step


def _once(
    block: Callable[[], None], request: Request, of: Callable[[CodeType], bool], number: int
) -> tuple[bool, BaseException | None]:
    count, places, done = 0, {}, []
    ask, arguments = request[0], tuple((each,) for each in request[1])
    settrace, nothing = sys.settrace, (None,)

    def each(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _LOOKS:
            count += 1
            if count == number:
                # None of the following instructions looks for interrupts: the code that is traced gets this one.
                done[:] = map(settrace, nothing)
                done[:] = map(ask, *arguments)
        return each

    def begin(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        wanted = places.get(code)
        if wanted is None:
            wanted = places[code] = of(code)
        if not wanted:
            return None
        frame.f_trace_opcodes = True
        return each

    before, error = sys.gettrace(), None
    try:
        sys.settrace(begin)
        block()
        sys.settrace(before)
        for _ in range(10):  # here an interrupt arrives that came at the last instruction
            pass
    except BaseException as raised:
        sys.settrace(before)
        error = raised
    return bool(done), error
