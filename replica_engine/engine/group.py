"""Sync groups: the N threads that run the replicas of one run together, and the pool that leases them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence

from replica_engine.engine.sync_point import SyncRecord
from replica_engine.engine.thread import ReplicaThread


class SyncGroup:
    """N parked replica threads, one a device, named "replica 1 of 4 (CPU:1)".

    The threads end when the group is closed or garbage collected: they do not refer to it.

    Args:
        devices: in the short form "CPU:1".
        record: of the sync points; None begins one.
        name: of who runs on them, for timelines.
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
        self._closer.atexit = False  # A run may be on its way then, in a thread that nobody waits for.
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Lets the threads end. Does not wait for them."""
        self._closer()


class GroupPool:
    """Leases sync groups of one set of devices, and keeps a few for later runs.

    Two user threads that call `run` at once, or a `run` inside a merge function, get a group each, so no
    run ever waits for another's threads. Only a group whose run ended well comes back: then every event
    that was set has been waited for, every thread is parked, and the next run may trust both. A group
    whose run failed is closed, so no left-over wake-up can start a later run out of order.

    Args:
        devices: in the short form "CPU:1".
        name: of who runs on them, for timelines.

    Attributes:
        devices: in the short form.
        record: the last sync points on them.
    """

    KEPT = 4  # idle groups; enough for nested runs and a few user threads, bounded for many

    def __init__(self, devices: Sequence[str], name: str = "replicas"):
        self.devices = tuple(devices)
        self._name = name
        self.record = SyncRecord(len(self.devices))
        self._idle: list[SyncGroup] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lease(self) -> Iterator[SyncGroup]:
        """A group for the time of one run."""
        with self._lock:
            group = self._idle.pop() if self._idle else None
        if group is None:
            group = SyncGroup(self.devices, self.record, self._name)
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
        """Closes the idle groups; leased ones go when their run ends and nobody holds them."""
        with self._lock:
            idle, self._idle = self._idle, []
        for group in idle:
            group.close()


def _close(threads: list[ReplicaThread]) -> None:
    for thread in threads:
        thread.close()
