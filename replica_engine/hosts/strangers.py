"""Connections that have not proved yet that they know the token of the job, and what is told of them.

A member that has just connected is one of them for a moment. So nothing here looks at what is new: the ones go that
have been silent for longest, of the host that most come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from replica_engine.errors.timeouts import count_of

T = TypeVar("T")

PATIENCE = 10.0  # seconds to prove that one knows the token, and between two warnings


class Strangers(Generic[T]):
    """The strangers of a coordinator.

    Args:
        address: of the coordinator, for messages.
    """

    def __init__(self, address: str):
        self._address = address
        self._by_host: dict[str, dict[T, float]] = {}  # the time at which each came; the oldest is first
        self._count = 0
        self._refused = 0
        self._last = ""
        self._told = float("-inf")

    def __len__(self) -> int:
        return self._count

    def add(self, stranger: T, host: str, now: float) -> None:
        """A connection has come from a host."""
        self._by_host.setdefault(host, {})[stranger] = now
        self._count += 1

    def discard(self, stranger: T, host: str) -> None:
        """A connection has ended or is a member now."""
        if self._by_host.get(host, {}).pop(stranger, None) is not None:
            self._count -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def to_go(self) -> T:
        """The one that has been there for longest, of the host that most come from."""
        host = max(self._by_host, key=lambda each: len(self._by_host[each]))
        return next(iter(self._by_host[host]))

    def late(self, now: float) -> Iterator[T]:
        """Those that have had their time."""
        for ones in list(self._by_host.values()):
            for stranger, came in list(ones.items()):
                if now - came <= PATIENCE:
                    break
                yield stranger

    def refused(self, peer: str, why: str) -> None:
        """A connection from a peer was closed."""
        self._refused += 1
        self._last = f"{peer}, which {why}"

    def told(self, now: float) -> str:
        """What to tell of those that were refused; "" if there is nothing new, or something was told lately."""
        if not self._refused or now - self._told < PATIENCE:
            return ""
        self._told, count, self._refused = now, self._refused, 0
        return (
            f"{count_of(count, 'connection')} to the coordinator at {self._address} came from others than this job's "
            f"workers and {'was' if count == 1 else 'were'} closed, the last from {self._last}. Workers still get in. "
            "Close the port to other programs, or use a network of its own for the job."
        )
