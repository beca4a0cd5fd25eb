"""Models that Keras writes while several workers train one in one shared folder: the chief writes them.

As with checkpoints (`_tf/checkpoints.py`), the other workers save into a folder of their own, which is deleted at once,
and all workers meet before they save and when the chief has written; a worker whose path is not the chief's writes
there. Callbacks that log (CSVLogger, TensorBoard) are the chief's alone: users give them to no other worker. Checked on
Keras 3.15.1.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from replica_engine._tf.checkpoints import Worker, saved_by
from replica_engine._tf.hook import FIRST_WORKERS_SCOPE, Hook

_SAVING, _CHIEF_WRITES = "keras.src.saving.saving_api", "the chief writes files for all workers"
_OTHERS = "passes on to Keras for models of other strategies"
SAVE_MODEL = Hook(_SAVING, "save_model", why=_CHIEF_WRITES, since=FIRST_WORKERS_SCOPE, until=_OTHERS)
SAVE_WEIGHTS = Hook(_SAVING, "save_weights", why=_CHIEF_WRITES, since=FIRST_WORKERS_SCOPE, until=_OTHERS)
MAKE_FOLDER = Hook(
    "keras.src.utils.file_utils",
    "makedirs",
    why="a folder that another worker makes at the same time is no error",
    since=FIRST_WORKERS_SCOPE,
    until="raises all other errors, as before",
)


def let_the_chief_write(worker_of: Callable[[object], Worker | None]) -> None:
    """Keeps all workers but the chief from writing models; only once per process.

    Args:
        worker_of: takes a model, and returns this worker; None if the model is not trained on several workers.
    """
    SAVE_MODEL.around(functools.partial(_save, worker_of))
    SAVE_WEIGHTS.around(functools.partial(_save, worker_of))
    MAKE_FOLDER.around(_make_folder)


def _save(
    worker_of: Callable[[object], Worker | None],
    own: Callable[..., object],
    model: object,
    filepath: str | os.PathLike[str],
    *args: object,
    **kwargs: object,
) -> object:
    return saved_by("a model", worker_of(model), filepath, lambda path: own(model, path, *args, **kwargs))


def _make_folder(own: Callable[[str], object], path: str) -> None:
    """ModelCheckpoint first asks whether a folder exists, and another worker may make it before this one does."""
    try:
        own(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
