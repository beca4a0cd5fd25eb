"""Sync groups: the N threads that run the replicas of a run, and the pool that leases them to runs."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence

from replica_engine.engine.sync_point import SyncRecord
from replica_engine.engine.thread import ReplicaThread
from replica_engine.process import threads


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
        except BaseException:
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
