"""What looks on while replicas run: debug mode (`replica_engine.debugging`), or nothing. It never changes a result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class ObservedRun(Protocol):
    """One run that is looked on at: in eager mode, or as it is traced."""

    def call(self, index: int | None, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the function of a replica; `index` is None where one trace stands for all replicas."""

    def coordinated(self) -> contextlib.AbstractContextManager[object]:
        """Around what the coordinator of replicas on threads does for them."""

    def end(self, results: Any) -> None:
        """Called with what the run returns, and where replicas are on threads, in cross-replica context."""


class Observer(Protocol):
    """Looks on at runs."""

    def begin(self, name: str, devices: Sequence[str]) -> ObservedRun:
        """Called before the replicas of a run begin: with the name of their function, and their devices."""

    def reduced(self, kind: str, value: Any, result: Any) -> None:
        """Called after each `all_reduce` of a replica; `kind` is "SUM", "MEAN", "MIN" or "MAX"."""


current: Observer | None = None
"""Who looks on. Read in each run, and so that a program traced for one observer does not serve another."""
