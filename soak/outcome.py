"""What became of one kind of fault or load: how often, how long, and what was wrong."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class Outcome:
    """A row of the table.

    Attributes:
        suite: "faults", "processes" or "load".
        where: the strategy, or what kind of program.
        what: what was done to it.
        count: how often.
        seconds: how long that took altogether.
        problems: what was wrong.
        found: what was measured, in words.
    """

    suite: str
    where: str
    what: str
    count: int = 0
    seconds: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)
    found: str = ""

    def add(self, seconds: float, problems: list[str], count: int = 1) -> None:
        """It was done once more."""
        self.count += count
        self.seconds += seconds
        self.problems += problems

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return dataclasses.asdict(self)
