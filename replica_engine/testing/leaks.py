"""Checks whether a piece of code leaves threads behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

_STEP = 0.05  # seconds at most between checks: on a busy machine a thread takes some to end
_LOOKS = 5  # at least: on a busy machine one garbage collection may take longer than the grace period


@contextlib.contextmanager
def no_leaked_threads(grace: float = 5.0, prefix: str = "replica ") -> Iterator[None]:
    """Fails if replica threads that started in the block still run after it.

    Strategies made in the block must be freed too, because their threads end with them.

    Args:
        grace: the seconds to wait for threads that are about to end.
        prefix: the start of the names of the threads that count; "" counts all threads.

    Raises:
        AssertionError: threads are left; the message names them.

    Example:
        >>> from replica_engine.testing import no_leaked_threads
        >>> with no_leaked_threads():
        ...     pass
    """
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + grace
    looks = 0
    while left := [t for t in threading.enumerate() if t not in before and t.name.startswith(prefix)]:
        looks += 1
        if looks > _LOOKS and time.monotonic() > deadline:
            raise AssertionError(f"threads left behind: {sorted(thread.name for thread in left)}")
        gc.collect(1 if looks == 1 else 2)  # what the block made is young; older objects take many times as long
        left[0].join(_STEP)
        del left
