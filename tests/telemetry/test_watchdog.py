"""Watches that are due, that are not, and that are over."""

import logging
import threading
import types

import pytest

from replica_engine.telemetry import watchdog
from replica_engine.telemetry.watchdog import Watch

SOON = 0.02  # seconds
LONG = 60.0  # which is enough on any machine for what must come
NEVER = 1000.0


@pytest.fixture
def said():
    """`said(n)`: waits until a watch has described itself n times, with `said.describe`."""

    class Said:
        def __init__(self):
            self.waited = []
            self._more = threading.Condition()

        def describe(self, seconds):
            with self._more:
                self.waited.append(seconds)
                self._more.notify_all()
            return f"waiting, number {len(self.waited)}"

        def __call__(self, number):
            with self._more:
                assert self._more.wait_for(lambda: len(self.waited) >= number, LONG)
            return self.waited

    return Said()


def test_what_does_not_come_back_is_logged_again_and_again(said, caplog):
    with Watch(said.describe, SOON):
        first, second, *_ = said(3)  # of which the first two have been logged
    assert SOON <= first < second
    assert [record.getMessage() for record in caplog.records][:2] == ["waiting, number 1", "waiting, number 2"]
    assert caplog.records[0].levelno == logging.WARNING


def test_what_comes_back_is_not(said):
    others = []

    def describe(seconds):
        others.append(seconds)
        return "not to be said"

    for _ in range(100):
        with Watch(describe, NEVER):
            pass
    with Watch(said.describe, SOON):
        said(1)  # and by then the watchdog has looked at whatever it still knows
    assert not others


@pytest.fixture
def clock(monkeypatch):
    """A watchdog without a thread, and its clock: `clock(seconds)` moves the time on and has the watchdog look."""
    alone, now = watchdog._Watchdog(), 100.0
    alone._thread = threading.current_thread()  # so that it starts none
    monkeypatch.setattr(watchdog, "_watchdog", alone)
    monkeypatch.setattr(watchdog, "time", types.SimpleNamespace(perf_counter=lambda: now))

    def move(seconds):
        nonlocal now
        now += seconds
        alone._look(now)

    return move


def test_a_sign_of_life_restarts_the_time(said, clock):
    expired = []
    with Watch(said.describe, NEVER, timeout=1.5, expire=expired.append) as watch:
        for _ in range(10):
            clock(1.4)
            watch.beat()
        clock(1.4)
        assert not expired
        clock(0.2)
    assert expired == [pytest.approx(1.6)]
    assert watch.expired == 1


def test_it_expires_on_another_thread_and_again_after_as_long(said):
    calls = []
    twice = threading.Semaphore(0)

    def expire(seconds):
        calls.append((seconds, threading.current_thread()))
        twice.release()

    with Watch(said.describe, NEVER, timeout=SOON, expire=expire) as watch:
        assert twice.acquire(timeout=LONG)
        assert twice.acquire(timeout=LONG)
    (first, thread), (second, _), *_ = calls
    assert SOON <= first < second
    assert second >= 2 * SOON
    assert thread is not threading.current_thread()
    assert watch.expired == len(calls)
    assert said.waited == []


def test_one_that_is_over_does_not_expire(said):
    calls = []
    for _ in range(200):
        with Watch(said.describe, NEVER, timeout=SOON / 10, expire=calls.append) as watch:
            pass
        before = len(calls)
        assert watch.expired == before
        calls.clear()
    with Watch(said.describe, SOON):
        said(1)
    assert calls == []


def test_one_that_is_due_early_is_not_kept_waiting_by_one_that_is_due_late(said):
    late = []
    with Watch(late.append, NEVER), Watch(said.describe, SOON):
        said(1)  # within LONG
    assert late == []


def test_a_report_that_fails_does_not_end_the_watchdog(said, caplog):
    def fails(seconds):
        said.describe(seconds)
        raise ValueError("no report")

    with Watch(fails, SOON):
        said(1)
    with Watch(said.describe, SOON):
        said(len(said.waited) + 1)
    assert "no report" in caplog.text


def test_nothing_is_polled_while_everything_comes_back(monkeypatch):
    """The watchdog looks when the first watch could be due, and not for each of those that come and go meanwhile."""
    looks = []
    with Watch(lambda seconds: None, NEVER):
        real = Watch.look
        monkeypatch.setattr(Watch, "look", lambda watch: looks.append(watch) or real(watch))
        waits = threading.Semaphore(0)
        wait = watchdog._watchdog._wake.wait
        monkeypatch.setattr(watchdog._watchdog._wake, "wait", lambda seconds: waits.release() or wait(seconds))
        for _ in range(20_000):
            with Watch(lambda seconds: None, NEVER - 1):
                pass
    assert len(looks) <= 5  # a time at which a watch of an earlier test was due may come in between
    assert sum(waits.acquire(blocking=False) for _ in range(20_000)) <= 5


@pytest.mark.parametrize(("value", "seconds"), [("2.5", 2.5), ("", 30.0), ("-1", 30.0), ("soon", 30.0)])
def test_the_environment_says_when_to_warn(monkeypatch, value, seconds):
    monkeypatch.setenv(watchdog.VARIABLE, value)
    assert watchdog._default() == seconds
