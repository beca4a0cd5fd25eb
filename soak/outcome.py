"""The outcome of one kind of fault or load: its number, its time and its problems."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Outcome:
    """A row of the table."""

    suite: str  # a key of `__main__.SUITES`
    where: str  # the strategy, or the kind of program
    what: str  # the fault or load
    count: int = 0  # how often it was run
    seconds: float = 0.0  # the time for all of them
    problems: list[str] = dataclasses.field(default_factory=list)  # the failed checks
    found: str = ""  # the measurements as text

    def add(self, seconds: float, problems: list[str], count: int = 1) -> None:
        """Counts one more."""
        self.count += count
        self.seconds += seconds
        self.problems += problems


def tell(what: str, wrong: list[str], found: object = "") -> None:
    """Prints how one of them ended."""
    print(f"  {what}: {f'FAILED {wrong}' if wrong else f'ok, {found}'}", flush=True)
