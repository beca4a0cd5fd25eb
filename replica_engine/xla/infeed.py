"""Inputs on their way to the steps of a device loop: a bounded queue that all replicas read, each at its own pace.

Batches are numbered. A replica takes its part of some at a time, a chunk, and a batch leaves the queue when all have
taken theirs. Where the inputs end is a number too, never "now": a replica that is a step ahead must not go on alone,
since the others would not meet it in its collectives. So when a run is stopped, the end is after the last batch that
any replica has begun. For the same reason the first replica to come says how long a chunk is, and whether it is the
last, and the others follow: XLA takes a collective of a value that is the same in each step out of the loop over a
chunk, and so all replicas must make the same chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from replica_engine.process.interrupts import MISSED

Parts = Sequence[Any]
"""Of one batch: each replica's part."""


_SLICE = 0.05  # seconds that a chunk should take: no replica looks at whether the run goes on before its end


class Pace:
    """How many steps a chunk may have, so that it takes no longer than `_SLICE`; learned from those before.

    Args:
        most: how many at most.
    """

    def __init__(self, most: int):
        self.most = most
        self._seconds = _SLICE  # a step's, and a slow one is forgotten slowly: steps may differ

    def chunk(self, ready: int) -> int:
        """How many of so many batches come next."""
        return max(1, min(ready, self.most, int(_SLICE / self._seconds)))

    def took(self, count: int, seconds: float) -> None:
        """So many steps took so long."""
        self._seconds = max(seconds / count, 0.7 * self._seconds, 1e-9)


class InputQueue:
    """A bounded queue of batches.

    Args:
        replicas: how many replicas read it.
        depth: how many batches it holds at most.
        pace: how long chunks are; it outlives the queue.

    Attributes:
        begun: how many batches the replica that is farthest has taken.
    """

    def __init__(self, replicas: int, depth: int, pace: Pace):
        self.begun = 0
        self._pace = pace
        self._running: tuple[int, float] | None = None  # the steps of the chunk that was begun last, and when
        # That not all have begun, by their first batch: where they end, and whether there are more.
        self._chunks: dict[int, tuple[int, bool]] = {}
        self._depth = depth
        self._batches: dict[int, tuple[Parts, list[int]]] = {}  # by number; with how many replicas are to take it
        self._put = 0
        self._end: int | None = None
        self._next = [0] * replicas
        self._changed = threading.Condition()

    def wait_for_room(self) -> bool:
        """Waits until there is room for a batch; False if no more are wanted."""
        if self._end is None and len(self._batches) < self._depth:  # most often, and nobody else makes it less
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or len(self._batches) < self._depth)
            return self._end is None

    def put(self, parts: Parts) -> bool:
        """Waits for room, and adds a batch; False if no more are wanted. One thread at a time puts."""
        while self.wait_for_room():
            with self._changed:
                if self._end is None:
                    self._batches[self._put] = parts, [len(self._next)]
                    self._put += 1
                    self._changed.notify_all()
                    return True
        return False

    def close(self) -> None:
        """There are no more batches."""
        with self._changed:
            if self._end is None:
                self._end = self._put
                self._changed.notify_all()

    def over(self) -> None:
        """All steps have run."""
        with self._changed:
            self._note_pace()

    def _note_pace(self) -> float:
        now = time.perf_counter()
        if self._running is not None:
            count, began = self._running
            self._pace.took(count, now - began)
            self._running = None
        return now

    def stop(self) -> None:
        """No replica is to begin a step that none has begun."""
        with self._changed:
            self._end = self.begun if self._end is None else min(self._end, self.begun)
            for number in [number for number in self._batches if number >= self._end]:
                del self._batches[number]
            self._changed.notify_all()

    def take(self, replica: int) -> tuple[list[Any], bool]:
        """Waits for a replica's next batches, and takes its part of each; none at the end.

        Returns:
            Also whether there will be more. If not, this needs not be called again.
        """
        with self._changed:
            first = self._next[replica]
            end, more = self._chunk(first)
            taken = []
            for number in range(first, end):
                parts, waiting = self._batches[number]
                taken.append(parts[replica])
                waiting[0] -= 1
                if not waiting[0]:
                    del self._batches[number]
                    self._chunks.pop(first, None)
            self._next[replica] = end
            self._changed.notify_all()
            return taken, more

    def _chunk(self, first: int) -> tuple[int, bool]:
        """Waits for the chunk that begins with a batch: where it ends, and whether there is another one."""
        while first not in self._chunks and self._put <= first and self._end is None:
            self._changed.wait(MISSED)  # as `wait_for_ever`: a replica of one may run on the main thread
        if first not in self._chunks:
            end = self._put if self._end is None else min(self._put, self._end)
            if first >= end:
                return first, False
            now = self._note_pace()
            count = self._pace.chunk(end - first)
            self._running = count, now
            end = self.begun = first + count
            self._chunks[first] = end, end != self._end
        return self._chunks[first]
