"""Saving on several workers: which worker writes, and where the workers meet.

All workers call what saves, with the same path. They meet before it, so that a checkpoint holds one step of all of
them, and a worker that did something else is found before a file is written. They meet again when the chief has
written, so that each can read the file.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine._tf import checkpoints, distribute
from replica_engine._tf.keras import files


class Saving:
    """This worker, as one that saves together with the others.

    Args:
        writes: whether it is the chief.
        meet: waits for the other workers; takes a name of the place in words.
    """

    def __init__(self, writes: bool, meet: Callable[[str], None]):
        self.writes = writes
        self._meet = meet
        self._inside = False

    @contextlib.contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Around saving something on all workers.

        Args:
            what: what is saved, in words.

        Raises:
            ProgramDisagreementError: another worker does something else.
            WorkerLostError: a worker is lost.
        """
        if self._inside:  # Keras saves a model by saving its weights
            yield
            return
        self._meet(f"the saving of {what}")
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._meet(f"the end of saving {what}")  # not after a failure: what the others then get says what failed


def let_the_chief_write(saving: Saving | None, *models: Any) -> None:
    """Keeps all workers but the chief from writing what is trained on several workers, from now on.

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
    parts = map(_of_object, tf.train.TrackableView(saved).descendants())
    return next((part for part in parts if part is not None), None)


def _of_object(each: Any) -> Saving | None:
    if isinstance(each, distribute.DistributedVariable):
        return _of_strategy(each.distribute_strategy)
    with contextlib.suppress(TypeError):  # not hashable
        if each in _belonging:
            return _belonging[each]
    return _of_strategy(files.built_under(each))


def _of_strategy(strategy: Any) -> Saving | None:
    return getattr(getattr(strategy, "extended", None), "saving", None)


_belonging: weakref.WeakKeyDictionary[Any, Saving] = weakref.WeakKeyDictionary()
