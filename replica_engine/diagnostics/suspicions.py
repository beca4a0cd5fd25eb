"""Warnings about programs that run, and probably do not do what their author wants. None is logged twice for a cause.

A warning must never come for a program that is right. So each of these looks at what happens, and not at how a program
is written: a value that a plain dataset gave reaches all replicas whole; two replicas add to one variable; a gradient
flows into the results of a run that no tape could see.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import batches, distribute, eager, variables
from replica_engine._tf.graphs import control_flow
from replica_engine.diagnostics.op_lines import here
from replica_engine.diagnostics.user_frames import is_called_by_user
from replica_engine.engine import SyncPoint
from replica_engine.errors import InputsError
from replica_engine.errors.inputs import warn_dataset_for_each, warn_whole_batch, warn_whole_batch_of_steps
from replica_engine.errors.scopes import warn_foreign_optimizer, warn_shared_variable, warn_tape_outside
from replica_engine.errors.threads import warn_different_lines
from replica_engine.process import scoped

_logger = logging.getLogger("replica_engine")
_thread = threading.local()
_USED = "_replica_engine_used"
_told: weakref.WeakKeyDictionary[Any, set[Hashable]] = weakref.WeakKeyDictionary()


def warn_once(strategy: Any, key: Hashable, text: str) -> None:
    """Logs a warning, unless it was logged for this strategy and key."""
    told = _told.setdefault(strategy, set())
    if key not in told:
        told.add(key)
        _logger.warning(text)


def is_told(strategy: Any, key: Hashable) -> bool:
    """Whether `warn_once` has logged a warning for this strategy and key."""
    return key in _told.get(strategy, ())


class Named:
    """The objects of one kind that warnings have named: each object once, and not more than `MOST` objects.

    A model that was made outside the scope may have hundreds of variables, and the first few say what is wrong. The
    objects are known by reference, since two may have one name, and weakly, since a program may make many.
    """

    MOST = 5

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def warn(self, each: Any, text: Callable[[], str]) -> None:
        """Logs a warning about an object, unless one was logged; the last one says that it is the last."""
        key = id(each)
        with self._lock:  # replicas that run at the same time find the same object
            if key in self._known or self._count >= self.MOST:
                return
            self._known[key] = weakref.ref(each, lambda _: self._known.pop(key, None))
            self._count += 1
            is_last = self._count == self.MOST
        _logger.warning(text() + (f"\nThis is the last of {self.MOST} such warnings; more are not logged." * is_last))


_named: weakref.WeakKeyDictionary[Any, dict[str, Named]] = weakref.WeakKeyDictionary()


def _named_of(strategy: Any, kind: str) -> Named:
    return _named.setdefault(strategy, {}).setdefault(kind, Named())


def check_inputs(
    strategy: tf.distribute.Strategy, fn: Any, args: Sequence[Any], kwargs: Any, size: int, compiles: bool
) -> None:
    """Looks at the arguments of a run.

    Args:
        strategy: the strategy.
        fn: the function that replicas run.
        args: its positional arguments.
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
    if size > 1 and (batches.any_given() or not tf.executing_eagerly()):
        _check_batches(strategy, fn, values, size)


def has_batch(args: Any) -> bool:
    """Whether a plain dataset has given an argument of an eager run, or a part of one."""
    return batches.any_given() and any(map(batches.is_of_dataset, _leaves(args)))


@functools.cache
def _is_distributed(kind: Hashable) -> bool | None:
    """For the type of a dataset, whether it is a distributed one; None for all other types."""
    assert isinstance(kind, type)
    if issubclass(kind, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        return True
    return False if issubclass(kind, tf.data.Dataset) else None


def _check_batches(strategy: Any, fn: Any, values: Sequence[Any], size: int) -> None:
    """Warns if every replica gets the whole batch of a dataset, and no argument differs by replica.

    In a function that is traced, the batch may be an input: then each call of the function is looked at. Calls by Keras
    are left out. It gives the batch of `train_on_batch` whole to all replicas of a model that was made in the scope,
    which trains as on one device.
    """
    leaves = _leaves(values)
    if tf.executing_eagerly():
        candidates = [leaf for leaf in leaves if batches.is_of_dataset(leaf)]
    else:
        candidates = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    if not candidates or _has_distributed(values) or not is_called_by_user():
        return
    key = "batch", getattr(fn, "__name__", "")
    where = "" if tf.executing_eagerly() else here()  # where the batch is found, this line is left
    found = functools.partial(_warn_batch, weakref.ref(strategy), key, size, where)  # a graph outlives its strategy
    for leaf in candidates:
        batches.watch(leaf, (id(strategy), key), found)


def _warn_batch(strategy: weakref.ref[Any], key: Hashable, size: int, where: str, batch: tf.Tensor) -> None:
    """Warns, once for a strategy and key, of a tensor of a plain dataset that goes whole to replicas."""
    alive, shape = strategy(), batch.shape
    if alive is not None and not is_told(alive, key) and shape.rank and (shape[0] is None or shape[0] >= size):
        warn_once(alive, key, warn_whole_batch(shape[0], size, where or here()))


def check_batch_of_steps(strategy: tf.distribute.Strategy, fn: Any, batch: tuple, size: int) -> None:
    """Warns if every replica gets the whole batches of a dataset in a device loop.

    Args:
        strategy: the strategy.
        fn: the step.
        batch: the first batch, as the arguments of the step.
        size: the number of replicas.
    """
    for leaf in _leaves(batch) if size > 1 and batches.any_given() else ():
        if batches.is_of_dataset(leaf) and leaf.shape.rank and leaf.shape[0] >= size:
            if not _has_distributed(batch):
                key = "steps", getattr(fn, "__name__", "")
                warn_once(strategy, key, warn_whole_batch_of_steps(leaf.shape[0], size, here()))
            return


def _leaves(values: Iterable[Any]) -> list[Any]:
    """The arguments of a run, and the parts of those that are tuples, lists and dicts."""
    leaves: list[Any] = []
    for value in values:
        parts = value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, dict) else [value]
        leaves.extend(parts)  # `+=` would let a named tuple that TensorFlow has wrapped add itself
    return leaves


def _has_distributed(values: Any) -> bool:
    """Whether anything in a structure, which may contain itself, differs by replica."""
    pending, seen = [values], set()
    while pending:
        each = pending.pop()
        if isinstance(each, distribute.DistributedValues):
            return True
        if isinstance(each, (tuple, list, dict)) and id(each) not in seen:
            seen.add(id(each))
            pending += each.values() if isinstance(each, dict) else each
    return False


def check_lines(strategy: Any, points: Sequence[SyncPoint]) -> None:
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


def note_write(written: dict[int, tuple[Any, int]], variable: Any, strategy: Any, replica: int) -> None:
    """Notes that a replica adds to a variable; warns when a second replica of the run adds to the same one.

    Args:
        written: by the id of a variable, the variable and the first replica of this run that added to it.
        variable: a plain variable, or a component of a distributed one.
        strategy: the strategy.
        replica: the index of the replica.
    """
    _, first = written.setdefault(id(variable), (variable, replica))
    if first == replica:
        return
    name = variable.name.removesuffix(":0")
    if "seed" not in name:  # a generator of random numbers may be shared
        _named_of(strategy, "written").warn(variable, lambda: warn_shared_variable(name, here()))


def check_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Warns, in a replica on a thread, if an optimizer of no strategy updates variables of the replicas.

    Args:
        optimizer: a Keras optimizer that was made outside all scopes, and so has one state for all replicas.
        variables: the Keras variables that it updates.
    """
    strategy = tf.distribute.get_strategy()
    size = strategy.num_replicas_in_sync
    if size == 1 or strategy.extended.compiles:
        return
    if any(isinstance(getattr(each, "value", each), distribute.DistributedVariable) for each in variables):
        name, kind = optimizer.name, type(optimizer).__name__
        _named_of(strategy, "optimizer").warn(optimizer, lambda: warn_foreign_optimizer(name, kind, size, here()))


def additions_noted() -> contextlib.AbstractContextManager[dict[int, str]]:
    """Notes, inside a block in which one trace stands for all replicas, which variables the replicas add to.

    Yields:
        By the id of a variable, the user's line that adds to it first. Additions by merge functions are not noted.
    """
    added: dict[int, str] = {}
    return scoped.attribute(_thread, "added", added)


def note_addition(variable: Any) -> None:
    """Notes that a variable is added to, on a thread that runs no replica."""
    added = getattr(_thread, "added", None)
    if added is not None and not tf.distribute.in_cross_replica_context():
        added.setdefault(id(variable), here())


def note_reads(read: Sequence[weakref.ref[Any]]) -> None:
    """Notes, for the `watch_results` that follows on this thread, which trainable variables the run reads."""
    _thread.read = read


class asked_for:
    """Inside the block, a tape on this thread computes gradients with respect to these sources, a structure."""

    def __init__(self, sources: Any):
        self._sources = sources
        self._ids: set[int] | None = None
        self._others: set[int] = set()  # the ids of lists of which none is asked for

    def __enter__(self) -> None:
        self._before = getattr(_thread, "asked", None)
        _thread.asked = self

    def __exit__(self, *_: object) -> None:
        _thread.asked = self._before

    def any_of(self, used: list[Any]) -> bool:
        """Whether one of the sources is in a list of weak references to variables and tensors, and of such lists."""
        if self._ids is None:  # the ids are worth looking up only if a gradient flows into a run
            sources = [source for source in tf.nest.flatten(self._sources) if source is not None]
            self._ids = {id(part) for source in sources for part in variables.parts(source)}
        pending = [used]
        while pending:
            each = pending.pop()
            if isinstance(each, weakref.ref):
                if any(id(part) in self._ids for part in variables.parts(each())):
                    return True
            elif id(each) not in self._others:
                self._others.add(id(each))
                pending += each
        return False


def watch_results(strategy: tf.distribute.Strategy, results: Any, given: Any) -> None:
    """Warns if a tape around a run is asked for a gradient that flows through the results.

    The replicas computed the results where the tape could not see it, so the gradient ends here. Nothing happens if
    none flows, because the tape may be there for something else. Nor does it if nothing is lost: the tape is asked for
    gradients with respect to neither a variable that the run has read, nor an argument that a tape watches. A variable
    may be trainable all the same, such as those of a layer that Keras has frozen.

    Args:
        strategy: the strategy.
        results: the regrouped results.
        given: the arguments.
    """
    tapes = control_flow.outer_tapes()
    if not tapes:
        return
    used: list[Any] = [*getattr(_thread, "read", ())]
    for each in _tensors(given):
        if eager.is_watched([each]):
            used += [weakref.ref(each), getattr(each, _USED, [])]  # what an earlier run used, if it computed this
    if not used:
        return
    outputs = [each for each in _tensors(results) if each.dtype.is_floating and not eager.is_watched([each])]
    where = here()
    if not outputs:
        return
    for each in outputs:
        setattr(each, _USED, used)  # an attribute goes with its tensor, and calls no Python then, as in `batches`
    token = tf.zeros([])
    for tape in tapes:
        tape.watch(token)

    alive = weakref.ref(strategy)  # the graph of a traced function outlives the strategy

    def backward(*upstream: Any) -> list[Any]:
        asked: asked_for | None = getattr(_thread, "asked", None)
        still = alive()
        if still is not None and asked is not None and not is_told(still, "tape") and asked.any_of(used):
            warn_once(still, "tape", warn_tape_outside(where))
        return [None]

    control_flow.record_operation("strategy.run", outputs, [token], backward)


def _tensors(structure: Any) -> list[Any]:
    """The dense tensors in a structure, and in the distributed values in it."""
    return [
        part
        for leaf in tf.nest.flatten(structure)
        for part in (leaf.values if isinstance(leaf, distribute.DistributedValues) else (leaf,))
        if isinstance(part, tf.Tensor)
    ]
