"""The contract of a backend: what this library needs of an extended strategy beyond what `tf.distribute` needs.

There are two backends. `ReplicaThreads` runs each replica's Python code on a thread; `TPUExtended` compiles one trace
for all replicas. Code above the strategies (Keras, the parity check) relies on this contract and never on a class. The
contract suite (`tests/contract`) runs over every strategy that fulfils it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from replica_engine.diagnostics.flight_record import SyncPointRecord


@runtime_checkable
class Backend(Protocol):
    """The extended half of a strategy that runs on a backend of this library.

    Attributes:
        compiles: whether one trace stands for all replicas; otherwise each replica runs the Python code.
    """

    compiles: bool

    def call_for_each_replica(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Calls `fn` once per replica, in replica context, and returns the regrouped results."""

    def sync_points(self) -> list[SyncPointRecord]:
        """The last sync points of each replica, in the order of time."""

    def host_side_of(self, variable: Any) -> HostSide | None:
        """The host's side of a variable whose value lives on devices; None if the variable itself holds the value."""


class HostSide(Protocol):
    """The host's side of a variable whose value lives on the devices."""

    def attach(self) -> None:
        """Makes the variable show the value on the devices, and makes writes to the variable reach the devices."""

    def release(self) -> None:
        """Makes the variable a plain one again, with the newest value."""


def backend_of(strategy: tf.distribute.Strategy) -> Backend | None:
    """The backend of a strategy; None for a strategy that does not run on a backend of this library."""
    extended = strategy.extended
    return extended if isinstance(extended, Backend) else None


def compiles(strategy: tf.distribute.Strategy) -> bool:
    """Whether one trace stands for all replicas of a strategy."""
    backend = backend_of(strategy)
    return backend is not None and backend.compiles
