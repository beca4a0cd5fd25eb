"""The binary event with which replica threads and the coordinator wake each other."""

from __future__ import annotations

import _thread


class Event:
    """An event that is clear at first. `set` wakes one waiting thread, and the wake-up clears the event again.

    The class uses a lock in an unusual way. The event is clear while the lock is held, and `set` releases the
    lock. The waiting thread acquires the lock, and so clears the event for the next wait. `threading.Event`
    needs a condition variable, a second lock and a separate `clear` for the same purpose; a hand-over through
    this class costs a third of that. Any thread may set the event. Setting it twice counts as once.

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
        """Wakes the waiting thread, now or as soon as a thread waits."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # The event is already set, by this thread or by another one.

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the event is set, and clears it.

        In the main thread a signal interrupts the wait, so Ctrl-C raises KeyboardInterrupt out of it.

        Args:
            timeout: the longest wait, in seconds; None waits for ever.

        Returns:
            True if the event was set, False if the time ran out.
        """
        return self._lock.acquire(True, -1 if timeout is None else max(0.0, timeout))
