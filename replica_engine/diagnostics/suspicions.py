"""Warnings about programs that run, and probably do not do what their author wants. None is logged twice for a cause.

A warning must never come for a program that is right. So each of these looks at what happens, and not at how a program
is written: every replica goes through all of a dataset; two replicas add to one variable.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute, variables
from replica_engine._tf.graphs import subgraphs
from replica_engine.diagnostics.op_lines import here, user_line
from replica_engine.engine import SyncPoint
from replica_engine.errors import InputsError
from replica_engine.errors.inputs import warn_dataset_for_each
from replica_engine.errors.scopes import warn_foreign_optimizer, warn_shared_variable
from replica_engine.errors.threads import warn_different_lines

_logger = logging.getLogger("replica_engine")
_OF_REPLICA = re.compile(r"(?:^|/)(replica_\d+)/")
_told: weakref.WeakKeyDictionary[object, dict[Hashable, object]] = weakref.WeakKeyDictionary()


def warn_once(owner: object, key: Hashable, text: str) -> None:
    """Logs a warning, unless it was logged for this strategy or model, and key."""
    mine = object()
    if _told.setdefault(owner, {}).setdefault(key, mine) is mine:  # of several threads, one; without a lock
        _logger.warning(text)


class Named:
    """The objects of one kind that warnings have named: each object once, and not more than `MOST` objects.

    A model that was made outside the scope may have hundreds of variables, and the first few say what is wrong. The
    objects are known by reference, since two may have one name, and weakly, since a program may make many.
    """

    MOST = 5

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._known: dict[int, weakref.ref[object]] = {}

    def warn(self, each: object, text: Callable[[], str]) -> None:
        """Logs a warning about an object, unless one was logged; the last one says that it is the last."""
        key = id(each)
        with self._lock:  # replicas that run at the same time find the same object
            if key in self._known or self._count >= self.MOST:
                return
            self._known[key] = weakref.ref(each, lambda _: self._known.pop(key, None))
            self._count += 1
            is_last = self._count == self.MOST
        _logger.warning(text() + (f"\nThis is the last of {self.MOST} such warnings; more are not logged." * is_last))


_named: weakref.WeakKeyDictionary[tf.distribute.Strategy, dict[str, Named]] = weakref.WeakKeyDictionary()


def _named_of(strategy: tf.distribute.Strategy, kind: str) -> Named:
    return _named.setdefault(strategy, {}).setdefault(kind, Named())


def check_inputs(
    strategy: tf.distribute.Strategy, args: Sequence[object], kwargs: Any, size: int, compiles: bool
) -> None:
    """Looks at the arguments of a run.

    Args:
        strategy: the strategy.
        args: the positional arguments of the function that replicas run.
        kwargs: its keyword arguments; None for none.
        size: the number of replicas.
        compiles: whether the strategy compiles; a compiled body refuses datasets itself.

    Raises:
        InputsError: an argument is a distributed dataset or an iterator over one.
    """
    values = [*args, *kwargs.values()] if isinstance(kwargs, Mapping) else list(args)
    for index, value in enumerate(values):
        is_distributed = None if compiles else _is_distributed(type(value))  # type: ignore[arg-type]
        if is_distributed is not None:
            name = f"args[{index}]" if index < len(args) else list(kwargs)[index - len(args)]
            if is_distributed:
                raise InputsError.distributed(name, type(value).__name__.lstrip("_"))
            if size > 1:
                warn_once(strategy, ("dataset", name), warn_dataset_for_each(name, size, here()))


@functools.cache
def _is_distributed(kind: Hashable) -> bool | None:
    """For the type of a dataset, whether it is a distributed one; None for all other types."""
    assert isinstance(kind, type)
    if issubclass(kind, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        return True
    return False if issubclass(kind, tf.data.Dataset) else None


def check_lines(strategy: tf.distribute.Strategy, points: Sequence[SyncPoint]) -> None:
    """Warns if replicas meet from different lines: what they bring may not belong together.

    Args:
        strategy: the strategy.
        points: the sync point of each replica.
    """
    first = points[0]
    for replica, point in enumerate(points):
        if point.lineno != first.lineno or point.filename != first.filename:
            text = warn_different_lines(first.name, (0, first.where), (replica, point.where))
            warn_once(strategy, ("lines", first.filename, first.function), text)
            return


def check_additions(strategy: tf.distribute.Strategy, graph: tf.Graph, first: int) -> None:
    """Warns of plain variables to which more than one replica adds, as a traced run shows it.

    The names of ops tell the replica: those of all replicas but the first are in scopes of their own. A merge function,
    which adds once for all replicas, is in the scopes of the first.

    Args:
        strategy: the strategy.
        graph: the graph into which the run was traced.
        first: how many ops the graph had before.
    """
    adding: dict[int, dict[str, tf.Operation]] = {}
    captures: dict[tf.Graph, dict[int, tf.Tensor]] = {}
    for op, replica in _additions(graph.get_operations()[first:], "", set()):
        adding.setdefault(id(subgraphs.outermost(op.inputs[0], captures)), {}).setdefault(replica, op)
    for variable in variables.used_in(graph) if adding else ():
        ops = [*adding.get(id(variables.raw_handle(variable)), {}).values()]
        name = variable.name.removesuffix(":0")
        if len(ops) > 1 and "seed" not in name:  # a generator of random numbers may be shared
            text = functools.partial(warn_shared_variable, name, user_line(ops[1]))
            _named_of(strategy, "written").warn(variable, text)


def _additions(
    operations: Iterable[tf.Operation], around: str, seen: set[tuple[int, str]]
) -> Iterator[tuple[tf.Operation, str]]:
    """The ops that add to variables, also in branches, loops and calls, and the replica of each.

    A function that is called often is looked at once a replica; `seen` keeps which.
    """
    for op in operations:
        if subgraphs.is_stateful(op):  # others write nothing
            found = _OF_REPLICA.search(op.name)
            replica = found[1] if found else around
            if op.type in subgraphs.ADDING:
                yield op, replica
            for graph in subgraphs.functions_of(op):
                if (id(graph), replica) not in seen:
                    seen.add((id(graph), replica))
                    yield from _additions(graph.get_operations(), replica, seen)


def check_optimizer(optimizer: Any, variables: Sequence[object]) -> None:
    """Warns, in a replica on a thread, if an optimizer of no strategy updates variables of the replicas.

    Args:
        optimizer: a Keras optimizer that was made outside all scopes, and so has one state for all replicas.
        variables: the Keras variables that it updates.
    """
    strategy = tf.distribute.get_strategy()
    size = strategy.num_replicas_in_sync
    if size == 1 or strategy.extended.backend.compiles:
        return
    if any(isinstance(getattr(each, "value", each), distribute.DistributedVariable) for each in variables):
        name, kind = optimizer.name, type(optimizer).__name__
        _named_of(strategy, "optimizer").warn(optimizer, lambda: warn_foreign_optimizer(name, kind, size, here()))
