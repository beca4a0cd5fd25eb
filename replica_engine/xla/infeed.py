"""The queue between the host and the steps of a device loop: bounded; each replica reads it at its own pace.

Batches are numbered. A replica takes its part of several batches at a time, a chunk. A batch leaves the queue when all
replicas have taken their parts.

The end of the inputs is a batch number too, never "now". A replica that is a step ahead must never go on alone, since
the others would not meet it in its collectives. So when a run is stopped, the inputs end after the last batch that any
replica has begun.

For the same reason the first replica that asks for a chunk determines how long the chunk is, and whether it is the
last. The others follow. XLA moves a collective of a value that is the same in each step out of the loop over a chunk,
so all replicas must make the same chunks.

With several workers, a chunk is an offer: each worker has a queue, and the program runs as many steps as the worker
with the fewest batches offers. The next chunk begins after the steps that ran, so what was offered and not used is
offered again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from replica_engine.process.interrupts import MISSED

Parts = Sequence[Any]
"""One batch: each replica's part."""


_SLICE = 0.05  # seconds that a chunk should take: a replica notices that a run was stopped only at the chunk's end


class Pace:
    """The number of steps a chunk may have, so that it takes no longer than `_SLICE`; learned from earlier chunks.

    Args:
        most: the largest number of steps.
    """

    def __init__(self, most: int):
        self.most = most
        self._seconds = _SLICE  # of a step; a slow step is forgotten slowly, since steps may differ

    def chunk(self, ready: int) -> int:
        """The number of batches in the next chunk, of the batches that are ready."""
        return max(1, min(ready, self.most, int(_SLICE / self._seconds)))

    def took(self, count: int, seconds: float) -> None:
        """Notes that a number of steps took this long."""
        self._seconds = max(seconds / count, 0.7 * self._seconds, 1e-9)


class InputQueue:
    """A bounded queue of batches.

    Args:
        replicas: how many replicas read it.
        depth: how many batches it holds at most.
        pace: determines the length of chunks; it outlives the queue.

    Attributes:
        begun: how many batches the replica that is farthest ahead has taken.
    """

    def __init__(self, replicas: int, depth: int, pace: Pace):
        self.begun = 0
        self._pace = pace
        self._running: tuple[int, float] | None = None  # the first batch of the latest chunk, and when it began
        # Chunks that some replicas have yet to begin, by their first batch: the end of each, and whether more follow.
        self._chunks: dict[int, tuple[int, bool]] = {}
        self._depth = depth
        self._batches: dict[int, tuple[Parts, list[int]]] = {}  # by number; with how many replicas have yet to take it
        self._put = 0
        self._end: int | None = None
        self._next = [0] * replicas
        self._changed = threading.Condition()

    def wait_for_room(self) -> int:
        """Waits until there is room for a batch, and returns for how many; 0 if no more batches are wanted."""
        room = self._depth - len(self._batches)
        if self._end is None and room > 0:  # the usual case; no other thread takes this room
            return room
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or len(self._batches) < self._depth)
            return 0 if self._end is not None else self._depth - len(self._batches)

    def put(self, *batches: Parts) -> bool:
        """Waits for room, and adds a batch; False if no more batches are wanted. Only one thread may put at a time.

        Several batches may be put if there is room for all.
        """
        while self.wait_for_room():
            with self._changed:
                if self._end is None:
                    for parts in batches:
                        self._batches[self._put] = parts, [len(self._next)]
                        self._put += 1
                    self._changed.notify_all()
                    return True
        return False

    def close(self) -> None:
        """Ends the inputs: no more batches follow."""
        with self._changed:
            if self._end is None:
                self._end = self._put
                self._changed.notify_all()

    def over(self) -> None:
        """Called when all steps have run."""
        with self._changed:
            self._note_pace(self.begun)

    def _note_pace(self, end: int) -> float:
        """Notes how long the latest chunk took, which ended before the batch `end`."""
        now = time.perf_counter()
        if self._running is not None:
            first, began = self._running
            if end > first:
                self._pace.took(end - first, now - began)
            self._running = None
        return now

    def stop(self) -> None:
        """Ends the inputs early: no replica begins a step that no replica has begun yet."""
        with self._changed:
            self._end = self.begun if self._end is None else min(self._end, self.begun)
            for number in [number for number in self._batches if number >= self._end]:
                del self._batches[number]
            self._changed.notify_all()

    def comes_within(self, seconds: float | None) -> bool:
        """Waits until a batch that no replica has begun is there, or the inputs have ended; False if time runs out."""
        ends = None if seconds is None else time.perf_counter() + seconds
        with self._changed:
            while self._put <= self.begun and self._end is None:
                left = MISSED if ends is None else min(MISSED, ends - time.perf_counter())
                if left <= 0:
                    return False
                self._changed.wait(left)  # see `_chunk`
            return True

    def take(self, replica: int, most: int | None = None) -> tuple[list[Any], bool]:
        """Waits for a replica's next batches, and takes its part of each; an empty list at the end.

        Args:
            replica: the replica.
            most: how many batches it takes at most; None for as many as the pace allows.

        Returns:
            The parts, and whether more will follow. If not, the replica need not call this again.
        """
        with self._changed:
            first = self._next[replica]
            end, more = self._chunk(first, most)
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

    def offer(self, replica: int, done: int) -> tuple[list[Any], bool]:
        """Like `take`, but batches stay until the program has used them; for several workers.

        Args:
            replica: the replica.
            done: how many steps all workers have made.
        """
        with self._changed:
            for number in range(self._next[replica], done):
                waiting = self._batches[number][1]
                waiting[0] -= 1
                if not waiting[0]:
                    del self._batches[number]
            self._next[replica] = done
            for first in [first for first in self._chunks if first < min(self._next)]:
                del self._chunks[first]
            self._changed.notify_all()
            end, more = self._chunk(done)
            return [self._batches[number][0][replica] for number in range(done, end)], more

    def _chunk(self, first: int, most: int | None = None) -> tuple[int, bool]:
        """Waits for the chunk that begins with a batch. Returns its end, and whether another chunk follows."""
        while first not in self._chunks and self._put <= first and self._end is None:
            self._changed.wait(MISSED)  # see `wait_for_ever`; with one replica this may run on the main thread
        if first not in self._chunks:
            end = self._put if self._end is None else min(self._put, self._end)
            if first >= end:
                return first, False
            now = self._note_pace(first)
            count = self._pace.chunk(end - first if most is None else min(end - first, most))
            self._running = first, now
            end = self.begun = first + count
            self._chunks[first] = end, end != self._end
        return self._chunks[first]
