"""What a backup has: variables, callbacks, seeds and random numbers."""

from __future__ import annotations

import collections
import itertools
import os
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks

from replica_engine.backend import find_backend
from replica_engine.errors import BackupError
from replica_engine.keras.backup import backup_files
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import function_graphs
from replica_engine.upstream.keras import keras_models, keras_variables


def random_numbers(strategy: object = None) -> dict[str, Any]:
    """All random numbers of the process now, as plain data: Python's, NumPy's, TensorFlow's and the strategy's.

    The state of a `tf.random.Generator` and of Keras' seed generators is in variables, which are saved as such. What
    cannot be read is the state of stateful random ops of a graph (`tf.random.normal` in a `tf.function`): it is in
    TensorFlow's kernels.

    Args:
        strategy: a strategy whose replicas draw from a state of its own, or None.
    """
    own = _find_own_random_numbers(strategy)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow": function_graphs.state(),
        "strategy": None if own is None else own.state(),
    }


def restore_random_numbers(state: dict[str, Any], strategy: object = None) -> None:
    """Continues with the random numbers of a state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    function_graphs.restore(state["tensorflow"])
    own = _find_own_random_numbers(strategy)
    if own is not None and state["strategy"] is not None:
        own.restore(state["strategy"])


def _find_own_random_numbers(strategy: object) -> Any:
    """What the replicas of a strategy draw from, if that is not TensorFlow's own state."""
    return getattr(find_backend(strategy), "random_numbers", None)


OF_CHECKPOINT = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
OF_BOARD = ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations")
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    callbacks.ModelCheckpoint: OF_CHECKPOINT,
    callbacks.TensorBoard: OF_BOARD,
    callbacks.History: ("epoch", "history"),
    callbacks.CSVLogger: ("keys", "append_header"),
}
"""The attributes of Keras' callbacks that change while they run and that matter later."""

_STATELESS: tuple[type, ...] = (
    callbacks.LearningRateScheduler,
    callbacks.ProgbarLogger,
    callbacks.TerminateOnNaN,
    callbacks.BackupAndRestore,
    callbacks.LambdaCallback,
    callbacks.RemoteMonitor,
    callbacks.SwapEMAWeights,
)
_OF_KERAS = ("_model", "params")  # what Keras sets in each callback


def captured(listed: Sequence[keras.callbacks.Callback]) -> dict[str, object]:
    """The state of each callback that has one, by its name, as plain data.

    Keras' callbacks have no method for that, so a table says which attributes are their state. A callback of a user's
    own may have `get_state()`, which returns plain data, and `set_state(state)`. One that has neither, and changes its
    own attributes while it runs, is named (`Unsaved`): its state does not come back.

    Raises:
        NotPlainError: a `get_state` returned something that is not plain data.
    """
    return {name: state for name, each in _named(listed) if (state := _state(each))}


def restore(listed: Sequence[keras.callbacks.Callback], states: dict[str, dict[str, Any]]) -> None:
    """Gives callbacks the states that `captured` returned; one that is new keeps its own."""
    for name, each in _named(listed):
        if name in states:
            state = dict(states[name])
            own, length = state.pop("own", None), state.pop("length", None)
            if own is not None:
                each.set_state(own)
            vars(each).update(state)
            if length is not None:
                _cut(each, length)


def prepare(listed: Sequence[keras.callbacks.Callback]) -> None:
    """Lets callbacks go on with their files where a backup will be restored; to be called before they begin."""
    for each in listed:
        if isinstance(each, callbacks.CSVLogger) and os.path.exists(each.filename):
            each.append = True


class Unsaved:
    """Tells which callbacks have a state that cannot be saved.

    Args:
        listed: the callbacks, when a `fit` has begun.
    """

    def __init__(self, listed: Sequence[keras.callbacks.Callback]):
        self._before = [(each, _outline(each)) for each in listed if not _is_known(each)]

    def names(self) -> list[str]:
        """The classes of those that have changed attributes of theirs since."""
        return [type(each).__name__ for each, before in self._before if _outline(each) != before]


def _named(listed: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    seen: collections.Counter[str] = collections.Counter()
    for each in listed:
        # Not by their place: a program may list other callbacks before them when it is started again.
        name = type(each).__name__
        seen[name] += 1
        yield f"{name} {seen[name]}", each


def _state(each: keras.callbacks.Callback) -> dict[str, object]:
    attributes = next((names for kind, names in _ATTRIBUTES.items() if isinstance(each, kind)), ())
    state = {name: vars(each)[name] for name in attributes if name in vars(each)}
    if _has_own(each):
        state["own"] = each.get_state()
    if isinstance(each, callbacks.CSVLogger) and each.csv_file is not None and not each.csv_file.closed:
        each.csv_file.flush()
        state["length"] = os.fstat(each.csv_file.fileno()).st_size  # by its name it may be in another folder now
        state["append_header"] = not state["length"]
    return state


def _has_own(each: keras.callbacks.Callback) -> bool:
    return hasattr(each, "get_state") and hasattr(each, "set_state")


def _is_known(each: keras.callbacks.Callback) -> bool:
    """Whether a callback's state is saved, or it has none: one of Keras' own, or one with the two methods."""
    is_ours = type(each).__module__.split(".")[0] == __name__.split(".")[0]  # BackupAndRestore
    return _has_own(each) or type(each) in _ATTRIBUTES or type(each) in _STATELESS or is_ours


def _outline(each: keras.callbacks.Callback) -> dict[str, str]:
    """What the attributes of a callback are now: plain data as text, everything else by its identity."""
    found = {}
    for name, value in vars(each).items():
        if name in _OF_KERAS:
            continue
        arrays: dict[str, np.ndarray] = {}
        try:
            text = repr(backup_files.encode(value, arrays))
        except backup_files.NotPlainError:
            found[name] = f"object {id(value)}"
        else:
            found[name] = text + "".join(array.tobytes().hex() for array in arrays.values())
    return found


def _cut(logger: keras.callbacks.CSVLogger, length: int) -> None:
    """Takes off a file what was written after the backup: it will be written again."""
    logger.csv_file.flush()
    # The position stays behind the end after that. What is written there would leave a hole of zeros.
    logger.csv_file.truncate(length)
    logger.csv_file.seek(0, os.SEEK_END)


_PREFIX = "variables"
METRICS = "metrics"


class Variables:
    """The variables of a model, as they are now; it makes a checkpoint of them only if they have changed.

    They are those of the model, its optimizers, metrics, and seeds, as a checkpoint of TensorFlow. They are stored by
    number, in the order in which Keras lists them, since Keras' names of layers count up in a process. Their names are
    kept beside them for messages.

    Args:
        model: the model.
        workers: how many workers train it.
    """

    def __init__(self, model: keras.Model, workers: int):
        self._model = model
        self._workers = workers
        self._made: list[int] = []
        self._checkpoint: Any = None

    def describe(self) -> dict[str, list[list[Any]]]:
        """The name, the shape and the dtype of each variable, by group."""
        return {name: _described(group) for name, group in self._groups().items()}

    def trained(self) -> list[list[int] | None]:
        """The numbers of the model's variables that each optimizer was built for; None for one that is not built."""
        numbers = {id(variable): number for number, variable in enumerate(self._model.variables)}
        found: list[list[int] | None] = []
        for one in keras_models.list_optimizers(self._model):
            own = [id(each) for each in keras_models.trained_by(one)] if one.built else []
            found.append([numbers[each] for each in own] if own and numbers.keys() >= set(own) else None)
        return found

    def trainable(self) -> list[int]:
        """The numbers of the model's variables that are not frozen now."""
        own = {id(variable) for variable in self._model.trainable_variables}
        return [number for number, variable in enumerate(self._model.variables) if id(variable) in own]

    def check_trained(self, folder: Path, trained: list[list[int] | None], trainable: list[int] | None) -> None:
        """Compares what the optimizers of a backup were built for with what is trained here.

        Args:
            folder: the folder of the backup.
            trained: what `trained` returned when it was written.
            trainable: what `trainable` returned then.

        Raises:
            BackupError: an optimizer here was built for other variables, or the first step would find some of which
                the backup has no state, since they were frozen.
        """
        for there, here in zip(trained, self.trained(), strict=False):
            differ = set(there) ^ set(here) if there is not None and here is not None else ()
            self._refuse(folder, differ, here or ())
        if trainable is not None and None not in trained:
            known = set(trainable).union(*(each for each in trained if each is not None))
            self._refuse(folder, set(self.trainable()) - known, self.trainable())

    def _refuse(self, folder: Path, numbers: Collection[int], here: Collection[int]) -> None:
        if numbers:
            first = min(numbers)
            then, now = ("frozen", "trained") if first in here else ("trained", "frozen")
            raise BackupError(
                f"The backup in {folder} is one of a training in which {self._model.variables[first].path} was {then}, "
                f"and here it is {now}: what the optimizer keeps of each weight would be read into others. Set "
                "`trainable` of the layers as in the program that saved it, or delete the folder to begin from the "
                "first epoch."
            )

    def build_optimizers(self, trained: list[list[int] | None]) -> None:
        """Builds optimizers that the first step would build, so that a backup can be read into their variables.

        To be called in the scope of the strategy that the model belongs to.
        """
        variables = self._model.variables
        for one, numbers in zip(keras_models.list_optimizers(self._model), trained, strict=False):
            if numbers is not None and not one.built:
                one.build([variables[number] for number in numbers])

    def write(self, folder: Path, options: tf.train.CheckpointOptions) -> None:
        """Writes all variables into a folder; the options say whether this waits for the disk."""
        groups = self._groups()
        # By identity: a callback may set another optimizer, whose variables have the names of the last one's.
        found = [id(variable) for group in groups.values() for _, variable in group]
        if self._checkpoint is None or found != self._made:
            self.wait()
            self._checkpoint, self._made = _checkpoint(groups), found
        self._checkpoint.write(str(folder / _PREFIX), options)

    def wait(self) -> None:
        """Waits until what is being written is on the disk.

        Raises:
            tf.errors.OpError: it could not be written.
        """
        if self._checkpoint is not None:
            self._checkpoint.sync()

    def read(self, folder: Path, described: dict[str, list[list[Any]]], metrics: bool) -> None:
        """Reads the variables of a folder.

        Args:
            folder: the folder.
            described: what `describe` returned when they were written.
            metrics: whether those of metrics are read too.

        Raises:
            BackupError: the model has other variables.
        """
        if described["random"] and keras_variables.global_seeds() is None and described["random"][-1][0] == _GLOBAL:
            keras_variables.global_seeds(make=True)
        groups = {name: group for name, group in self._groups().items() if metrics or name != METRICS}
        for name, group in groups.items():
            _check(folder, name, described.get(name, []), _described(group))
        # Metrics may have been left out above, and are no mistake in the file then.
        _checkpoint(groups).read(str(folder / _PREFIX)).expect_partial()

    def seeds(self) -> list[np.ndarray]:
        """The states of the seed generators of the layers, and of Keras' own if there is one."""
        return [keras_models.underlying(each).numpy() for each in self._seeds()]

    def give_seeds(self, values: list[np.ndarray]) -> None:
        """Continues with the states that `seeds` returned."""
        if len(values) > len(self._seeds()):
            keras_variables.global_seeds(make=True)
        for each, value in zip(self._seeds(), values, strict=False):
            each.assign(value)

    def _seeds(self) -> list[keras.Variable]:
        found = [each for each in self._model.variables if keras_models.is_seed(each)]
        own = keras_variables.global_seeds()
        return found if own is None else [*found, own.state]

    def read_replica_values(self) -> dict[str, list[np.ndarray]]:
        """The value on each replica of this process, of each variable of which replicas have different ones.

        Those are moving statistics, metrics and seeds, and never weights. A checkpoint has one value of each.
        """
        found = {}
        for name, variable in self._list_unequal_variables():
            each_value = getattr(variable, "each_value", None)  # of one that is on the devices
            values = [each.numpy() for each in variable.values] if each_value is None else each_value()
            if (values and self._workers > 1) or any(value.tobytes() != values[0].tobytes() for value in values):
                found[name] = values
        return found

    def give_replicas(self, values: dict[str, list[np.ndarray]], metrics: bool = True) -> None:
        """Gives replicas their own values, of metrics too if wanted; there are as many as when they were saved."""
        for name, variable in self._list_unequal_variables():
            own = values.get(name, ())
            if not own or (name.startswith(METRICS) and not metrics):
                continue
            if hasattr(variable, "assign_each"):
                variable.assign_each(own)
                continue
            for component, value in zip(variable.values, own, strict=True):
                component.assign(value)

    def _list_unequal_variables(self) -> Iterator[tuple[str, Any]]:
        for name, group in self._groups().items():
            for number, (_, variable) in enumerate(group):
                on_read = isinstance(variable, distribute.SyncOnReadVariable)
                is_mirrored = isinstance(variable, distribute.DistributedVariable) and not on_read
                if on_read or (is_mirrored and not variable.trainable and name != "optimizer"):
                    yield f"{name} {number}", variable

    def _groups(self) -> dict[str, list[tuple[str, tf.Variable]]]:
        model: Any = self._model
        seen: set[int] = set()

        def group(variables: Any) -> list[tuple[str, tf.Variable]]:
            found = []
            for variable in variables:
                value = keras_models.underlying(variable)
                if value is not None and id(variable) not in seen:
                    seen.add(id(variable))
                    found.append((variable.path, value))
            return found

        groups = {
            "model": group(model.variables),
            "optimizer": group([each for one in keras_models.list_optimizers(model) for each in one.variables]),
            METRICS: group(model.metrics_variables),
        }
        parts = tf.train.TrackableView(model).descendants()
        generators = [each for each in parts if isinstance(each, tf.random.Generator)]
        groups["random"] = [("tf.random.Generator", each.state) for each in generators]
        seeds = keras_variables.global_seeds()
        if seeds is not None:
            groups["random"].append((_GLOBAL, keras_models.underlying(seeds.state)))
        return groups


_GLOBAL = "Keras' global seed generator"


def _described(group: list[tuple[str, tf.Variable]]) -> list[list[Any]]:
    return [[path, list(variable.shape), variable.dtype.name] for path, variable in group]


def _checkpoint(groups: dict[str, list[tuple[str, tf.Variable]]]) -> tf.train.Checkpoint:
    numbered = {
        name: {f"{number:05d}": variable for number, (_, variable) in enumerate(group)}
        for name, group in groups.items()
        if group
    }
    return tf.train.Checkpoint(**numbered)


def _check(folder: Path, group: str, there: list[list[Any]], here: list[list[Any]]) -> None:
    """Raises an error if the variables of a backup are not those of the model."""
    for one, other in itertools.zip_longest(there, here):
        if one is None or other is None or one[1:] != other[1:]:
            words = [f"{each[0]} {each[2]}{each[1]}" if each is not None else "no variable" for each in (one, other)]
            raise BackupError(
                f"The backup in {folder} is one of another model: where it has {words[0]}, the {group} here has "
                f"{words[1]}. Make the model, optimizer and metrics as in the program that saved it, or delete the "
                "folder to begin from the first epoch."
            )
