"""The contract of a backend: what this library asks of an extended strategy beyond what `tf.distribute` asks.

There are two backends. `ReplicaThreads` runs each replica's Python code on a thread; `TPUExtended` compiles one trace
for all replicas. Code above the strategies (Keras, the parity check) asks for this contract and never for a class. The
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
        compiles: whether one trace stands for all replicas. If not, each replica runs the Python code itself.
    """

    compiles: bool

    def call_for_each_replica(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Calls `fn` once for each replica, in replica context, and returns the regrouped results."""

    def sync_points(self) -> list[SyncPointRecord]:
        """The last sync points of each replica, in the order of time."""

    def host_side_of(self, variable: Any) -> HostSide | None:
        """How a plain variable follows its value on the devices; None where it holds the value itself."""


class HostSide(Protocol):
    """The host's side of a variable whose value lives on the devices."""

    def attach(self) -> None:
        """The variable shows the value on the devices, and writes to the variable reach the devices."""

    def release(self) -> None:
        """The variable is a plain one again, with the newest value."""


def backend_of(strategy: tf.distribute.Strategy) -> Backend | None:
    """The backend of a strategy, or None for a strategy that is not on one of this library's."""
    extended = strategy.extended
    return extended if isinstance(extended, Backend) else None


def compiles(strategy: tf.distribute.Strategy) -> bool:
    """Whether one trace stands for all replicas of a strategy."""
    backend = backend_of(strategy)
    return backend is not None and backend.compiles
