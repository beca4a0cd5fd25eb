"""The watchdog: one thread that checks from time to time for operations that should have returned.

Code that starts an operation which may take long puts a `Wait` around it. A wait adds an entry to a dictionary and
removes it again. The watchdog sleeps until the first wait is due. As long as all operations return in time, no
function is called for a report, and the watchdog wakes up seldom. When a wait is due, the watchdog logs the wait's
description of itself, and logs again after each further period of the same length. If the wait has a timeout, the
watchdog ends it with an error when the timeout has passed. Any other thread may end it too, and the first error stays.

What must never happen:

- A report that fails ends the watchdog.
- A wait is ended after its block has ended. `end` runs under the lock that leaving the block takes.
- The watchdog sleeps although a wait is due. A new wait that is due earlier than all others wakes the watchdog.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

# Stacks of threads, for reports: where each thread is in the user's program.

_STANDARD_LIBRARY = os.path.dirname(traceback.__file__) + os.sep
_MOST_LINES, _WIDEST = 40, 160  # of the stack of a thread in a message
_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep  # internal also before `hide` is called


def _nothing(filename: str) -> bool:
    return False


_is_internal: Callable[[str], bool] = _nothing


def hide(is_internal: Callable[[str], bool]) -> None:
    """Sets the function that tells internal files from the user's files. Stacks leave out frames of internal files."""
    global _is_internal
    _is_internal = is_internal


def in_users_code(thread: int) -> bool:
    """Whether the innermost frame of a thread is in the user's code or in Python's standard library.

    True as well if the thread has no frame, because it has ended. Files in site-packages do not count as the standard
    library.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return True
    filename = frame.f_code.co_filename
    del frame  # see `format_thread_stack`
    return not _is_internal(filename) or (filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename)


def format_thread_stack(thread: int | None) -> str:
    """The stack of a thread as text, with the innermost frame last; "" if the thread does not exist.

    The text has the frames of the user's files and the innermost frame, also if that is internal.
    """
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    del frame  # perhaps that of this call: it would hold itself, and all that calls of this thread have
    shown = [each for each in frames if not _is_internal(each.filename)]
    if frames[-1] not in shown:
        shown.append(frames[-1])
    return "".join(traceback.format_list(shown))


def format_users_stacks(first: Sequence[int] = (), most: int = 4) -> str:
    """The stacks of the threads that run the user's code, as short texts; that of the main thread in any case.

    The text travels in a message, so it has the innermost frames only, and of long lines the beginning.

    Args:
        first: threads that come first, whatever they run.
        most: how many threads at most.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [ident for ident, frame in sys._current_frames().items() if _is_users(frame)]
    idents = list(dict.fromkeys([*first, threading.main_thread().ident, *others]))[:most]
    stacks = [(names.get(ident, "a thread of the runtime"), format_thread_stack(ident)) for ident in idents]
    return "".join(f"  {name}:\n{_shortened(stack)}" for name, stack in stacks if stack)


def _shortened(stack: str) -> str:
    return "".join(f"{line[:_WIDEST]}\n" for line in stack.splitlines()[-_MOST_LINES:])


def _is_users(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame runs a file of the user, and not only what is installed."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not (_is_internal(filename) or filename.startswith((_STANDARD_LIBRARY, _LIBRARY, "<frozen"))):
            return True
        frame = frame.f_back
    return False


# When to warn, and what reports say of other workers and of replicas.

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
"""Seconds after which a wait warns, unless it is given another number."""


_workers: dict[Callable[[], str], None] = {}  # in order


def describe_workers(describe: Callable[[], str]) -> None:
    """Adds what is known of the other workers of a job to each warning and to each timeout.

    Args:
        describe: returns a table with a row for each worker, or "" if nothing is known. It must return soon.
    """
    _workers[describe] = None


def forget_workers(describe: Callable[[], str]) -> None:
    """Takes back `describe_workers`."""
    _workers.pop(describe, None)


def workers() -> list[str]:
    """What is known of the other workers of each job of this process, as text."""
    return [text for text in (describe() for describe in list(_workers)) if text]


_replicas: dict[Callable[[], str], None] = {}


def has_workers() -> bool:
    """Whether this process is a worker of a job."""
    return bool(_workers)


def describe_replicas(describe: Callable[[], str]) -> None:
    """Lets other workers of the job know where the replicas of this process are; see `replicas`.

    Args:
        describe: returns a line; "" if all is well. It must return soon.
    """
    _replicas[describe] = None


def forget_replicas(describe: Callable[[], str]) -> None:
    """Takes back `describe_replicas`."""
    _replicas.pop(describe, None)


def replicas() -> str:
    """Where the replicas of this process are, as text; "" if it is not known, or if all is well."""
    found = []
    for describe in list(_replicas):
        try:
            found.append(describe())
        except Exception:  # the step has just ended; a report must not end the thread that sends it
            log.debug("The replicas could not be described.", exc_info=True)
    return "; ".join(filter(None, found))


# Waits, and the thread that checks them.


class Wait:
    """A wait for an operation that should return: it warns, has a limit, and is ended from any thread.

    A `with` block is enough for a wait that only warns. Another one may be left by an exception that comes in
    `__exit__`, so that is called a second time.

    Args:
        describe: returns the text of the warning, given the seconds that the operation has taken; None for no warning
            this time. The watchdog calls it on its thread. None in its place for no warnings at all.
        warn_after: seconds until the warning is logged, and until it is logged again; None takes `WARN_AFTER`.
        timeout: seconds until time runs out; None for no limit.
        late: called when time has run out, and again after each further `timeout` until the wait has ended; returns the
            error that ends it, or None to go on. The watchdog calls it on its thread, so it must be quick.
        breaker: has the operation return, or the waiting thread leave it, when the wait is ended. It must be quick.
        insists: whether `breaker` is called again after each further `timeout`, in case it could not do that before.
        of_workers: whether the description has the rows of the other workers already; see `describe_workers`.
        progress: called when the wait is due; returns when the operation last showed progress, in seconds of
            `time.perf_counter`, as if `beat` had been called then.

    Attributes:
        since: when the wait began, in seconds of `time.perf_counter`; `beat` sets it to the current time when the
            operation shows progress.
        expired: how often time has run out.
        error: what has ended the wait; None as long as nothing has.
        first_due: seconds from the beginning until the watchdog must check this wait.
    """

    def __init__(
        self,
        describe: Callable[[float], str | None] | None,
        warn_after: float | None = None,
        timeout: float | None = None,
        *,
        late: Callable[[], BaseException | None] | None = None,
        breaker: Callable[[], object] | None = None,
        insists: bool = False,
        of_workers: bool = False,
        progress: Callable[[], float] | None = None,
    ):
        assert timeout is None or breaker is not None, "the watchdog would look at it without end, and end nothing"
        self._describe = describe
        self._late = late
        self._breaker = breaker
        self._insists = insists
        self._progress = progress
        self._of_workers = of_workers
        self._warn_after = math.inf if describe is None else WARN_AFTER if warn_after is None else warn_after
        self._timeout = math.inf if timeout is None else timeout
        self.first_due = min(self._warn_after, self._timeout)
        self._said = (0.0, 0, 0)  # `since` at the last look, and the periods of `warn_after` and `timeout` passed then
        self.since = 0.0
        self.expired = 0
        self.error: BaseException | None = None

    def __enter__(self) -> Wait:
        self.since = time.perf_counter()
        _watchdog.add(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> None:
        _watchdog._watches.pop(id(self), None)
        if self._breaker is not None:
            with _watchdog.leaving:  # waits until a running `end` has returned
                self._breaker = None
        # The watchdog may refer to this wait until its next check.
        self._describe = self._late = self._progress = None

    def end(self, error: BaseException) -> None:
        """Ends the wait with an error, from any thread, unless it is over or has been ended: the first error stays."""
        with _watchdog.leaving:
            if self._breaker is not None and self.error is None:
                self.error = error
                self._breaker()

    @property
    def waited(self) -> float:
        """Seconds since the operation began, or since its last progress."""
        return time.perf_counter() - self.since

    def beat(self) -> None:
        """Reports progress: the time is measured from now on."""
        self.since = time.perf_counter()

    def look(self) -> float:
        """Logs a warning or ends the wait, if that is due. Called by the watchdog.

        Returns:
            When the wait is due next, in seconds of `time.perf_counter`.
        """
        describe, progress = self._describe, self._progress
        if progress is not None:
            self.since = max(self.since, progress())
        since = self.since  # read once: `beat` on another thread may change it meanwhile
        waited = time.perf_counter() - since
        said_since, warned, ended = self._said
        if said_since != since:
            warned = ended = 0
        if waited >= self._timeout * (ended + 1):
            if not self._run_out(since):
                return time.perf_counter()  # the operation has just shown progress or ended
            ended = int(waited / self._timeout)
        is_slow = self.error is None and waited >= self._warn_after * (warned + 1)  # an error is a report, too
        if is_slow:
            warned = int(waited / self._warn_after)
        self._said = since, warned, ended
        if is_slow and describe is not None and (text := describe(waited)):
            log.warning("%s", text if self._of_workers else "\n".join([text, *workers()]))
        due = since + self._timeout * (ended + 1)
        return due if self.error is not None else min(due, since + self._warn_after * (warned + 1))

    def _run_out(self, since: float) -> bool:
        """Ends the wait if it is late; returns False if it has shown progress after `since`, or is over."""
        with _watchdog.leaving:
            if self.since != since or self._breaker is None:
                return False
            self.expired += 1
            if self.error is None and self._late is not None:
                try:
                    error = self._late()
                except Exception as failure:  # the wait must end all the same
                    error = failure
                if error is not None:
                    self.end(error)
            elif self._insists:
                self._breaker()
            return True


class _Watchdog:
    """The watchdog's thread, and the waits that it checks."""

    def __init__(self) -> None:
        # Re-entrant: `_run_out` holds it where it calls `end`.
        self.leaving = threading.RLock()  # while a wait is ended, its block cannot be left
        self._watches: dict[int, Wait] = {}
        self._next = 0.0  # when the thread will check, in seconds of `time.perf_counter`
        self._planning = threading.Lock()  # held while `_next` changes
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def add(self, wait: Wait) -> None:
        self._watches[id(wait)] = wait
        if self._thread is None:
            self._start()
        due = wait.since + wait.first_due
        if due < self._next:
            with self._planning:
                self._next = min(self._next, due)  # stays when the wait is over: the next one need not wake the thread
            self._wake.set()

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
            due = self._next = now + _FAR  # set before the check: a wait added meanwhile may lower it
        # A copy: other threads add and remove waits without a lock meanwhile, which costs them nothing.
        for wait in list(self._watches.values()):
            if wait.since + wait.first_due > now:
                due = min(due, wait.since + wait.first_due)
                continue
            try:
                due = min(due, wait.look())
            except Exception:  # a report that fails must not end the watchdog
                log.exception("The watchdog failed to report an operation that has not returned.")
                due = min(due, now + 1.0)
        with self._planning:
            self._next = min(self._next, due)


_watchdog = _Watchdog()


def _after_fork() -> None:
    """A forked child has none of the parent's other threads, so it needs a new watchdog without waits."""
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
