"""Where replicas meet: the record of a sync point, and the states of a replica between two of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class State(enum.Enum):
    """What a replica is doing in its run. Values are the words that error tables print."""

    IDLE = "not started"
    RUNNING = "running"
    PAUSED = "waiting in a merge call"
    READY = "merged, waiting for its turn"
    FINISHED = "finished"
    FAILED = "failed"
    UNWOUND = "unwound"


@dataclass(frozen=True)
class SyncPoint:
    """One sync point that one replica reached.

    Attributes:
        name: the merge function's qualified name.
        filename: the user's file that made the call.
        lineno: the line in it.
        function: the user's function around it.
        identity: equal for replicas that pass the same merge function, unequal otherwise.
    """

    name: str
    filename: str
    lineno: int
    function: str
    identity: object = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """The place, as "file:line in function"."""
        return f"{self.filename}:{self.lineno} in {self.function}"

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"
