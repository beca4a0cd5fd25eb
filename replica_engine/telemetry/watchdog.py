"""The watchdog: one thread that looks, now and then, at what should have come back.

Whoever starts something that may take long puts a `Watch` around it. That is an entry in a dictionary and its
removal; nobody is asked for anything, and no thread wakes up, while things come back in time. The watchdog sleeps until
the first of the watches is due. When one is, it logs what that watch says of itself, and again after as long; where
there is a limit it calls the watch's `expire`, and again after as long, on its own thread.

What must never happen: that a report which fails ends the watchdog; that a watch which is over expires (`expire` runs
under the lock that leaving takes); that a watch is due and the watchdog sleeps on (a new watch that is due earlier than
all others wakes it).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

VARIABLE = "REPLICA_ENGINE_WARN_AFTER"
"""The environment variable that says after how many seconds to warn, where a strategy does not."""

_FAR = 3600.0  # seconds; the watchdog looks at least so often

log = logging.getLogger("replica_engine")


def _default() -> float:
    given = os.environ.get(VARIABLE)
    if given:
        with contextlib.suppress(ValueError):
            seconds = float(given)
            if seconds > 0:
                return seconds
        log.warning("%s is no positive number of seconds: %r. It is taken for 30.", VARIABLE, given)
    return 30.0


WARN_AFTER = _default()
"""Seconds after which there is a warning, unless somebody asks for another number."""


class Watch:
    """Something that should come back; a context manager around it.

    Args:
        describe: says what has not come back, after so many seconds; called by the watchdog. None says nothing now.
        warn_after: seconds until it is logged, and again after as many; None takes `WARN_AFTER`.
        timeout: seconds until it expires; None never.
        expire: called then, and again after as long, by the watchdog, with the seconds; it must be quick.

    Attributes:
        since: when the wait began, of `time.perf_counter`; set it anew (`beat`) when there was a sign of life.
        expired: how often it has.
    """

    __slots__ = ("_describe", "_expire", "_said", "_timeout", "_warn_after", "expired", "since")

    def __init__(
        self,
        describe: Callable[[float], str | None],
        warn_after: float | None = None,
        timeout: float | None = None,
        expire: Callable[[float], None] | None = None,
    ):
        self._describe = describe
        self._warn_after = WARN_AFTER if warn_after is None else warn_after
        self._timeout = timeout
        self._expire = expire
        self._said = (0.0, 0)  # since when it was the last time, and how often
        self.since = 0.0
        self.expired = 0

    def __enter__(self) -> Watch:
        self.since = time.perf_counter()
        _watchdog.add(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> None:
        _watchdog.remove(self)
        self._describe, self._expire = _nothing, None  # the watchdog may hold on to this until it looks again

    @property
    def waited(self) -> float:
        """Seconds since it began, or since the last sign of life."""
        return time.perf_counter() - self.since

    def beat(self) -> None:
        """There was a sign of life: the time counts from now."""
        self.since = time.perf_counter()

    @property
    def first_due(self) -> float:
        """Seconds from the beginning until the watchdog has to look."""
        return self._warn_after if self._timeout is None else min(self._warn_after, self._timeout)

    def look(self) -> float:
        """Reports if that is due. Called by the watchdog; returns when it is due next, of `time.perf_counter`."""
        since = self.since  # once: it may be set anew meanwhile, and then all counts from there
        waited = time.perf_counter() - since
        said_since, times = self._said
        if said_since != since:
            times = 0
        if self._timeout is not None and waited >= self._timeout * (self.expired + 1):
            if not self._let_expire(since, waited):
                return time.perf_counter()  # there was a sign of life a moment ago
            self._said = since, int(waited / self._warn_after)  # that says it all
            return time.perf_counter() + self._timeout
        if waited >= self._warn_after * (times + 1):
            times = int(waited / self._warn_after)
            self._said = since, times
            text = self._describe(waited)
            if text:
                log.warning("%s", text)
        due = since + self._warn_after * (times + 1)
        return due if self._timeout is None else min(due, since + self._timeout * (self.expired + 1))

    def _let_expire(self, since: float, waited: float) -> bool:
        with _watchdog.leaving:
            if self.since != since or not _watchdog.has(self):
                return False
            self.expired += 1
            if self._expire is not None:
                self._expire(waited)
            return True


def _nothing(waited: float) -> None:
    """What a watch that is over says."""


class _Watchdog:
    """The thread, and what it watches."""

    def __init__(self) -> None:
        self.leaving = threading.Lock()  # a watch that expires is not left meanwhile
        self._watches: dict[int, Watch] = {}
        self._next = 0.0  # when it will look, of `time.perf_counter`
        self._planning = threading.Lock()  # for changing that
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def add(self, watch: Watch) -> None:
        self._watches[id(watch)] = watch
        if self._thread is None:
            self._start()
        due = watch.since + watch.first_due
        if due < self._next:
            with self._planning:
                self._next = min(self._next, due)  # and stays, when the watch has gone: no need to wake it for the next
            self._wake.set()

    def remove(self, watch: Watch) -> None:
        self._watches.pop(id(watch), None)
        if watch._timeout is not None:
            with self.leaving:  # it may be expiring
                pass

    def has(self, watch: Watch) -> bool:
        return id(watch) in self._watches

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="replica_engine: watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            now = time.perf_counter()
            if now >= self._next:
                self._look(now)
            self._wake.wait(max(0.0, self._next - time.perf_counter()))

    def _look(self, now: float) -> None:
        with self._planning:
            due = self._next = now + _FAR  # before it looks: what comes while it does and is due earlier changes it
        for watch in list(self._watches.values()):
            if watch.since + watch.first_due > now:
                due = min(due, watch.since + watch.first_due)
                continue
            try:
                due = min(due, watch.look())
            except Exception:
                log.exception("The watchdog could not report on something that has not come back.")
                due = min(due, now + 1.0)
        with self._planning:
            self._next = min(self._next, due)


_watchdog = _Watchdog()


def _after_fork() -> None:
    """A child process has no other threads, and nobody in it waits for what the parent's threads do."""
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
