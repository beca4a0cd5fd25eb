"""One persistent replica thread: parked until it gets a job, and parked again after the job."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from replica_engine.errors import ReplicaUnwound
from replica_engine.process.interrupts import raise_in


class ReplicaThread(threading.Thread):
    """A thread that runs jobs, one at a time, each when `should_run` is set.

    Assigning a job does not start it. Setting `should_run` does, so that the baton of a run (see `run.py`)
    starts the replicas in order. A parked thread holds references only to itself, so it keeps no strategy,
    tensor or function alive. The thread is a daemon: nothing waits for it at interpreter exit.

    A job must never raise; it keeps its outcome as data.

    Attributes:
        should_run: set this event to start or resume the thread.
        replica: the replica that the thread is running; None while it is parked.
    """

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.should_run = Event()
        self.replica: object | None = None
        self._job: Callable[[], None] | None = None
        self._closed = False

    def assign(self, job: Callable[[], None]) -> None:
        """Stores the next job. The thread must be parked."""
        self._job = job

    def close(self) -> None:
        """Tells the thread to end as soon as it has no job."""
        self._closed = True
        self.should_run.set()

    def interrupt(self) -> None:
        """Raises ReplicaUnwound in the thread at its next Python instruction.

        Only for threads that will be closed, because the exception may arrive at any instruction.
        """
        if self.ident is not None:
            raise_in(self.ident, ReplicaUnwound)

    def run(self) -> None:
        """The thread's loop; started by `start()`."""
        try:
            while not self._closed:
                self.should_run.wait()
                if not self._closed:  # The thread was woken to end, not to run a job.
                    self._run_job()
        except ReplicaUnwound:
            return  # The interrupt arrived after the job had ended. The thread will be closed anyway.

    def _run_job(self) -> None:
        """Runs the job, if there is one, in a frame that ends with the job.

        Some tools read the local variables of every frame of a thread, and CPython then keeps the values with
        the frame. If the job were a local variable of `run`, a parked thread would keep the last run alive.
        """
        job, self._job = self._job, None
        if job is not None:
            job()


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
