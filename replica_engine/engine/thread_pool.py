"""The threads of replicas: each is parked between jobs, and a pool leases groups of them to runs."""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

from replica_engine.engine.sync_point import SyncRecord
from replica_engine.errors import ReplicaUnwound
from replica_engine.process import interrupts, threads


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
        # A list and not an attribute that is None in between: `pop` takes the job and forgets it in one step.
        self._jobs: list[Callable[[], None]] = []  # the next one, until the thread takes it
        self._closed = False

    def assign(self, job: Callable[[], None]) -> None:
        """Stores the next job. The thread must be parked."""
        self._jobs = [job]

    def close(self) -> None:
        """Tells the thread to end as soon as it has no job."""
        self._closed = True
        self.should_run.set()

    def interrupt(self) -> None:
        """Raises ReplicaUnwound in the thread at its next Python instruction.

        Only for threads that will be closed, because the exception may arrive at any instruction.
        """
        if self.ident is not None:
            interrupts.raise_in(self.ident, ReplicaUnwound)

    def run(self) -> None:
        """The thread's loop; started by `start()`.

        Some tools read the local variables of every frame of a thread, and CPython then keeps the values with
        the frame. If the job were a local variable here, a parked thread would keep the last run alive.
        """
        try:
            while not self._closed:
                self.should_run.wait()
                if self._jobs and not self._closed:  # The thread may have been woken to end, not to run a job.
                    self._jobs.pop()()
        except ReplicaUnwound:
            return  # The interrupt arrived after the job had ended. The thread will be closed anyway.


class Event:
    """An event that is clear at first. `set` wakes one waiting thread, and the wake-up clears the event again.

    The class uses a lock in an unusual way. The event is clear while the lock is held, and `set` releases the
    lock. The waiting thread acquires the lock, and so clears the event for the next wait. `threading.Event`
    needs a condition variable, a second lock and a separate `clear` for the same purpose; a hand-over through
    this class costs a third of that. Any thread may set the event. Setting it twice counts as once.

    Attributes:
        wait: waits until the event is set, and clears it; takes the longest wait in seconds, at least 0, or waits for
            ever. Returns True if the event was set, False if the time ran out. In the main thread a signal interrupts
            the wait, so Ctrl-C raises KeyboardInterrupt out of it. It is the method of the lock, without a call of
            Python's around it, since replicas wait at each hand-over.

    Example:
        >>> event = Event()
        >>> event.set()
        >>> event.wait(), event.wait(timeout=0.01)
        (True, False)
    """

    __slots__ = ("_lock", "wait")

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self.wait: Callable[..., bool] = functools.partial(self._lock.acquire, True)

    def set(self) -> None:
        """Wakes the waiting thread, now or as soon as a thread waits."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # The event is already set, by this thread or by another one.


class SyncGroup:
    """N parked replica threads, one for each device, named "replica 1 of 4 (CPU:1)" and so on.

    The threads end when the group is closed or garbage collected. They hold no reference to the group.

    Args:
        devices: the devices, in the short form "CPU:1".
        record: the record of sync points to continue; None begins a new one.
        name: the name under which timelines show the threads, such as the name of the strategy.
    """

    def __init__(self, devices: Sequence[str], record: SyncRecord | None = None, name: str = "replicas"):
        self.devices = tuple(devices)
        self.record = record or SyncRecord(len(self.devices))
        self.name = name
        size = len(self.devices)
        self.threads = [
            ReplicaThread(f"replica {index} of {size} ({device})") for index, device in enumerate(self.devices)
        ]
        self._closer = weakref.finalize(self, _close, self.threads)
        self._closer.atexit = False  # At exit a daemon thread may still be in a run on these threads.
        for thread in self.threads:
            threads.start(thread)

    def close(self) -> None:
        """Tells the threads to end, and does not wait for them."""
        self._closer()


class GroupPool:
    """Leases sync groups on one set of devices to runs, and keeps a few idle groups for later runs.

    Two user threads that call `run` at the same time get a group each, and so does a `run` inside a merge
    function. So no run ever waits for the threads of another run. A group returns to the pool only if its run
    ended well: then a thread has waited for every event that was set, and every thread is parked, so the next
    run can rely on both. A group whose run failed is closed, so that no left-over wake-up starts a later run
    out of order.

    Args:
        devices: the devices, in the short form "CPU:1".
        name: the name under which timelines show the threads, such as the name of the strategy.

    Attributes:
        devices: the devices, in the short form "CPU:1".
        name: the name under which timelines show the threads.
        record: the last sync points on these devices.
    """

    KEPT = 4  # idle groups: enough for nested runs and a few user threads; the limit matters if there are many threads

    def __init__(self, devices: Sequence[str], name: str = "replicas"):
        self.devices = tuple(devices)
        self.name = name
        self.record = SyncRecord(len(self.devices))
        self._idle: list[SyncGroup] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lease(self) -> Iterator[SyncGroup]:
        """Leases a group for one run: a context manager. An exception closes the group."""
        with self._lock:
            group = self._idle.pop() if self._idle else None
        if group is None:
            group = SyncGroup(self.devices, self.record, self.name)
        try:
            yield group
        except BaseException:  # without the lock: the collector may free a lease on a thread that has it
            group.close()
            raise
        with self._lock:
            if len(self._idle) < self.KEPT:
                self._idle.append(group)
                return
        group.close()

    def close(self) -> None:
        """Closes the idle groups. A leased group ends when its run has ended and nothing refers to it."""
        with self._lock:
            idle, self._idle = self._idle, []
        for group in idle:
            group.close()


def _close(parked: list[ReplicaThread]) -> None:
    for thread in parked:
        thread.close()
