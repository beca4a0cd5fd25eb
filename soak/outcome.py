"""The outcome of one kind of fault or load: its number, its time and its problems."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class Outcome:
    """A row of the table.

    Attributes:
        suite: "faults", "processes", "restarts", "lost", "network", "checkpoints", "backups", "load", "parts"
            or "trainings".
        where: the strategy, or the kind of program.
        what: the fault or load.
        count: how often it was run.
        seconds: the time for all of them.
        problems: the failed checks.
        found: the measurements as text.
    """

    suite: str
    where: str
    what: str
    count: int = 0
    seconds: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)
    found: str = ""

    def add(self, seconds: float, problems: list[str], count: int = 1) -> None:
        """Counts one more."""
        self.count += count
        self.seconds += seconds
        self.problems += problems

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return dataclasses.asdict(self)
