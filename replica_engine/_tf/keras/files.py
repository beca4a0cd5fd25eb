"""Files that Keras writes while several workers train one model in one shared folder: the chief writes them.

As with checkpoints (`_tf/checkpoints.py`), the other workers save into a folder of their own, which is deleted at once,
and all workers meet before they save and when the chief has written; a worker whose path is not the chief's writes
there. For callbacks that log (CSVLogger, TensorBoard) workers do not meet, since perhaps only the chief has them: its
own write, and the others leave no file. Checked on Keras 3.15.1; a name that Keras does not have is left out.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from replica_engine._tf.checkpoints import Worker, folder
from replica_engine._tf.keras.trainer import strategy_of

SAVING = "keras.src.saving.saving_api"
SAVES = ("save_model", "save_weights")
CALLBACKS = "keras.src.callbacks"
BACKUP, BOARD, CSV = "BackupAndRestore", "TensorBoard", "CSVLogger"

_MARK = "_replica_engine"
_BACKUP_PATHS = (
    "backup_dir",
    "_weights_path",
    "_training_metadata_path",
    "_prev_weights_path",
    "_prev_training_metadata_path",
)


def let_the_chief_write(worker_of: Callable[[Any], Worker | None]) -> None:
    """Keeps all workers but the chief from writing files; only once per process.

    Args:
        worker_of: takes a model, and returns this worker; None if the model is not trained on several workers.
    """
    saving, callbacks = sys.modules.get(SAVING), sys.modules.get(CALLBACKS)
    if saving is None or callbacks is None or hasattr(getattr(saving, SAVES[0], None), _MARK):
        return

    def of_other(model: Any) -> bool:
        worker = worker_of(model)
        return worker is not None and not worker.is_chief

    for name in SAVES:
        _replace(saving, name, functools.partial(_saved, worker_of))
    backup, board, csv = (getattr(callbacks, name, None) for name in (BACKUP, BOARD, CSV))
    _replace(backup, "_save_model", functools.partial(_backed_up, worker_of))
    _replace(backup, "on_train_end", functools.partial(_ended, of_other))
    _replace(board, "set_model", functools.partial(_elsewhere, of_other))
    _replace(csv, "on_train_begin", functools.partial(_nowhere, of_other))


def built_under(model: Any) -> Any:
    """The strategy that a model was built under; None for anything else."""
    return getattr(model, "_distribute_strategy", None) and strategy_of(model)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name, None)
    if original is not None:
        replaced = functools.wraps(original)(make(original))
        setattr(replaced, _MARK, True)
        setattr(owner, name, replaced)


def _saved(worker_of: Callable[[Any], Worker | None], original: Callable[..., Any]) -> Callable[..., Any]:
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        worker = worker_of(model)
        if worker is None:
            return original(model, filepath, *args, **kwargs)
        with worker.saving("a model", filepath) as writes:
            if writes:
                return original(model, filepath, *args, **kwargs)
            with folder() as own:
                return original(model, pathlib.Path(own) / os.path.basename(filepath), *args, **kwargs)

    return save


def _backed_up(worker_of: Callable[[Any], Worker | None], original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any) -> None:
        worker = worker_of(self.model)
        if worker is None:
            return original(self)
        before = {name: getattr(self, name) for name in _BACKUP_PATHS}
        with worker.saving("a backup", self.backup_dir) as self._replica_engine_writes:
            if self._replica_engine_writes:
                return original(self)
            with folder() as own:
                try:
                    for name, path in before.items():
                        setattr(self, name, own if name == "backup_dir" else os.path.join(own, os.path.basename(path)))
                    return original(self)
                finally:
                    vars(self).update(before)

    return save


def _ended(of_other: Callable[[Any], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: Any, logs: Any = None) -> Any:
        """Deletes the backup, unless it is the chief's."""
        leaves = of_other(self.model) and not getattr(self, "_replica_engine_writes", False)
        return None if leaves else original(self, logs)

    return end


def _elsewhere(of_other: Callable[[Any], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    def set_model(self: Any, model: Any) -> Any:
        if not of_other(model):
            return original(self, model)
        self._replica_engine_folder = tempfile.TemporaryDirectory()  # deleted with the callback
        before, self.log_dir = self.log_dir, self._replica_engine_folder.name
        try:
            return original(self, model)  # which takes the folder to write into from log_dir
        finally:
            self.log_dir = before

    return set_model


def _nowhere(of_other: Callable[[Any], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: Any, logs: Any = None) -> Any:
        before = self.filename
        self.filename = os.devnull if of_other(self.model) else before
        try:
            return original(self, logs)
        finally:
            self.filename = before

    return begin
