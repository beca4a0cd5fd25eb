"""Sync points, where the replicas of a run meet, and the record of the last ones."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field


@dataclass
class SyncPoint:
    """One sync point that one replica reached.

    Attributes:
        name: the merge function's qualified name.
        filename: the user's file that made the call.
        lineno: the line of the call in that file.
        function: the user's function that made the call.
        identity: equal for replicas that pass the same merge function, unequal otherwise; None after the replica has
            taken it.
        kind: "merge_call", or the operation if it is known, such as "all_reduce".
        how: what must be equal on all replicas beside the kind, in words: "SUM", "axis=1"; "" if there is nothing.
        traced: whether a function was being traced when the replica reached the sync point.
        values: a description of each tensor that the replica brought; the engine keeps it and never reads it.
        thread: the thread of the replica; 0 if it is not known.
        run: the number of the run, among the runs on the same devices.
        number: 1-based index of this sync point in the replica's run.
        arrived: when the replica arrived, in seconds of `time.perf_counter`; 0.0 if it has not arrived.
        merged: when the merge of all replicas began and ended, in the same seconds.
        left: when the replica continued, in the same seconds; 0.0 if it has not continued.
    """

    name: str
    filename: str
    lineno: int
    function: str
    # Out of comparisons and texts, as all that follow with `compare=False`: it may be an object of the user.
    identity: object = field(default=None, repr=False, compare=False)
    kind: str = "merge_call"
    how: str = field(default="", repr=False, compare=False)
    traced: bool = False
    values: tuple = field(default=(), repr=False, compare=False)
    thread: int = field(default=0, repr=False, compare=False)
    run: int = field(default=0, compare=False)
    number: int = field(default=0, compare=False)
    arrived: float = field(default=0.0, compare=False)
    merged: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    left: float = field(default=0.0, compare=False)

    @property
    def where(self) -> str:
        """The place of the call, as "file:line in function"."""
        return f"{self.filename}:{self.lineno} in {self.function}"

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"


class SyncRecord:
    """The last sync points of each replica on one set of devices, across all runs there.

    Args:
        size: the number of replicas.
    """

    KEPT = 100  # sync points kept for each replica

    def __init__(self, size: int):
        self.rings: tuple[deque[SyncPoint], ...] = tuple(deque(maxlen=self.KEPT) for _ in range(size))
        self._runs = itertools.count()

    def new_run(self) -> int:
        """The number for a run that begins."""
        return next(self._runs)
