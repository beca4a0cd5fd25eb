"""Where replicas meet: a sync point, the record of the last ones, and the states of a replica between two of them."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field


class State(enum.Enum):
    """What a replica is doing in its run. Values are the words that error tables print."""

    IDLE = "not started"
    RUNNING = "running"
    PAUSED = "waiting in a merge call"
    READY = "merged, waiting for its turn"
    FINISHED = "finished"
    UNWINDING = "being taken down"
    FAILED = "failed"
    UNWOUND = "unwound"


@dataclass
class SyncPoint:
    """One sync point that one replica reached.

    Attributes:
        name: the merge function's qualified name.
        filename: the user's file that made the call.
        lineno: the line in it.
        function: the user's function around it.
        identity: equal for replicas that pass the same merge function, unequal otherwise; None once it has been taken.
        kind: "merge_call", or what it does if that is known, such as "all_reduce".
        traced: whether it was reached while a function was traced.
        values: what is known of each tensor that the replica brought; the engine only keeps it.
        run: the number of the run, among those of the same devices.
        number: the how manieth sync point of the replica in its run, from 1.
        arrived: when the replica came, in seconds of `time.perf_counter`; 0.0 if it has not.
        merged: when all had come and were merged: beginning and end.
        left: when the replica went on; 0.0 if it has not.
    """

    name: str
    filename: str
    lineno: int
    function: str
    identity: object = field(default=None, repr=False, compare=False)
    kind: str = "merge_call"
    traced: bool = False
    values: tuple = field(default=(), repr=False, compare=False)
    run: int = field(default=0, compare=False)
    number: int = field(default=0, compare=False)
    arrived: float = field(default=0.0, compare=False)
    merged: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    left: float = field(default=0.0, compare=False)

    @property
    def where(self) -> str:
        """The place, as "file:line in function"."""
        return f"{self.filename}:{self.lineno} in {self.function}"

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"


class SyncRecord:
    """The last sync points of each replica on one set of devices, whatever run they were in.

    Args:
        size: how many replicas.
    """

    KEPT = 100  # of each replica

    def __init__(self, size: int):
        self.rings: tuple[deque[SyncPoint], ...] = tuple(deque(maxlen=self.KEPT) for _ in range(size))
        self._runs = itertools.count()

    def new_run(self) -> int:
        """The number of a run that begins."""
        return next(self._runs)
