"""Ctrl-C at a line of the library that a test names."""

from __future__ import annotations

import contextlib
import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt, as in a program that a terminal starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ctrl_c_at_line(number: int, code: CodeType, block: Callable[[], None]) -> bool:
    """Runs `block`, with Ctrl-C before the `number`-th line of `code` that it executes. Returns whether it came.

    The end of a `with` block does not count. It calls the release of a lock in C, and Python looks for no signal
    between the last call in the block and that. Nor does a `try` count, at which it never looks for one.
    """
    lines = last = 0

    def each(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines, last
        if event == "line":
            before, last = last, frame.f_lineno
            text = linecache.getline(code.co_filename, last).strip()
            counts = text != "try:" and not (last < before and text.startswith("with "))
            lines += counts
            if lines == number and counts:
                signal.raise_signal(signal.SIGINT)
        return each

    def calls(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if frame.f_code is not code:
            return None
        last = 0
        return each

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        block()
    except KeyboardInterrupt:
        assert lines >= number
    else:
        assert lines < number, "the interrupt was lost"
    finally:
        sys.settrace(before)
    return lines >= number
