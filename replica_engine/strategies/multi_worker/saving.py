"""Saving on several workers: which worker writes, and where the workers meet.

All workers make the same call that saves. They meet before it, so that a checkpoint holds the same step of all of them,
and a worker that does something else is found before a file is written. They meet again when the chief has written, so
that each can read the file. The timeout of runs does not limit that second wait.

The chief writes what all save to one path. A worker with a path that is not the chief's writes there itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine import hosts
from replica_engine._tf import checkpoints, distribute
from replica_engine._tf.keras import files
from replica_engine.errors.hosts import SAVING


class Saving:
    """This worker, as one that saves together with the others.

    Args:
        member: the connection to the job.
        meet: waits for the other workers; takes a name of the place in words, and whether the timeout of runs holds.

    Attributes:
        is_chief: whether this worker writes the files of a path that all have.
    """

    def __init__(self, member: hosts.Member, meet: Callable[[str, bool], None]):
        self.is_chief = member.worker == 0
        self._member = member
        self._meet = meet

    @contextlib.contextmanager
    def saving(self, what: str, path: Any) -> Iterator[bool]:
        """A context manager around saving something on all workers.

        Args:
            what: what is saved, in words.
            path: where this worker is to save it.

        Yields:
            Whether this worker writes: it is the chief, or its path is not the chief's.

        Raises:
            ProgramDisagreementError: another worker does something else.
            WorkerLostError: a worker is lost.
        """
        if _inside.get():  # Keras backs a model up by saving its weights, and the path is chosen already
            yield True
            return
        ours, key = _place(path), f"{SAVING} {what}: path {next(_numbers)} "
        if self.is_chief:
            self._member.put(key, ours)
        self._meet(f"{SAVING} {what}", True)
        writes = self.is_chief or not _is_same(ours, self._member.get(key))
        token = _inside.set(True)
        try:
            yield writes
        finally:
            _inside.reset(token)
        self._meet(f"the end of saving {what}", False)  # not after a failure: the others get an error that names it
        if self.is_chief:
            self._member.drop(key)


def _place(path: Any) -> list[str]:
    """A path as it was given, and from the root."""
    given = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
    return [given, os.path.abspath(given)]


def _is_same(ours: list[str], theirs: list[str]) -> bool:
    """Whether two places are one. A relative path may lead to a shared folder that machines have at two places."""
    return any(mine == other for mine, other in zip(ours, theirs, strict=True))


_numbers = itertools.count()  # all workers save the same in the same order, or do not get past the meeting


def let_the_chief_write(saving: Saving | None, *models: Any) -> None:
    """Keeps all workers but the chief from writing to the chief's path what is trained on several workers, from now on.

    Args:
        saving: this worker; None if it is the only one.
        models: further models that are trained on several workers, although they were not built under a strategy.
    """
    files.let_the_chief_write(_saving_of)
    checkpoints.let_the_chief_write(_saving_of)
    if saving is not None:
        _belonging.update(dict.fromkeys(models, saving))


def _saving_of(saved: Any) -> Saving | None:
    """This worker, if what is saved is trained on several workers: a model, a checkpoint, or anything trackable."""
    own = _of_object(saved)
    if own is not None or not isinstance(saved, tf.__internal__.tracking.Trackable):
        return own
    parts = _parts(saved)
    found = next((part for part in map(_of_object, parts) if part is not None), None)
    return found or _of_parts(parts)


def _of_parts(saved: list[Any]) -> Saving | None:
    """This worker, if any of these objects is part of a model in `_belonging`: a layer, a variable, the optimizer."""
    identities = {id(part) for part in saved}
    for model, saving in list(_belonging.items()):
        # Looked up now: layers, variables and the optimizer may have come after the model was replicated.
        owners = [model, getattr(model, "optimizer", None)]
        variables = [variable for owner in owners for variable in getattr(owner, "variables", ())]
        parts = [part for owner in owners for part in _parts(owner)]
        parts += [getattr(variable, "value", variable) for variable in variables]  # TensorFlow's in Keras' variables
        if not identities.isdisjoint(map(id, parts)):
            return saving
    return None


def _parts(root: Any) -> list[Any]:
    """An object and all that it tracks; nothing for what tracks nothing."""
    if not isinstance(root, tf.__internal__.tracking.Trackable):
        return []
    return list(tf.train.TrackableView(root).descendants())


def _of_object(each: Any) -> Saving | None:
    if isinstance(each, distribute.DistributedVariable):
        return _of_strategy(each.distribute_strategy)
    with contextlib.suppress(TypeError):  # not hashable
        if each in _belonging:
            return _belonging[each]
    return _of_strategy(files.built_under(each))


def _of_strategy(strategy: Any) -> Saving | None:
    return getattr(getattr(strategy, "extended", None), "saving", None)


_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_saves", default=False)
"""Whether this thread saves something that the workers have met for."""

_belonging: weakref.WeakKeyDictionary[Any, Saving] = weakref.WeakKeyDictionary()
