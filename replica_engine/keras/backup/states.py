"""The state of the callbacks of a `fit`, as plain data.

Keras' callbacks have no method for that, so a table says which attributes are their state. A callback of a user's own
may have `get_state()`, which returns plain data, and `set_state(state)`. One that has neither, and changes its own
attributes while it runs, is named: its state does not come back.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import callbacks

from replica_engine.checkpoints.training import plain

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
    """The state of each callback that has one, by its name.

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
            text = repr(plain.encode(value, arrays))
        except plain.NotPlainError:
            found[name] = f"object {id(value)}"
        else:
            found[name] = text + "".join(array.tobytes().hex() for array in arrays.values())
    return found


def _cut(logger: keras.callbacks.CSVLogger, length: int) -> None:
    """Takes off a file what was written after the backup: it will be written again."""
    logger.csv_file.flush()
    logger.csv_file.truncate(length)
    logger.csv_file.seek(0, os.SEEK_END)
