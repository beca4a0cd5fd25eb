"""Inputs on their way to the steps of a device loop: a bounded queue that all replicas read, each at its own pace.

Batches are numbered. A replica takes its part of each in turn, and a batch leaves the queue when all have taken
theirs. Where the inputs end is a number too, never "now": a replica that is a step ahead must not go on alone, since
the others would not meet it in its collectives. So when a run is stopped, the end is after the last batch that any
replica has begun.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

Parts = Sequence[Any]
"""Of one batch: each replica's part."""


class InputQueue:
    """A bounded queue of batches.

    Args:
        replicas: how many replicas read it.
        depth: how many batches it holds at most.

    Attributes:
        begun: how many batches the replica that is farthest has taken.
    """

    def __init__(self, replicas: int, depth: int):
        self.begun = 0
        self._depth = depth
        self._batches: dict[int, tuple[Parts, list[int]]] = {}  # by number; with how many replicas are to take it
        self._put = 0
        self._end: int | None = None
        self._next = [0] * replicas
        self._changed = threading.Condition()

    def wait_for_room(self) -> bool:
        """Waits until there is room for a batch; False if no more are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or len(self._batches) < self._depth)
            return self._end is None

    def put(self, parts: Parts) -> bool:
        """Waits for room, and adds a batch; False if no more are wanted."""
        with self._changed:
            if not self.wait_for_room():
                return False
            self._batches[self._put] = parts, [len(self._next)]
            self._put += 1
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """There are no more batches."""
        with self._changed:
            if self._end is None:
                self._end = self._put
                self._changed.notify_all()

    def stop(self) -> None:
        """No replica is to begin a step that none has begun."""
        with self._changed:
            self._end = self.begun if self._end is None else min(self._end, self.begun)
            for number in [number for number in self._batches if number >= self._end]:
                del self._batches[number]
            self._changed.notify_all()

    def take(self, replica: int) -> Any:
        """Waits for a replica's next batch, and takes its part; None at the end."""
        with self._changed:
            number = self._next[replica]
            batch = self._batches.get(number)
            while batch is None and (self._end is None or number < self._end):
                self._changed.wait()
                batch = self._batches.get(number)
            if batch is None:
                return None
            parts, waiting = batch
            self._next[replica] += 1
            self.begun = max(self.begun, number + 1)
            waiting[0] -= 1
            if not waiting[0]:
                del self._batches[number]
                self._changed.notify_all()
            return parts[replica]
