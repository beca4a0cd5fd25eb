"""The base class of every strategy that runs its replicas on this library's threads.

A `tf.distribute.Strategy` has two halves: the strategy, with the methods that users call, and its `extended`, with the
hooks that implement them. `ReplicaThreads` goes in front of an extended class and changes only the hook that calls
replicas. Everything else (variables, datasets, reductions) stays as the extended class has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.errors.base import shown
from replica_engine.threads.call import ReplicaOptions, call_for_each_replica, sync_points


class ReplicaThreads:
    """Runs the replicas of a `tf.distribute` extended class on this library's threads.

    Put it before an extended class in the list of base classes. `docs/custom_strategy.md` describes the hooks.

    Attributes:
        replica_options: how replicas run; set it on the class or on the instance.
    Example:
        >>> from replica_engine.strategies import MirroredExtended, ReplicaThreads
        >>> issubclass(MirroredExtended, ReplicaThreads)
        True
    """

    replica_options = ReplicaOptions()
    compiles = False

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The hook of `tf.distribute`: runs `fn` once per replica, in replica context."""
        return call_for_each_replica(self._container_strategy(), fn, args, kwargs)  # type: ignore[attr-defined]

    def sync_points(self) -> list[SyncPointRecord]:
        """Same as `replica_engine.sync_points`."""
        return sync_points(self._container_strategy())  # type: ignore[attr-defined]

    def host_side_of(self, variable: Any) -> None:
        """Always None: with replica threads, a variable holds its value itself."""


def check_seconds(**values: float | None) -> None:
    """Raises ValueError if a value is neither None nor a positive number of seconds."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise ValueError(f"{name} is in seconds and must be positive, or None; got {shown(value)}.")
