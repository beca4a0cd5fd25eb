"""A binary event that the waiter consumes: the one thing that replica threads hand each other."""

from __future__ import annotations

import _thread


class Event:
    """Clear at first; `set` wakes one waiter, and waking clears it again.

    An odd use of a lock, in words: the event is clear while the lock is held, and `set` releases it.
    Whoever waits acquires it, which makes the event clear for the next time. `threading.Event` needs a
    condition variable, a second lock and a separate `clear` for the same; a hand-over through this one
    costs a third of that. It may be set from any thread, also twice, which counts as once.

    Example:
        >>> event = Event()
        >>> event.set()
        >>> event.wait(), event.wait(timeout=0.01)
        (True, False)
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes the waiter, now or as soon as it waits."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # It was set already, by us or by another thread a moment ago.

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the event is set and clears it.

        Signals interrupt the wait in the main thread, so Ctrl-C raises out of it.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Returns:
            True if the event was set, False if the time ran out.
        """
        return self._lock.acquire(True, -1 if timeout is None else max(0.0, timeout))
