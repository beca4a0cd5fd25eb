"""Counts of traces, lowerings, compiles and launches in this process: for tests, and to explain why a step is slow."""

from __future__ import annotations

import dataclasses
import threading

_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often this process has traced, lowered, compiled and launched, as `counts` returns it.

    Attributes:
        traces: how many times a Python function became a graph; twice for a function that creates variables.
        lowerings: how many times a graph became a program.
        compiles: how many times a program became an executable.
        launches: how many times an executable ran.
        cache_hits: how many executables were read from the cache folder (`set_cache_dir`) instead of compiled.
    """

    traces: int = 0
    lowerings: int = 0
    compiles: int = 0
    launches: int = 0
    cache_hits: int = 0

    def __sub__(self, other: Counts) -> Counts:
        """The counts between two moments."""
        return Counts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


_now = {field.name: 0 for field in dataclasses.fields(Counts)}


def counts() -> Counts:
    """Returns how often this process has traced, lowered, compiled and launched so far.

    Example:
        >>> from replica_engine import xla
        >>> before = xla.counts()
        >>> program = xla.lower(lambda x: x + 1, [[1.0], [2.0]])
        >>> xla.counts() - before
        Counts(traces=1, lowerings=1, compiles=0, launches=0, cache_hits=0)
    """
    with _lock:
        return Counts(**_now)


def count(what: str) -> None:
    """Adds one to the count with this name."""
    with _lock:
        _now[what] += 1
