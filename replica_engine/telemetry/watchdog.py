"""The watchdog: one thread that checks from time to time for operations that should have returned.

Code that starts an operation which may take long puts a `Watch` around it. A watch adds an entry to a dictionary and
removes it again. The watchdog sleeps until the first watch is due. As long as all operations return in time, no
function is called for a report, and the watchdog wakes up seldom. When a watch is due, the watchdog logs the watch's
description of itself, and logs again after each further period of the same length. If the watch has a timeout, the
watchdog calls `expire` on its own thread when the timeout has passed, and again after each further period of that
length.

What must never happen:

- A report that fails ends the watchdog.
- A watch expires after its block has ended. `expire` runs under the lock that leaving the block takes.
- The watchdog sleeps although a watch is due. A new watch that is due earlier than all others wakes the watchdog.
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
"""The environment variable with the seconds after which to warn, if the strategy sets no number."""

_FAR = 3600.0  # the longest sleep of the watchdog, in seconds

log = logging.getLogger("replica_engine")


def _default() -> float:
    given = os.environ.get(VARIABLE)
    if given:
        with contextlib.suppress(ValueError):
            seconds = float(given)
            if seconds > 0:
                return seconds
        log.warning("%s=%s is not a positive number of seconds; using 30.", VARIABLE, given)
    return 30.0


WARN_AFTER = _default()
"""Seconds after which a watch warns, unless it is given another number."""


_workers: list[Callable[[], str]] = []


def describe_workers(describe: Callable[[], str]) -> None:
    """Adds what is known of the other workers of a job to each warning and to each timeout.

    Args:
        describe: returns a table with a row for each worker, or "" if nothing is known. It must return soon.
    """
    _workers.append(describe)


def forget_workers(describe: Callable[[], str]) -> None:
    """Takes back `describe_workers`."""
    if describe in _workers:
        _workers.remove(describe)


def workers() -> list[str]:
    """What is known of the other workers of each job of this process, as text."""
    return [text for text in (describe() for describe in list(_workers)) if text]


_replicas: list[Callable[[], str]] = []


def has_workers() -> bool:
    """Whether this process is a worker of a job."""
    return bool(_workers)


def describe_replicas(describe: Callable[[], str]) -> None:
    """Lets other workers of the job know where the replicas of this process are; see `replicas`.

    Args:
        describe: returns a line; "" if all is well. It must return soon.
    """
    _replicas.append(describe)


def forget_replicas(describe: Callable[[], str]) -> None:
    """Takes back `describe_replicas`."""
    if describe in _replicas:
        _replicas.remove(describe)


def replicas() -> str:
    """Where the replicas of this process are, as text; "" if it is not known, or if all is well."""
    found = []
    for describe in list(_replicas):
        try:
            found.append(describe())
        except Exception:  # the step has just ended; a report must not end the thread that sends it
            log.debug("The replicas could not be described.", exc_info=True)
    return "; ".join(filter(None, found))


class Watch:
    """A context manager around an operation that should return.

    Args:
        describe: returns the text of the warning, given the seconds that the operation has taken; None for no warning
            this time. The watchdog calls it on its thread.
        warn_after: seconds until the warning is logged, and until it is logged again; None takes `WARN_AFTER`.
        timeout: seconds until the watch expires; None for no timeout.
        expire: called when the watch expires, and again after each further `timeout`, with the seconds that the
            operation has taken. The watchdog calls it on its thread, so it must be quick.
        of_workers: whether the description has the rows of the other workers already; see `describe_workers`.
        progress: called when the watch is due; returns when the operation last showed progress, in seconds of
            `time.perf_counter`, as if `beat` had been called then.

    Attributes:
        since: when the wait began, in seconds of `time.perf_counter`; `beat` sets it to the current time when the
            operation shows progress.
        expired: how often the watch has expired.
    """

    __slots__ = (
        "_describe",
        "_expire",
        "_of_workers",
        "_progress",
        "_said",
        "_timeout",
        "_warn_after",
        "expired",
        "since",
    )

    def __init__(
        self,
        describe: Callable[[float], str | None],
        warn_after: float | None = None,
        timeout: float | None = None,
        expire: Callable[[float], None] | None = None,
        of_workers: bool = False,
        progress: Callable[[], float] | None = None,
    ):
        self._describe = describe
        self._progress = progress
        self._of_workers = of_workers
        self._warn_after = WARN_AFTER if warn_after is None else warn_after
        self._timeout = timeout
        self._expire = expire
        self._said = (0.0, 0)  # `since` at the last warning, and the periods of `warn_after` passed then
        self.since = 0.0
        self.expired = 0

    def __enter__(self) -> Watch:
        self.since = time.perf_counter()
        _watchdog.add(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> None:
        _watchdog.remove(self)
        # The watchdog may refer to this watch until its next check.
        self._describe, self._expire, self._progress = _nothing, None, None

    @property
    def waited(self) -> float:
        """Seconds since the operation began, or since its last progress."""
        return time.perf_counter() - self.since

    def beat(self) -> None:
        """Reports progress: the time is measured from now on."""
        self.since = time.perf_counter()

    @property
    def first_due(self) -> float:
        """Seconds from the beginning until the watchdog must check this watch."""
        return self._warn_after if self._timeout is None else min(self._warn_after, self._timeout)

    def look(self) -> float:
        """Logs a warning or expires, if that is due. Called by the watchdog.

        Returns:
            When the watch is due next, in seconds of `time.perf_counter`.
        """
        progress = self._progress
        if progress is not None:
            self.since = max(self.since, progress())
        since = self.since  # read once: `beat` on another thread may change it meanwhile
        waited = time.perf_counter() - since
        said_since, times = self._said
        if said_since != since:
            times = 0
        if self._timeout is not None and waited >= self._timeout * (self.expired + 1):
            if not self._let_expire(since, waited):
                return time.perf_counter()  # the operation has just shown progress or ended
            self._said = since, int(waited / self._warn_after)  # the expiry is the report, so a warning is not due now
            return time.perf_counter() + self._timeout
        if waited >= self._warn_after * (times + 1):
            times = int(waited / self._warn_after)
            self._said = since, times
            text = self._describe(waited)
            if text:
                log.warning("%s", text if self._of_workers else "\n".join([text, *workers()]))
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
    """The description of a watch whose block has ended: no warning."""


class _Watchdog:
    """The watchdog's thread, and the watches that it checks."""

    def __init__(self) -> None:
        self.leaving = threading.Lock()  # while a watch expires, its block cannot be left
        self._watches: dict[int, Watch] = {}
        self._next = 0.0  # when the thread will check, in seconds of `time.perf_counter`
        self._planning = threading.Lock()  # held while `_next` changes
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
                self._next = min(self._next, due)  # stays when the watch is over: the next one need not wake the thread
            self._wake.set()

    def remove(self, watch: Watch) -> None:
        self._watches.pop(id(watch), None)
        if watch._timeout is not None:
            with self.leaving:  # waits until a running `expire` has returned
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
            due = self._next = now + _FAR  # set before the check: a watch added meanwhile may lower it
        for watch in list(self._watches.values()):
            if watch.since + watch.first_due > now:
                due = min(due, watch.since + watch.first_due)
                continue
            try:
                due = min(due, watch.look())
            except Exception:
                log.exception("The watchdog failed to report an operation that has not returned.")
                due = min(due, now + 1.0)
        with self._planning:
            self._next = min(self._next, due)


_watchdog = _Watchdog()


def _after_fork() -> None:
    """A forked child has none of the parent's other threads, so it needs a new watchdog without watches."""
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
