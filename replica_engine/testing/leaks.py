"""Did a piece of code leave threads behind?"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

_STEP = 0.01  # seconds between looks
_LOOKS = 5  # at least: on a busy machine one collection of garbage may take longer than the whole grace


@contextlib.contextmanager
def no_leaked_threads(grace: float = 5.0, prefix: str = "replica ") -> Iterator[None]:
    """Fails if replica threads that a block started are still there after it.

    Strategies made in the block have to be gone too: their threads go with them.

    Args:
        grace: seconds to give threads that are on their way out.
        prefix: how the names of the threads that count begin; "" counts all.

    Raises:
        AssertionError: naming the threads that stayed.

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
        gc.collect()
        left[0].join(_STEP)
        del left
