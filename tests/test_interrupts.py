"""Interrupts that arrive at any line of the code that holds them off, or that takes a lock."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

from replica_engine.process import interrupts


def ctrl_c_at_line(number: int, code: CodeType, block: Callable[[], None]) -> bool:
    """Runs `block`, with Ctrl-C before the `number`-th line of `code` that it executes. Returns whether it came."""
    lines = 0

    def each(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == number:
                signal.raise_signal(signal.SIGINT)
        return each

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: each if frame.f_code is code else None)
    try:
        block()
    except KeyboardInterrupt:
        assert lines >= number
    else:
        assert lines < number, "the interrupt was lost"
    finally:
        sys.settrace(before)
    return lines >= number


@pytest.fixture
def handler() -> Any:
    """Python's own handler for SIGINT, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_ctrl_c_while_a_block_is_entered_leaves_nothing_behind(handler: Any, passes: bool, nested: bool) -> None:
    """`break_off` would leave a mark on the dead object, and not end what the thread does."""
    ident = threading.get_ident()

    def enter_one() -> None:
        with interrupts.held_off(lambda: passes):
            pass

    def block() -> None:
        if not nested:
            enter_one()
            return
        with interrupts.held_off(lambda: True) as _:
            outer = interrupts._held[ident]
            try:
                enter_one()
            finally:
                assert interrupts._held[ident] is outer

    number = 1
    while ctrl_c_at_line(number, interrupts.held_off.__enter__.__code__, block):
        assert ident not in interrupts._held, f"line {number}"
        assert signal.getsignal(signal.SIGINT) is handler, f"line {number}"
        number += 1
    assert number > 5
