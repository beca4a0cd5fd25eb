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
from replica_engine._tf.keras.hooks import wrap
from replica_engine._tf.keras.trainer import strategy_of

SAVING = "keras.src.saving.saving_api"
SAVES = ("save_model", "save_weights")
CALLBACKS = "keras.src.callbacks"
BACKUP, BOARD, CSV = "BackupAndRestore", "TensorBoard", "CSVLogger"

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

    def of_other(model: Any) -> bool:
        worker = worker_of(model)
        return worker is not None and not worker.is_chief

    saving, callbacks = sys.modules.get(SAVING), sys.modules.get(CALLBACKS)
    for name in SAVES:
        wrap(saving, name, functools.partial(_save, worker_of))
    backup, board, csv = (getattr(callbacks, name, None) for name in (BACKUP, BOARD, CSV))
    wrap(backup, "_save_model", functools.partial(_back_up, worker_of))
    wrap(backup, "on_train_end", functools.partial(_end, of_other))
    wrap(board, "set_model", functools.partial(_elsewhere, of_other))
    wrap(csv, "on_train_begin", functools.partial(_nowhere, of_other))


def built_under(model: Any) -> Any:
    """The strategy that a model was built under; None for anything else."""
    return getattr(model, "_distribute_strategy", None) and strategy_of(model)


def _save(
    worker_of: Callable[[Any], Worker | None],
    own: Callable[..., Any],
    model: Any,
    filepath: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    worker = worker_of(model)
    if worker is None:
        return own(model, filepath, *args, **kwargs)
    with worker.saving("a model", filepath) as writes:
        if writes:
            return own(model, filepath, *args, **kwargs)
        with folder() as other:
            return own(model, pathlib.Path(other) / os.path.basename(filepath), *args, **kwargs)


def _back_up(worker_of: Callable[[Any], Worker | None], own: Callable[..., Any], backup: Any) -> None:
    worker = worker_of(backup.model)
    if worker is None:
        return own(backup)
    before = {name: getattr(backup, name) for name in _BACKUP_PATHS}
    with worker.saving("a backup", backup.backup_dir) as backup._replica_engine_writes:
        if backup._replica_engine_writes:
            return own(backup)
        with folder() as other:
            try:
                for name, path in before.items():
                    is_folder = name == "backup_dir"
                    setattr(backup, name, other if is_folder else os.path.join(other, os.path.basename(path)))
                return own(backup)
            finally:
                vars(backup).update(before)


def _end(of_other: Callable[[Any], bool], own: Callable[..., Any], backup: Any, logs: Any = None) -> Any:
    """Deletes the backup, unless it is the chief's."""
    leaves = of_other(backup.model) and not getattr(backup, "_replica_engine_writes", False)
    return None if leaves else own(backup, logs)


def _elsewhere(of_other: Callable[[Any], bool], own: Callable[..., Any], board: Any, model: Any) -> Any:
    if not of_other(model):
        return own(board, model)
    board._replica_engine_folder = tempfile.TemporaryDirectory()  # deleted with the callback
    before, board.log_dir = board.log_dir, board._replica_engine_folder.name
    try:
        return own(board, model)  # which takes the folder to write into from log_dir
    finally:
        board.log_dir = before


def _nowhere(of_other: Callable[[Any], bool], own: Callable[..., Any], csv: Any, logs: Any = None) -> Any:
    before = csv.filename
    csv.filename = os.devnull if of_other(csv.model) else before
    try:
        return own(csv, logs)
    finally:
        csv.filename = before
