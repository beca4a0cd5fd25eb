"""Checkpoints and SavedModels of several workers in one shared folder: the chief writes them.

A worker whose path is not the chief's writes there as if it were alone. The others save into a folder of their own,
which is deleted at once: saving may read variables that have a part on each worker, so all workers have to do it. They
keep the same list of checkpoints as the chief, and neither write nor delete a file. Workers meet before they save, and
again when the chief has written. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

# checkpoint: Checkpoint._write is what save, write and CheckpointManager.save end in; _execute_callbacks is called
# there at the end. Checkpoint.save starts a thread before that if it shall be asynchronous.
# checkpoint_management: update_checkpoint_state_internal writes the file that lists the checkpoints,
# _delete_file_if_exists deletes old ones.
from tensorflow.python.checkpoint import checkpoint as _checkpoint
from tensorflow.python.checkpoint import checkpoint_management as _management

# save: save_and_return_nodes is what tf.saved_model.save calls.
from tensorflow.python.saved_model import save as _save

CHECKPOINT = "tensorflow.python.checkpoint.checkpoint.Checkpoint"
MANAGEMENT = "tensorflow.python.checkpoint.checkpoint_management"
SAVED_MODEL = "tensorflow.python.saved_model.save"
WRITE, SAVE, STATE, DELETE, NODES = (
    "_write",
    "save",
    "update_checkpoint_state_internal",
    "_delete_file_if_exists",
    "save_and_return_nodes",
)

_MARK = "_replica_engine"


class Worker(Protocol):
    """A worker that saves together with others.

    Attributes:
        is_chief: whether this worker writes the files of a path that all have.
    """

    is_chief: bool

    def saving(self, what: str, path: Any) -> contextlib.AbstractContextManager[bool]:
        """A context manager around saving: all workers meet before and after it. Inside is whether this one writes."""


def let_the_chief_write(worker_of: Callable[[Any], Worker | None]) -> None:
    """Keeps all workers but the chief from writing checkpoints and SavedModels to the chief's path; once per process.

    Args:
        worker_of: takes what is to be saved, and returns this worker; None if it is not trained on several workers.
    """
    cls = _checkpoint.Checkpoint
    if hasattr(getattr(cls, WRITE), _MARK):
        return
    _replace(cls, WRITE, functools.partial(_written, worker_of))
    _replace(cls, SAVE, functools.partial(_saved, worker_of))
    _replace(_save, NODES, functools.partial(_exported, worker_of))
    for name in (STATE, DELETE):
        _replace(_management, name, _not_by_others)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    replaced = functools.wraps(original)(make(original))
    setattr(replaced, _MARK, True)
    setattr(owner, name, replaced)


def _written(worker_of: Callable[[Any], Worker | None], original: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, file_prefix: Any, options: Any = None) -> Any:
        worker = worker_of(self)
        if worker is None:
            return original(self, file_prefix, options)
        options = _synchronous(options)
        with worker.saving("a checkpoint", file_prefix) as writes:
            if writes:
                return original(self, file_prefix, options)
            callbacks, options.experimental_write_callbacks = options.experimental_write_callbacks, None
            with folder() as own:
                original(self, os.path.join(own, "checkpoint"), options)
            path = os.fspath(file_prefix)
            token = _leaves.set(True)
            try:
                _checkpoint._execute_callbacks(callbacks or (), path)
            finally:
                _leaves.reset(token)
            return path

    return write


def _saved(worker_of: Callable[[Any], Worker | None], original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if options is not None and options.experimental_enable_async_checkpoint and worker_of(self) is not None:
            options = _synchronous(options)
        return original(self, file_prefix, options)

    return save


def _synchronous(options: Any) -> Any:
    """The options without asynchronous saving: a thread of its own would meet the other workers out of order."""
    options = copy.copy(options or tf.train.CheckpointOptions())
    options.experimental_enable_async_checkpoint = False
    return options


def _exported(worker_of: Callable[[Any], Worker | None], original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        worker = worker_of(obj)
        if worker is None:
            return original(obj, export_dir, *args, **kwargs)
        with worker.saving("a SavedModel", export_dir) as writes:
            if writes:
                return original(obj, export_dir, *args, **kwargs)
            with folder() as own:
                return original(obj, own, *args, **kwargs)

    return save


def _not_by_others(original: Callable[..., Any]) -> Callable[..., Any]:
    def change(*args: Any, **kwargs: Any) -> Any:
        return None if _leaves.get() else original(*args, **kwargs)

    return change


_leaves: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_leaves_files", default=False)
"""Whether this worker leaves files to the chief now."""


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A folder for the files of a worker that is not the chief; it is deleted at the end of the block."""
    with tempfile.TemporaryDirectory() as path:
        yield path
