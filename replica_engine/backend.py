"""The contract of a backend: what this library needs of what runs the replicas of a strategy.

A `tf.distribute.Strategy` has two halves: the strategy, with the methods that users call, and its `extended`, with the
hooks that implement them. The extended half of each strategy of this library has a backend, which runs its replicas.
There are two kinds. `threads.replica_run.ThreadBackend` runs each replica's Python code on a thread.
`strategies.compiled_backend.CompiledBackend` compiles one trace for all replicas.

Code above the backends (strategies, Keras, the parity check) relies on the contract and on no class of theirs, but
where only compiled replicas can do what it asks for. The contract suite (`tests/contract`) runs over both.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import tensorflow as tf

from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.workers.saving import Saving

Arguments: TypeAlias = Sequence[Any] | tf.distribute.DistributedValues
Keywords: TypeAlias = Mapping[str, Any] | tf.distribute.DistributedValues | None
"""What `run` takes. It returns what the function returns, with a `DistributedValues` in the place of each leaf that
differs by replica; types cannot say more of it than that None stays None."""


class Backend(abc.ABC):
    """Runs the replicas of one strategy. It holds the strategy weakly, since the strategy's extended half holds it.

    Args:
        strategy: the strategy, which may be without its extended half yet.

    Attributes:
        compiles: whether one trace stands for all replicas; otherwise each replica runs the Python code.
        saving: this worker, as one that saves together with the others; None if it is the only one.
    """

    compiles: ClassVar[bool]
    saving: Saving | None = None

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = weakref.ref(strategy)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A deep copy of a strategy makes a backend of its own."""
        return None

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy; only for code that one of its methods calls."""
        strategy = self._strategy()
        assert strategy is not None, "called by a method of the strategy"
        return strategy

    @abc.abstractmethod
    def run(self, fn: Callable[..., Any], args: Arguments = (), kwargs: Keywords = None) -> Any:
        """Calls `fn` once per replica, in replica context, and returns the regrouped results."""

    def run_again(self, fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any] | None:
        """The result of a run like the last one of `fn`, if the backend knows that one; None if nothing has run."""
        return None

    @abc.abstractmethod
    def sync_points(self) -> list[SyncPointRecord]:
        """The last sync points of each replica, in the order of time."""

    @abc.abstractmethod
    def find_host_side(self, variable: tf.Variable) -> HostSide | None:
        """The host's side of a variable whose value lives on devices; None if the variable itself holds the value."""


class HostSide(Protocol):
    """The host's side of a variable whose value lives on the devices."""

    def attach(self) -> None:
        """Makes the variable show the value on the devices, and makes writes to the variable reach the devices."""

    def used(self, writes: bool) -> None:
        """Called before something uses the variable's handle unnoticed; `writes` tells whether it may write."""

    def release(self) -> None:
        """Makes the variable a plain one again, with the newest value; does nothing if it is one."""


def find_backend(strategy: tf.distribute.Strategy | None) -> Backend | None:
    """The backend of a strategy; None for a strategy that does not run on a backend of this library, and for None."""
    backend = getattr(getattr(strategy, "extended", None), "backend", None)
    return backend if isinstance(backend, Backend) else None


def has_backend(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy runs on a backend of this library."""
    return find_backend(strategy) is not None


def compiles(strategy: tf.distribute.Strategy) -> bool:
    """Whether one trace stands for all replicas of a strategy."""
    backend = find_backend(strategy)
    return backend is not None and backend.compiles
