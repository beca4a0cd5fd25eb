"""The first failure of a job, as data: the coordinator keeps it, sends it to all, and each member raises it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from replica_engine import errors
from replica_engine.errors import ReplicaEngineError, WorkerRow

_WORDINGS = {
    "WorkerLostError": ("killed", "exited", "vanished", "raised", "left", "silent", "no_coordinator"),
    "WorkersMissingError": ("not_joined", "not_met", "no_value", "no_room"),
    "WorkerVersionError": ("of_package", "of_replicas"),
    "ProgramDisagreementError": ("differ",),
    "ClusterConfigError": ("other_size", "taken"),
}
"""What may arrive: nothing else is called because a message names it."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Which error to raise, and what it says.

    Attributes:
        wording: the class method that words it: "WorkerLostError.killed".
        arguments: its arguments.
    """

    wording: str
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, wording: Callable[..., ReplicaEngineError], *arguments: Any) -> Failure:
        """The failure that a wording describes."""
        return cls(wording.__qualname__, arguments)

    @classmethod
    def from_json(cls, value: Any) -> Failure:
        """What `as_json` made.

        Raises:
            AttributeError, TypeError or ValueError: it is something else.
        """
        wording, arguments = value
        owner, _, name = wording.partition(".")
        if name not in _WORDINGS.get(owner, ()):
            raise ValueError(f"not a failure: {wording!r}")
        return cls(wording, tuple(_from_json(each) for each in arguments))

    def as_json(self) -> list[Any]:
        """The failure as something that JSON can hold."""
        return [self.wording, [_as_json(each) for each in self.arguments]]

    @property
    def worker(self) -> int | None:
        """The worker that is the cause; None if there is not one of them alone."""
        rows = [each for each in self.arguments[:1] if isinstance(each, WorkerRow)]
        return rows[0].worker if rows else None

    def error(self) -> ReplicaEngineError:
        """The error, made once more for each place that raises it."""
        owner, _, name = self.wording.partition(".")
        error: ReplicaEngineError = getattr(getattr(errors, owner), name)(*self.arguments)
        return error


def _as_json(value: Any) -> Any:
    if isinstance(value, WorkerRow):
        return {"row": dataclasses.asdict(value)}
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return WorkerRow(**value["row"])
    return [_from_json(each) for each in value] if isinstance(value, list) else value
