"""`BackupAndRestore`: a `fit` that is killed goes on as if it had never stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import keras

from replica_engine._tf.keras import fitting
from replica_engine.checkpoints import saving
from replica_engine.checkpoints.training.folder import BackupFolder
from replica_engine.errors import BackupError
from replica_engine.errors.base import brief, positive_int
from replica_engine.keras.backup import states
from replica_engine.keras.backup.training import Training, fit, steps_of, wait_for_last
from replica_engine.strategies.validation import names_keywords

_OF_KERAS = {  # what Keras' callback of this name takes
    "backup_dir": "Write directory=.",
    "double_checkpoint": "Two backups stay, the last one and the one before it; keep= is their number.",
}


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up a whole training while `fit` runs, and continues it in the next process. It replaces Keras' callback.

    A backup has the weights, the optimizer with its loss scale, metrics, epoch and batch, the history, the state of the
    other callbacks, all random numbers and the place in the data. A process that is killed at any moment and started
    again ends, bit by bit, where an undisturbed one ends. A backup that was written half is ignored.

    It works with `replicate_model`, with models of a strategy's scope on one worker and several, and with plain models.

    Args:
        directory: the folder of the backups, on a file system. Several workers give the same one. A relative one is in
            the current folder of this call, also if the training changes it.
        save_freq: "epoch", or an int: a backup every so many batches.
        keep: how many backups stay.
        asynchronous: whether training goes on while a backup is written. An error of writing is raised by the next
            backup, and at the end. Several workers write while they wait for each other.
        delete_checkpoint: whether the backups are removed when `fit` has come to its end, as with Keras' callback.
        signals: signals that end the training: the step ends, a backup is written, on all workers of the same step, and
            the process exits with status 128 plus the signal's number. A second SIGINT ends it at once, and another
            signal that comes again does after 10 seconds.

    Raises:
        BackupError: an argument cannot be used; or, when `fit` begins, the model is not built, or the backup is one of
            another model.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> from replica_engine.keras import BackupAndRestore
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> backup = BackupAndRestore(tempfile.mkdtemp(), save_freq=10)
        >>> x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[backup])
        >>> len(history.history["loss"])
        2
    """

    @names_keywords("BackupAndRestore", _OF_KERAS)
    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        keep: int = 2,
        asynchronous: bool = True,
        *,
        delete_checkpoint: bool = True,
        signals: Iterable[int] = (signal.SIGTERM,),
    ):
        super().__init__()
        if not isinstance(directory, (str, os.PathLike)) or not str(directory) or "://" in str(directory):
            raise BackupError(f"directory must be a folder of a file system, not {brief(directory)}.")
        if save_freq != "epoch" and positive_int(save_freq) is None:
            raise BackupError(f'save_freq must be "epoch" or a positive number of batches, not {brief(save_freq)}.')
        if positive_int(keep) is None:
            raise BackupError(f"keep must be a positive number of backups, not {brief(keep)}.")
        self.directory = os.fspath(directory)
        self._folder = BackupFolder(self.directory, keep)
        self._options: dict[str, Any] = {
            "save_freq": save_freq,
            "asynchronous": asynchronous,
            "delete": delete_checkpoint,
            "signals": tuple(signals),
        }
        saving.install()  # which reads folders whose names TensorFlow takes for patterns
        fitting.BEGIN.around(_begin)
        fitting.STEPS.around(steps_of)
        fitting.FIT.around(fit)

    def on_train_batch_end(self, batch: int, logs: dict[str, object] | None = None) -> None:
        """Does nothing. It is here because Keras runs callbacks without it on another thread, behind the training."""


def _begin(
    own: Callable[..., object], container: keras.callbacks.CallbackList, *args: object, **kwargs: object
) -> None:
    """Called in the place of the `on_train_begin` of a list of callbacks, which is `own`."""
    backup = next((each for each in container.callbacks if isinstance(each, BackupAndRestore)), None)
    if backup is None:
        own(container, *args, **kwargs)
        return
    wait_for_last()
    if backup._folder.last() is not None:
        states.prepare(container.callbacks)
    own(container, *args, **kwargs)
    Training(container, backup._folder, **backup._options).begin(container)
