"""Interrupts that arrive at any line of the code that holds them off, or that takes a lock."""

from __future__ import annotations

import contextlib
import itertools
import operator
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.interrupted import ctrl_c_at_line

from replica_engine.pjrt.device_group import ProgramOrder, ProgramTurn
from replica_engine.process import interrupts
from replica_engine.watch.watchdog import Wait
from replica_engine.xla.body import LaunchLimits
from replica_engine.xla.stages.launch import Launch


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


class _Lock:
    """A lock that another thread seems to have at the first attempts to take it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.refusals = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.refusals:
            self.refusals -= 1
            return False
        return self.lock.acquire(blocking, timeout)

    def release(self) -> None:
        self.lock.release()

    __exit__: Any = property(operator.attrgetter("lock.__exit__"))

    def is_free(self) -> bool:
        """Whether another thread can take it."""
        with ThreadPoolExecutor(1) as other:
            taken = other.submit(self.lock.acquire, False).result()
            if taken:
                other.submit(self.lock.release).result()
        return taken


def _entered(order: ProgramOrder, limit: float | None) -> Any:
    """What waits for its turn: the lock itself, with or without a limit."""
    return order if limit is None else order.within(limit, TimeoutError)


class _Launch:
    """A launch of a program without host calls, as far as it takes its turn."""

    def __init__(self, order: ProgramOrder, limit: float | None):
        body = SimpleNamespace(limits=LaunchLimits(timeout=limit, warn_after=1e6))
        devices = SimpleNamespace(in_flight=order)
        compiled = SimpleNamespace(program=SimpleNamespace(body=body), devices=devices)
        self.turn = order.turn(Launch(compiled)._take_turn)  # type: ignore

    def __enter__(self) -> None:
        self.turn.__enter__()

    __exit__: Any = property(operator.attrgetter("turn.__exit__"))


@pytest.mark.parametrize("refusals", [0, 2])
@pytest.mark.parametrize("limit", [None, 1000.0])
@pytest.mark.parametrize("make", [_entered, _Launch])
def test_ctrl_c_while_a_turn_is_taken_leaves_the_devices_free(
    handler: Any, make: Callable[..., Any], limit: float | None, refusals: int
) -> None:
    """Every other thread that launches would wait for ever."""
    order, lock = ProgramOrder(), _Lock()
    order._lock = lock  # type: ignore[assignment]

    def block() -> None:
        lock.refusals = refusals
        with make(order, limit):
            pass

    names = ["enter", "enter_now", "enter_within", "_acquire", "beat", "__enter__"]
    codes = [getattr(ProgramOrder, name).__code__ for name in names if hasattr(ProgramOrder, name)]
    codes += [
        ProgramTurn.__enter__.__code__,
        Launch._take_turn.__code__,
        Wait.__enter__.__code__,
        Wait.__exit__.__code__,
    ]
    tried = 0
    for code in codes:
        number = 1
        while ctrl_c_at_line(number, code, block):
            assert lock.is_free(), f"{code.co_name}, line {number}"
            number, tried = number + 1, tried + 1
    assert tried > 5


class Killed(BaseException):
    """What is raised in a thread."""


@pytest.mark.parametrize(("steps", "is_raised"), [(3, True), (1000, False)], ids=["soon", "too late"])
def test_a_thread_that_is_in_other_code_has_a_moment_to_come_back(steps, is_raised, monkeypatch):
    asked, now = itertools.count(), itertools.count(100.0, 0.01)
    monkeypatch.setattr(interrupts, "in_users_code", lambda thread: next(asked) >= steps)
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    with pytest.raises(Killed) if is_raised else contextlib.nullcontext():
        interrupts.raise_in(threading.get_ident(), Killed)
        sum(range(10))
    assert is_raised or next(asked) < 20
