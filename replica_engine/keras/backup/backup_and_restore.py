"""`BackupAndRestore`, and one `fit` that it backs up."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from replica_engine.checkpoints import file_owners, save
from replica_engine.errors import BackupError
from replica_engine.errors.base import brief, positive_int, warning
from replica_engine.keras.backup import backup_files, preemption, saved_state
from replica_engine.keras.backup.data_place import DataPlace, Step
from replica_engine.keras.lent_model import build_for, is_replicated
from replica_engine.strategies.argument_checks import names_keywords
from replica_engine.upstream.keras import keras_models, keras_training

_logger = logging.getLogger("replica_engine")
_thread = threading.local()

_FORMAT = 3
Logs: TypeAlias = dict[str, object] | None
Steps: TypeAlias = Callable[[Any], Iterator[Step]]
"""Keras' generator of the steps of an epoch."""


def wait_for_last() -> None:
    """Waits for the backup that an earlier `fit` of this thread, which an exception has ended, may still be writing.

    Raises:
        CheckpointError: it could not be written.
    """
    variables = getattr(_thread, "writes", lambda: None)()
    if variables is not None:
        variables.wait()


class Training:
    """A `fit` from its beginning to its end: when it saves, what it restores at which moment, and how a signal ends it.

    A backup is written when all callbacks have seen the batch or the epoch. It is restored when all callbacks have
    begun, which resets their state. In the middle of an epoch, Keras first begins the epoch again: metrics are reset,
    and a callback may set the learning rate. So then everything is restored a second time, right before the next batch.

    Args:
        container: Keras' list of all callbacks.
        folder: where the backups are.
        save_freq: "epoch", or how many batches lie between two backups.
        asynchronous: whether training goes on while a backup is written.
        delete: whether the backups are removed when the training has come to its end.
        signals: those that end the training after a step.
    """

    def __init__(
        self,
        container: keras.callbacks.CallbackList,
        folder: backup_files.BackupFolder,
        *,
        save_freq: str | int,
        asynchronous: bool,
        delete: bool,
        signals: tuple[int, ...],
    ):
        self._model: keras.Model = container.model
        self._callbacks = container.callbacks
        self._epochs = container.params["epochs"]
        self._folder, self._save_freq, self._delete = folder, save_freq, delete
        self.strategy = (
            self._model.strategy if is_replicated(self._model) else keras_training.find_strategy(self._model)
        )
        team = file_owners.find_strategy_team(self.strategy)
        self._exchange = None if team is None else team.exchange
        self._worker = 0 if team is None else team.worker
        self._is_verbose = bool(container.params.get("verbose")) and self._worker == 0
        self._asynchronous = asynchronous
        self._preemption = preemption.Preemption(signals, self._exchange)
        workers = 1 if team is None else team.size
        self._size = [workers, 1 if self.strategy is None else self.strategy.num_replicas_in_sync]
        self._variables = saved_state.Variables(self._model, workers)
        self._place, self._validation = DataPlace(self._say), DataPlace(self._say)
        self._begins = False  # the next steps that Keras asks for are those of an epoch
        self._epoch = self._batch = self._since = 0
        self._logs: Logs = None
        self._resumes: dict[str, Any] | None = None  # the state to restore in the epoch that begins
        self._validates: dict[str, Any] | None = None  # the place in the validation data that the next one begins with
        self._from = Path()
        self._saved: tuple[int, int] | None = None
        self._told = self._told_of_validation = False
        _check_built(self._model)
        self._unsaved = saved_state.Unsaved(self._callbacks)

    def begin(self, container: keras.callbacks.CallbackList) -> None:
        """Sees from now on what the callbacks of a list are told, which have all begun; restores the last backup."""
        for event, method in (
            ("on_epoch_begin", self.epoch_begins),
            ("on_train_batch_end", self.batch_ends),
            ("on_epoch_end", self.epoch_ends),
            ("on_train_end", self.ends),
        ):
            own = getattr(type(container), event).__get__(container)
            setattr(container, event, functools.partial(method, own))
        last = self._folder.last()
        name = None if last is None else last.name
        if self._exchange is not None:
            name = self._exchange("the backup to begin with", name)[0]  # all take the chief's
        self._preemption.listen()
        # Without one, Python looked `fit` up before its argument, the callback, was made: then only `ends` cleans up.
        if (fits := getattr(_thread, "fits", None)) is not None:
            fits.callback(self._preemption.stop_listening)
        if name is None:
            return
        self._from = self._folder.path / name
        state = self._read()
        self._variables.check_trained(self._from, state["built"], state.get("trainable"))
        with self._scope():
            self._variables.build_optimizers(state["built"])
        self._restore(state, metrics=False)
        self._resumes, self._validates = state, state["validation"]
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._delete &= (self._epoch, self._batch) <= (self._epochs, 0)  # or it is the backup of a later fit
        self._saved = self._epoch, self._batch
        keras_training.begin_at(self._model, self._epochs if state["stopped"] else self._epoch)
        self._say(f"resuming from {self._from}, after {backup_files.in_words(self._epoch, self._batch)}")

    def epoch_begins(self, own: Callable[..., object], epoch: int, logs: Logs = None) -> None:
        """Called in the place of the callbacks' `on_epoch_begin`, which is `own`."""
        keras_training.begin_at(self._model, None)  # `fit` has begun where it said, and an exception may end it
        own(epoch, logs)
        self._epoch, self._batch, self._logs = epoch, 0, None
        _thread.training, self._begins = self, True

    def steps(self, own: Steps, source: Any) -> Iterator[Step]:
        """The steps of an epoch, of a validation, or of data of others, in the place of Keras' generator `own`."""
        if keras_training.validates(self._model, source):
            return self._validate(own, source)
        begins, self._begins = self._begins, False
        return self._train(own, source) if begins else own(source)

    def _validate(self, own: Steps, source: Any) -> Iterator[Step]:
        """The steps of a validation, which takes another iterator, and so another order of `shuffle`, than the last."""
        self._validation.follow(source)
        steps, (place, self._validates) = own(source), (self._validates, None)
        if place is None:
            return self._validation.counted(steps)
        return self._validation.go_to(steps, place, self._from, is_same_size=False)

    def _validated(self) -> dict[str, Any] | None:
        """The place in the validation data; None before the first validation.

        Keras drops the last iterator when the next validation begins. With a strategy it first takes a batch of it, to
        build the model, which is the first that this process sees of that validation.
        """
        if self._validation.source is None:
            return None
        place = self._validation.save(None, 0)
        return place | {"has_current": place["has_current"] and keras_training.find_strategy(self._model) is not None}

    def _train(self, own: Steps, source: Any) -> Iterator[Step]:
        self._place.follow(source)
        steps = own(source)
        state, self._resumes = self._resumes, None
        if state is None:
            yield from self._place.counted(steps)
            return
        steps = self._place.go_to(steps, state["data"], self._file(state["worker"]), state["size"] == self._size)
        build_for(self._model, keras_training.read_batch_spec(source))
        if state["batch"]:
            self._restore(state, metrics=True)
            self._batch, self._logs = state["batch"], keras_training.logs_of_epoch(self._model, state["logs"])
        else:  # building has given all replicas the same moving statistics
            self._give_replicas(state, metrics=False)
        yield from steps

    def batch_ends(self, own: Callable[..., object], batch: int, logs: Logs = None) -> None:
        """Called in the place of the callbacks' `on_train_batch_end`, which is `own`."""
        own(batch, logs)
        self._since += batch + 1 - self._batch
        self._batch, self._logs = batch + 1, logs
        total = self._place.source.num_batches  # None if it is not known yet
        is_last = total is not None and self._batch >= total  # then the epoch ends, and is saved with its history
        if not is_last:
            self._save_if(isinstance(self._save_freq, int) and self._since >= self._save_freq)

    def epoch_ends(self, own: Callable[..., object], epoch: int, logs: Logs = None) -> None:
        """Called in the place of the callbacks' `on_epoch_end`, which is `own`."""
        if logs is not None and self._logs is not None and not logs.keys() & self._logs.keys():
            logs.update(keras_training.plain_logs(self._logs))  # the backup came after the last batch of the epoch
        own(epoch, logs)
        self._epoch, self._batch = epoch + 1, 0
        self._save_if(isinstance(self._save_freq, str) or self._since >= self._save_freq)

    def ends(self, own: Callable[..., object], logs: Logs = None) -> None:
        """Called in the place of the callbacks' `on_train_end`, which is `own`."""
        own(logs)
        keras_training.begin_at(self._model, None)
        if getattr(_thread, "fits", None) is None:
            _thread.training = None
        self._variables.wait()
        self._preemption.stop_listening()
        if self._delete:
            self._folder.clear()

    def _save_if(self, is_due: bool) -> None:
        number = self._preemption.agreed()
        if is_due or number is not None:
            self._save()
        if number is None:
            return
        self._variables.wait()
        self._preemption.answered()
        place, status = backup_files.in_words(self._epoch, self._batch), preemption.exit_status(number)
        self._say(
            f"{number.name}: saved in {self._folder.path}, after {place}. The same program continues from there. Exit "
            f"status {status}."
        )
        raise SystemExit(status)

    def _save(self) -> None:
        self._since = 0
        if self._saved == (self._epoch, self._batch):
            return
        self._variables.wait()  # one at a time; raises the error of the last one
        with save.raises_checkpoint_errors(str(self._folder.path), False):  # a full disk, for example
            self._write()
        self._saved = self._epoch, self._batch
        self._tell_once()

    def _write(self) -> None:
        half = self._folder.begin(self._epoch, self._batch)
        file = half / f"worker-{self._worker}"
        state = {
            "format": _FORMAT,
            "worker": self._worker,
            "size": self._size,
            "epoch": self._epoch,
            "batch": self._batch,
            "logs": None if self._logs is None else keras_training.plain_logs(self._logs),
            "stopped": bool(self._model.stop_training),
            "variables": self._variables.describe(),
            "built": self._variables.trained(),
            "trainable": self._variables.trainable(),
            "replicas": self._variables.read_replica_values(),
            "random": saved_state.random_numbers(self.strategy),
            "callbacks": saved_state.captured(self._callbacks),
            "data": self._place.save(file, self._batch),
            "validation": self._validates or self._validated(),
        }
        try:
            backup_files.write(file, state)
        except backup_files.NotPlainError as error:
            raise BackupError(
                f"BackupAndRestore cannot save {error}. The logs, and what a callback's get_state() returns, must be "
                "None, bools, numbers, strings, arrays or tensors, or lists, tuples and dicts of these."
            ) from error
        options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=self._asynchronous)
        if self._asynchronous:
            _thread.writes = weakref.ref(self._variables)
            options.experimental_write_callbacks = [lambda path: self._folder.finish(half)]
        with save.as_given(os.path.join(self._folder.given, half.name)):
            self._variables.write(half, options)
        if not self._asynchronous:
            self._folder.finish(half)

    def _scope(self) -> contextlib.AbstractContextManager[object]:
        """The scope that the model was made in; a replicated model was made in none."""
        in_none = self.strategy is None or is_replicated(self._model)
        return contextlib.nullcontext() if in_none else self.strategy.scope()

    def _file(self, worker: int) -> Path:
        return self._from / f"worker-{worker}"

    def _read(self) -> dict[str, Any]:
        own = self._file(self._worker)
        file = own if own.with_suffix(".json").exists() else self._file(0)  # there are more workers than there were
        state: dict[str, Any] = backup_files.read(file)
        if state["format"] != _FORMAT:
            raise BackupError(f"The backup in {self._from} was written by another version of replica_engine.")
        return state

    def _restore(self, state: dict[str, Any], metrics: bool) -> None:
        self._variables.read(self._from, state["variables"], metrics)
        self._give_replicas(state, metrics)
        saved_state.restore(self._callbacks, state["callbacks"])
        saved_state.restore_random_numbers(state["random"], self.strategy)

    def _give_replicas(self, state: dict[str, Any], metrics: bool) -> None:
        if state["size"] == self._size:
            self._variables.give_replicas(state["replicas"], metrics)

    def _tell_once(self) -> None:
        """Names what cannot come back: at the first backup, and of validations at the first one after such."""
        lost: list[str] = []
        if not self._told:
            self._told = True
            unsaved = self._unsaved.names()
            lost += [f"the state of the callback {name}, which has no get_state and set_state" for name in unsaved]
            lost += self._place.lost()
        if not self._told_of_validation and self._validation.source is not None:
            self._told_of_validation = True
            lost += [f"of the validation data, {each}" for each in self._validation.drawn()]
        if lost:
            listed = "\n".join(f"- {each}" for each in lost)
            _logger.warning(warning("not_backed_up", f"BackupAndRestore: a restart does not bring back:\n{listed}"))

    def _say(self, text: str) -> None:
        """Prints a line where Keras prints its own, unless `fit` is silent."""
        _logger.info(text)
        if self._is_verbose:
            print(text, flush=True)


def _check_built(model: keras.Model) -> None:
    """Raises an error if a layer would get its variables only in the first step, after the restore."""
    unbuilt = [name for name in keras_models.unbuilt_layers(model) if name != model.name or not model.variables]
    if unbuilt:
        is_whole = unbuilt[0] == model.name
        whose = "" if is_whole else f" (its layer {unbuilt[0]!r} is not)"
        unused = "" if is_whole else " A layer that nothing calls must be removed."
        raise BackupError(
            f"The model {model.name!r} is not built{whose}: it has no variables yet that a backup could be restored "
            f"into. Give it a keras.Input, or call it on a batch, model(x[:1]), before fit().{unused}"
        )


def fit(own: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Keras' `fit`; whatever ends it, handlers of signals are the program's again."""
    outer = getattr(_thread, "fits", None)
    training = None if outer is None else getattr(_thread, "training", None)
    with contextlib.ExitStack() as _thread.fits:
        try:
            return own(*args, **kwargs)
        finally:
            _thread.fits, _thread.training = outer, training


def follow_steps(own: Steps, source: Any) -> Iterator[Step]:
    """The steps of an epoch, which the training that runs on this thread follows, if there is one."""
    training: Training | None = getattr(_thread, "training", None)
    return own(source) if training is None else training.steps(own, source)


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
        self._folder = backup_files.BackupFolder(self.directory, keep)
        self._options: dict[str, Any] = {
            "save_freq": save_freq,
            "asynchronous": asynchronous,
            "delete": delete_checkpoint,
            "signals": tuple(signals),
        }
        save.install()  # which reads folders whose names TensorFlow takes for patterns
        keras_training.BEGIN.around(_begin)
        keras_training.STEPS.around(follow_steps)
        keras_training.FIT.around(fit)

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
        saved_state.prepare(container.callbacks)
    own(container, *args, **kwargs)
    Training(container, backup._folder, **backup._options).begin(container)
