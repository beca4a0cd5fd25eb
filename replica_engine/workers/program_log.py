"""What each worker has launched, in order, compared while nobody waits.

A worker's log is the list of what it did with the others: compiled a program, launched it, or waited at a point where
all meet. All logs must be the same list. An entry is 8 bytes, a hash of the kind and of the program, so comparing a
batch of entries is comparing bytes.

One list serves all workers: it ends where the fastest worker is, and begins where the slowest one is. The worker that
brings an entry first decides what the others are compared with; the error does not say which of them is right.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ENTRY = 8  # bytes
MOST_ENTRIES = 1 << 20  # in one message: more is a member that is broken


def entry(kind: str, digest: str) -> bytes:
    """An entry of a log: what was done, `LAUNCH` for example, and the digest of the program."""
    return hashlib.blake2b(f"{kind} {digest}".encode(), digest_size=ENTRY).digest()


COMPILE, LAUNCH, WAIT = "compilation of", "launch of", "wait at"
"""What an entry may be, followed by the program or the place."""

END = entry("end", "")
"""The entry of a worker whose program has come to its end."""

Ticket = tuple[int, int]
"""A wait: the worker, and the number that it gave to the wait."""


@dataclass(frozen=True)
class Program:
    """A program as the workers compare it.

    Attributes:
        digest: a hash of the program; it must be equal on all workers.
        body: the name of the function that it was made of.
        where: the file and line of that function: "train.py:40".
        takes: its arguments, as far as the program depends on them: "x float32[16,8]".
    """

    digest: str
    body: str
    where: str = ""
    takes: str = ""

    @property
    def words(self) -> str:
        """The program in words: "`train_step` at train.py:40 of x float32[16,8], program 2d03ab12"."""
        where, takes = self.where and f" at {self.where}", self.takes and f" of {self.takes}"
        return f"`{self.body}`{where}{takes}, program {self.digest[:8]}"


def backwards(entries: bytes) -> Iterator[bytes]:
    """The single entries, from the last to the first."""
    for end in range(len(entries), 0, -ENTRY):
        yield entries[end - ENTRY : end]


def packed(entries: Sequence[bytes]) -> str:
    """Entries as text; equal ones in a row are counted, because most steps launch what the last one launched."""
    runs: list[tuple[bytes, int]] = []
    for each in entries:
        if runs and runs[-1][0] == each:
            runs[-1] = (each, runs[-1][1] + 1)
        else:
            runs.append((each, 1))
    return ",".join(f"{each.hex()}*{count}" if count > 1 else each.hex() for each, count in runs)


@functools.lru_cache(maxsize=64)  # a thousand workers send the same text
def unpacked(text: str) -> bytes:
    """The entries, as bytes, of a text that `packed` made.

    Raises:
        ValueError: the text is something else.
    """
    found = bytearray()
    for part in text.split(","):
        code, _, count = part.partition("*")
        one = bytes.fromhex(code)
        times = int(count) if count else 1
        # A count in a few bytes of text could ask for gigabytes.
        if len(one) != ENTRY or not 1 <= times <= MOST_ENTRIES - len(found) // ENTRY:
            raise ValueError(f"not a list of entries: {text[:80]!r}")
        found += one * times
    return bytes(found)


class Disagreement(NamedTuple):
    """Two workers differ.

    Attributes:
        position: the place in the log, from 0.
        entries: what there is at that place, and which workers have it there.
    """

    position: int
    entries: dict[bytes, tuple[int, ...]]


@dataclass
class _Point:
    """An entry at which workers wait for the others."""

    come: int
    waiting: list[Ticket] = field(default_factory=list)


class LaunchLog:
    """The logs of all workers.

    Args:
        size: the number of workers.
    """

    def __init__(self, size: int):
        self._size = size
        self._entries = bytearray()
        self._first = 0  # the position of the first entry that is kept
        self._positions = [0] * size
        self._points: dict[int, _Point] = {}

    def position(self, worker: int) -> int:
        """The number of entries that a worker has."""
        return self._positions[worker]

    @property
    def passed(self) -> int:
        """The number of entries that all workers have."""
        return min(self._positions)

    def extend(self, worker: int, entries: bytes) -> Disagreement | None:
        """Adds entries to the log of a worker.

        Returns:
            The first place at which it differs from others, or None. The log of the worker ends before that place.
        """
        before = self._positions[worker]
        at = (before - self._first) * ENTRY
        # Bytes are compared at once; single entries only where they differ.
        known = self._entries[at : at + len(entries)]
        equal = known == entries[: len(known)]
        if equal:
            self._entries += entries[len(known) :]
            count = len(entries) // ENTRY
        else:
            count = next(i for i in range(len(known) // ENTRY) if _at(known, i) != _at(entries, i))
        after = self._positions[worker] = before + count
        for position, point in self._points.items():
            point.come += before <= position < after
        if equal:
            return None
        others = tuple(other for other in range(self._size) if self._positions[other] > after)
        return Disagreement(after, {_at(known, count): others, _at(entries, count): (worker,)})

    def withdraw(self, worker: int) -> None:
        """Takes the last entry of a worker back: a launch that it has not made.

        Raises:
            ValueError: it has none.
        """
        if self._positions[worker] == self._first:
            raise ValueError("no entry that can be taken back")
        self._positions[worker] -= 1
        del self._entries[(max(self._positions) - self._first) * ENTRY :]

    def wait(self, worker: int, ticket: Ticket) -> int:
        """Marks that a worker waits at its last entry until all others have come to it.

        Args:
            worker: its index.
            ticket: what `released` returns for this wait.

        Returns:
            The position of the entry.
        """
        position = self._positions[worker] - 1
        point = self._points.get(position)
        if point is None:
            point = self._points[position] = _Point(sum(each > position for each in self._positions))
        point.waiting.append(ticket)
        return position

    def give_up(self, position: int, ticket: Ticket) -> tuple[int, ...]:
        """Ends a wait, and returns the workers that have not come."""
        if position in self._points:
            self._points[position].waiting.remove(ticket)
        return tuple(other for other in range(self._size) if self._positions[other] <= position)

    def released(self) -> list[Ticket]:
        """The waits that are over because all have come; each is returned once."""
        full = [position for position, point in self._points.items() if point.come == self._size]
        return [ticket for position in full for ticket in self._points.pop(position).waiting]

    def prune(self) -> None:
        """Drops the entries that all workers have passed, except the last one, which a worker may take back."""
        passed = max(self.passed - 1, self._first)
        del self._entries[: (passed - self._first) * ENTRY]
        self._first = passed


def _at(entries: bytes | bytearray, index: int) -> bytes:
    return bytes(entries[index * ENTRY : (index + 1) * ENTRY])
