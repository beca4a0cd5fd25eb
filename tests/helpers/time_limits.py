"""Time limits that run out when a test says so.

A test of a limit must come to the place where time runs out, and go on afterwards, within that limit. With a limit of a
fraction of a second it fails on a busy machine. So the strategy of such a test has a limit that is never reached,
`PATIENT`, and the code that is stuck says how much of it has passed.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from helpers.jobs import until
from replica_engine.watch import watchdog

PATIENT = 25.0  # seconds; less than those after which a warning is logged, which would come too
LEFT = 1.0  # seconds to come from `time_is_nearly_up` to where the caller is stuck


def elapse(seconds: float) -> None:
    """Moves the last sign of life of each run with the limit `PATIENT` so far into the past.

    Two calls without a sign of life between them add up.
    """
    for wait in _waits():
        wait.since -= seconds
    _wake()


def time_is_nearly_up(left: float = LEFT) -> None:
    """Leaves so many seconds of the limit `PATIENT`."""
    for wait in _waits():
        wait.since = time.perf_counter() - PATIENT + left
    _wake()


def wait_until_time_is_up() -> None:
    """Has the limit `PATIENT` run out, and returns when the run knows it."""
    waits = _waits()
    time_is_nearly_up(0.0)
    until(lambda: all(wait.expired for wait in waits))


@contextlib.contextmanager
def time_runs_out(left: float = 0.4) -> Iterator[None]:
    """Has the limit `PATIENT` of what runs in the block run out, so many seconds after it has begun."""
    given_up = threading.Event()

    def until_given_up() -> None:
        while not given_up.wait(2 * left):  # again if the program had not begun, which is a sign of life
            time_is_nearly_up(left)

    thread = threading.Thread(target=until_given_up)
    thread.start()
    try:
        yield
    finally:
        given_up.set()
        thread.join()


def _waits() -> list[watchdog.Wait]:
    return [wait for wait in list(watchdog._watchdog._watches.values()) if wait._timeout == PATIENT]


def _wake() -> None:
    """Has the watchdog look at once, and see when each wait is due now."""
    dog = watchdog._watchdog
    with dog._planning:
        dog._next = 0.0
    dog._wake.set()
