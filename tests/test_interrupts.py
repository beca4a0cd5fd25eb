"""Interrupts that arrive at any line of the code that holds them off, or that takes a lock."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from replica_engine.pjrt.group import ProgramOrder, Turn
from replica_engine.process import interrupts
from replica_engine.telemetry.watchdog import Watch
from replica_engine.xla.body import Limits
from replica_engine.xla.stages.launch import Launch


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


@pytest.mark.parametrize("nested", [False, True])
def test_ctrl_c_while_a_block_is_entered_leaves_nothing_behind(handler: Any, nested: bool) -> None:
    """The handlers would stay replaced, and Ctrl-C would do nothing from then on."""

    def block() -> None:
        with interrupts.held_off(lambda: True) if nested else contextlib.nullcontext(), interrupts.held_off(bool):
            pass

    number = 1
    while ctrl_c_at_line(number, interrupts.held_off.__enter__.__code__, block):
        assert signal.getsignal(signal.SIGINT) is handler, f"line {number}"
        number += 1
    assert number > 3


def test_a_block_holds_off_the_handlers_of_all_signals_and_calls_them_in_order() -> None:
    called: list[int] = []
    numbers = [signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1]
    before = [signal.signal(number, lambda number, frame: called.append(number)) for number in numbers]
    try:
        with interrupts.held_off(bool):
            for number in numbers:
                signal.raise_signal(number)
            assert not called
        assert called == numbers
        with interrupts.held_off(bool):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert called[3:] == [signal.SIGTERM], "a second one is handled at once: the block may never end"
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Order(ProgramOrder):
    """One that another thread seems to have at the first attempts to take it."""

    refusals = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.refusals:
            self.refusals -= 1
            return False
        return super().acquire(blocking, timeout)

    def is_free(self) -> bool:
        """Whether another thread can take it."""
        with ThreadPoolExecutor(1) as other:
            taken = other.submit(super().acquire, False).result()
            if taken:
                other.submit(self.release).result()
        return taken


def _entered(order: ProgramOrder, limit: float | None) -> Any:
    """What waits for its turn: the lock itself, with or without a limit."""
    return order if limit is None else order.within(limit, TimeoutError)


def _launch(order: ProgramOrder, limit: float | None) -> Any:
    """The turn of a program without host calls."""
    body = SimpleNamespace(limits=Limits(timeout=limit, warn_after=1e6))
    calls = SimpleNamespace(calls=[])
    return Launch(SimpleNamespace(body=body, host_calls=calls), SimpleNamespace(in_flight=order)).turn  # type: ignore


@pytest.mark.parametrize("refusals", [0, 2])
@pytest.mark.parametrize("limit", [None, 1000.0])
@pytest.mark.parametrize("make", [_entered, _launch])
def test_ctrl_c_while_a_turn_is_taken_leaves_the_devices_free(
    handler: Any, make: Callable[..., Any], limit: float | None, refusals: int
) -> None:
    """Every other thread that launches would wait for ever."""
    order = _Order()

    def block() -> None:
        order.refusals = refusals
        with make(order, limit):
            pass

    names = ["enter", "enter_now", "enter_within", "_acquire", "_begin", "beat", "__enter__"]
    codes = [getattr(ProgramOrder, name).__code__ for name in names if hasattr(ProgramOrder, name)]
    codes += [Launch._take_turn.__code__, Turn.__enter__.__code__, Watch.__enter__.__code__] if make is _launch else []
    tried = 0
    for code in codes:
        number = 1
        while ctrl_c_at_line(number, code, block):
            assert order.is_free(), f"{code.co_name}, line {number}"
            number, tried = number + 1, tried + 1
    assert tried > 5
