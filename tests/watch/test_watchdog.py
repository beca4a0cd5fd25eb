"""Waits that are due, that are not, that are ended, and that are over."""

import functools
import logging
import threading
import time
import types

import pytest

from replica_engine.watch import watchdog
from replica_engine.watch.watchdog import Wait

SOON = 0.02  # seconds
LONG = 60.0  # which is enough on any machine for what must come
NEVER = 1000.0


@pytest.fixture
def said():
    """`said(n)`: waits until a wait has described itself n times, with `said.describe`."""

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
    with Wait(said.describe, SOON):
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
        with Wait(describe, NEVER):
            pass
    with Wait(said.describe, SOON):
        said(1)  # and by then the watchdog has looked at whatever it still knows
    assert not others


@pytest.fixture
def clock(monkeypatch):
    """A watchdog without a thread, and its clock: `clock(seconds)` moves the time on and has the watchdog look."""
    alone, now = watchdog._Watchdog(), 100.0
    alone._thread = threading.current_thread()  # so that it starts none
    monkeypatch.setattr(watchdog, "_watchdog", alone)
    here = threading.current_thread()  # the thread of the other watchdog keeps its own time
    monkeypatch.setattr(
        watchdog,
        "time",
        types.SimpleNamespace(perf_counter=lambda: now if threading.current_thread() is here else time.perf_counter()),
    )

    def move(seconds):
        nonlocal now
        now += seconds
        alone._look(now)

    return move


def test_a_sign_of_life_restarts_the_time(said, clock):
    ends = []
    with Wait(said.describe, NEVER, timeout=1.5, late=TimeoutError, breaker=lambda: ends.append(wait.waited)) as wait:
        for _ in range(10):
            clock(1.4)
            wait.beat()
        clock(1.4)
        assert not ends
        clock(0.2)
        clock(10.0)
    assert ends == [pytest.approx(1.6)]
    assert isinstance(wait.error, TimeoutError)


def test_one_that_may_take_longer_goes_on(said, clock):
    """And the time that counts begins with the next sign of life."""
    answers, ends = [None, None, TimeoutError("in the end")], []
    late, breaker = (lambda: answers.pop(0)), (lambda: ends.append(wait.waited))
    with Wait(said.describe, 2.5, timeout=1.0, late=late, breaker=breaker) as wait:
        clock(1.1)
        clock(1.1)
        clock(0.5)
        assert said.waited == [pytest.approx(2.7)]
        assert (wait.error, len(answers), wait.expired) == (None, 1, 2)
        wait.beat()
        clock(0.9)
        assert not ends
        clock(0.2)
        clock(10.0)  # no warning of one that has ended
    assert (ends, str(wait.error), said.waited) == ([pytest.approx(1.1)], "in the end", [pytest.approx(2.7)])


def test_any_thread_ends_it_and_the_first_error_stays(clock):
    ends, first = [], ValueError("first")
    with Wait(None, timeout=1.0, late=TimeoutError, breaker=lambda: ends.append(threading.current_thread())) as wait:
        thread = threading.Thread(target=wait.end, args=[first])
        thread.start()
        thread.join()
        wait.end(ValueError("second"))
        clock(1.5)
    wait.end(ValueError("third"))
    assert wait.error is first
    assert ends == [thread]


def test_one_that_is_over_is_not_ended():
    ends = []
    with Wait(None, breaker=lambda: ends.append(1)) as wait:
        pass
    wait.end(ValueError("late"))
    assert (wait.error, ends) == (None, [])


def test_a_limit_that_could_end_nothing_is_refused():
    with pytest.raises(AssertionError, match="without end"):
        Wait(None, timeout=1.0, late=TimeoutError)


def test_it_ends_although_nobody_can_say_why(clock):
    def fails():
        raise KeyError("no report")

    ends = []
    with Wait(None, timeout=1.0, late=fails, breaker=lambda: ends.append(1)) as wait:
        clock(1.5)
    assert isinstance(wait.error, KeyError)
    assert ends == [1]


def test_it_is_ended_on_another_thread_and_again_after_as_long_if_it_insists(said):
    calls = []
    twice = threading.Semaphore(0)

    def breaker():
        calls.append((wait.waited, threading.current_thread()))
        twice.release()

    with Wait(said.describe, NEVER, timeout=SOON, late=TimeoutError, breaker=breaker, insists=True) as wait:
        assert twice.acquire(timeout=LONG)
        assert twice.acquire(timeout=LONG)
    (first, thread), (second, _), *_ = calls
    assert SOON <= first < second
    assert second >= 2 * SOON
    assert thread is not threading.current_thread()
    assert wait.expired == len(calls)
    assert said.waited == []


def test_one_that_is_over_does_not_expire(said):
    calls = []
    for _ in range(200):
        breaker = functools.partial(calls.append, 1)
        with Wait(said.describe, NEVER, timeout=SOON / 10, late=TimeoutError, breaker=breaker, insists=True) as wait:
            pass
        before = len(calls)
        assert wait.expired == before
        calls.clear()
    with Wait(said.describe, SOON):
        said(1)
    assert calls == []


def test_one_that_is_due_early_is_not_kept_waiting_by_one_that_is_due_late(said):
    late = []
    with Wait(late.append, NEVER), Wait(said.describe, SOON):
        said(1)  # within LONG
    assert late == []


def test_a_report_that_fails_does_not_end_the_watchdog(said, caplog):
    def fails(seconds):
        said.describe(seconds)
        raise ValueError("no report")

    with Wait(fails, SOON):
        said(1)
    with Wait(said.describe, SOON):
        said(len(said.waited) + 1)
    assert "no report" in caplog.text


def test_nothing_is_polled_while_everything_comes_back(monkeypatch):
    """The watchdog looks when the first wait could be due, and not for each of those that come and go meanwhile."""
    looks = []
    with Wait(lambda seconds: None, NEVER):
        real = Wait.look
        monkeypatch.setattr(Wait, "look", lambda wait: looks.append(wait) or real(wait))
        waits = threading.Semaphore(0)
        wait = watchdog._watchdog._wake.wait
        monkeypatch.setattr(watchdog._watchdog._wake, "wait", lambda seconds: waits.release() or wait(seconds))
        for _ in range(20_000):
            with Wait(lambda seconds: None, NEVER - 1):
                pass
    assert len(looks) <= 5  # a time at which a wait of an earlier test was due may come in between
    assert sum(waits.acquire(blocking=False) for _ in range(20_000)) <= 5


@pytest.mark.parametrize(("value", "seconds"), [("2.5", 2.5), ("", 30.0), ("-1", 30.0), ("soon", 30.0)])
def test_the_environment_says_when_to_warn(monkeypatch, value, seconds):
    monkeypatch.setenv(watchdog.VARIABLE, value)
    assert watchdog._default() == seconds
