"""The place of a `fit` in its data.

Where TensorFlow can save the state of the iterator (a dataset without Python code and without stateful random ops), the
place is that state. That of a repeated dataset (`steps_per_epoch`) is not used: it lacks the order of the next
repetition while `shuffle` is between two. Otherwise the batches are taken again and thrown away: of arrays only those
of one epoch, since Keras shuffles each epoch in the same order; of a dataset after as many iterators as the first
process had made, since each gives `shuffle` another order; of a repeated dataset and a generator all since the
beginning. Python's and NumPy's random numbers then start from where they were when the iterator was made.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from replica_engine.errors import BackupError, value_errors
from replica_engine.keras.backup import saved_state
from replica_engine.upstream.graphs import function_graphs
from replica_engine.upstream.keras import keras_training

_logger = logging.getLogger("replica_engine")

_FILE = "-data"
_AHEAD = 100  # batches, more than what lies between a `shuffle` and the training

Step = tuple[int, int, Any]
"""The number of the first and of the last batch of a step, and the iterator to take them from."""

_EVERY = 10.0  # seconds between two lines that say how far skipping is
_NOT_SAVEABLE = (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError, NotImplementedError)


class DataPlace:
    """Follows a `fit` through its data.

    Args:
        say: prints a line for the user.

    Attributes:
        source: Keras' epoch iterator; None before the first.
        why_not: why the state of the iterator cannot be saved; "" if it can, or if that was not tried yet.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self.source: Any = None
        self._iterator: Any = None
        self._made = 0  # iterators
        self._taken = 0  # batches of the last one
        self._random: Any = None  # random numbers when that was made
        self._begun: Any = None  # random numbers when the epoch began, until its iterator is made
        self.why_not = ""

    def follow(self, source: Any) -> None:
        """Follows an epoch iterator from now on."""
        if source is self.source:
            return
        self.source, make = source, source._get_iterator

        def made() -> Any:
            self._made, self._taken, self._random = self._made + 1, 0, self._begun or saved_state.random_numbers()
            return make()

        source._get_iterator = made

    def counted(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of an epoch, which are counted."""
        self._begun = saved_state.random_numbers()  # Keras may draw the order before it makes the iterator
        for first, last, iterator in steps:
            self._iterator, self._begun = iterator, None
            self._taken += last - first + 1
            yield first, last, iterator

    def save(self, path: Path | None, batch: int) -> dict[str, Any]:
        """Saves the place; returns what is to be kept as plain data.

        Args:
            path: the beginning of the names of files to write; None to write none.
            batch: how many batches of the epoch were trained; 0 at its beginning.
        """
        source = self.source
        current = self._iterator if batch else source._current_iterator
        is_saved = current is not None and source.steps_per_epoch is None and path and not self.why_not
        iterator = keras_training.saveable(current) if is_saved else None
        if iterator is not None:
            try:
                tf.train.Checkpoint(iterator=iterator).write(f"{path}{_FILE}")
            except _NOT_SAVEABLE as error:
                self.why_not, iterator = str(error).split("[Op:")[0].split("}} ")[-1].strip(), None
        return {
            "saved": iterator is not None,
            "batch": batch,
            "made": self._made,
            "taken": self._taken,
            "random": self._random,
            "shuffled_epoch": keras_training.shuffled_epoch(source),
            "whole": keras_training.reads_ahead(source),
            "steps_seen": source._steps_seen,
            "batches": source._num_batches,
            "rows": keras_training.count_batch_rows(source),
            "steps": source.steps_per_execution,
            "has_current": source._current_iterator is not None,
        }

    def lost(self) -> list[str]:
        """What of the data a restart does not bring back, in words; to be asked after `save`."""
        found = []
        source = self.source
        is_repeated = source.steps_per_epoch is not None
        is_skipped = bool(self.why_not) or is_repeated or not keras_training.is_of_dataset(source)
        if keras_training.is_made_by_python(source):
            found.append(
                "what the Python code that makes the batches keeps (counters, open files, an order of its own): the "
                "batches that were trained are taken from it again, from its beginning"
            )
        found += self.drawn()
        if (
            is_skipped
            and (keras_training.shuffles(source) or keras_training.is_of_dataset(source))
            and not function_graphs.has_seed()
        ):
            found.append(
                "the order of shuffled data, and random numbers in a dataset: no seed is set. Call "
                "keras.utils.set_random_seed(1) at the beginning of the program"
            )
        return found

    def drawn(self) -> list[str]:
        """What nobody can draw again, in words: it is lost for data that is read from its beginning too."""
        found = []
        if keras_training.shuffles_on_threads(self.source):
            found.append(
                "the order of a PyDataset with workers= and shuffle=True: a thread of Keras draws it at any moment"
            )
        if keras_training.writes_variables(self.source):
            found.append(
                "the variables that functions of the dataset write, such as a tf.random.Generator. Draw with "
                "tf.random.stateless_uniform, and seeds from tf.data.Dataset.random(seed)"
            )
        return found

    def go_to(self, steps: Iterator[Step], saved: dict[str, Any], path: Path, is_same_size: bool) -> Iterator[Step]:
        """Goes to a place at the beginning of an epoch; returns the steps that are left of it.

        Args:
            steps: Keras' steps of the epoch.
            saved: what `save` returned.
            path: what `save` got; without the file there, batches are skipped.
            is_same_size: whether there are as many workers and replicas as there were. The state of an iterator is that
                of the part of one worker, so batches are skipped otherwise.
        """
        source, batch = self.source, saved["batch"]
        per = source.steps_per_execution
        if batch:
            batch = self._checked(saved)
        source._num_batches = source._num_batches or saved["batches"]
        goes_on = source.steps_per_epoch is not None and saved["has_current"]  # with one iterator over epochs
        file = Path(f"{path}{_FILE}")
        has_file = saved["saved"] and is_same_size and file.with_name(f"{file.name}.index").exists()
        has_file = has_file and not self._may_have_ended(saved)
        # Until 0.3, a model of a scope had another iterator, over the parts of replicas.
        has_file = has_file and saved.get("whole", False) == keras_training.reads_ahead(source)
        if batch:
            self._warn_of_other_batches(saved, has_file)
        before, last = saved_state.random_numbers(), None
        keras_training.set_shuffled_epoch(source, saved.get("shuffled_epoch"))
        if keras_training.is_of_dataset(source):
            for _ in range(saved["made"] - bool(batch or goes_on) - has_file):
                last = iter(source._get_iterator())
        if not has_file and saved["random"] is not None:
            saved_state.restore_random_numbers(saved["random"])
        if goes_on:
            source._current_iterator = iter(source._get_iterator())
            source._steps_seen = saved["steps_seen"] - batch
        is_between = batch % per > 0  # two executions: the process before had another number of steps in each
        if is_between:
            source.steps_per_execution = 1
        for _ in range(-(-batch // source.steps_per_execution)):
            *_, self._iterator = next(steps)
        if has_file:
            current = self._iterator if batch else source._current_iterator or last or iter(source._get_iterator())
            tf.train.Checkpoint(iterator=keras_training.saveable(current)).read(str(file)).assert_consumed()
        elif batch or goes_on:
            skip(self._iterator if batch else source._current_iterator, saved["taken"], self._say, _steps(saved) - 1)
        self._made, self._taken, self._random = saved["made"], saved["taken"], saved["random"]
        saved_state.restore_random_numbers(before)
        return self.counted(_together(source, steps, per) if is_between else steps)

    def _checked(self, saved: dict[str, Any]) -> int:
        """The batch after which a process goes on in the epoch.

        Raises:
            BackupError: the epoch has no such batch now, or would end at another one than the epochs after it.
        """
        source, batch = self.source, saved["batch"]
        total, per = source.num_batches, source.steps_per_execution
        if total is None:
            return batch
        if batch >= total + _steps(saved):  # the last execution of an epoch may count batches that are not there
            raise BackupError.fewer_batches(batch, total, saved["batches"])
        if source.steps_per_epoch is not None and batch - (batch - total) // per * per > -(-total // per) * per:
            raise BackupError(
                f"The backup was written after batch {batch} of an epoch of {total} batches (steps_per_epoch), and "
                f"{per} steps at once (steps_per_execution) do not end where the epoch ends: batches of the next "
                "epoch would be trained in this one. Give compile() the steps_per_execution of the program that saved "
                f"it, {_steps(saved)}, or one that divides {total - batch}."
            )
        return min(batch, total)

    def _warn_of_other_batches(self, saved: dict[str, Any], has_file: bool) -> None:
        """Warns if the place in batches is another place in the data than it was; the state of an iterator is none."""
        source, batch, had = self.source, saved["batch"], saved.get("rows")
        rows, total = keras_training.count_batch_rows(source), source.num_batches
        if rows is not None and had is not None:
            if rows > had or (rows < had and not has_file):
                _logger.warning(value_errors.warn_other_batches(batch, had, rows, rows < had))
        elif source.steps_per_epoch is None and None not in (total, saved["batches"]) and total != saved["batches"]:
            _logger.warning(value_errors.warn_other_batches(batch, saved["batches"], total, None))

    def _may_have_ended(self, saved: dict[str, Any]) -> bool:
        """Whether `shuffle` may have given its last element, and its order of the next epoch would be another one.

        Each iterator gets the next order, and so does one whose state is read. That state says which order comes next,
        unless all elements have left the `shuffle`, which happens some batches before the end. Then only the number of
        iterators says it. A process that reads a state has made two: too many if the first one was saved.
        """
        batches = saved["batches"]
        return saved["made"] == 1 and saved["batch"] > 0 and (batches is None or batches - saved["batch"] <= _AHEAD)


def _steps(saved: dict[str, Any]) -> int:
    """How many steps the process that saved a place made at once."""
    return int(saved.get("steps", 1))


def _together(source: Any, steps: Iterator[Step], count: int) -> Iterator[Step]:
    """The steps that are left of an epoch, so many at once; Keras' generator gives single ones."""
    try:
        for first, _, iterator in steps:
            yield first, first + count - 1, iterator
            for _ in itertools.islice(steps, count - 1):
                pass
    finally:
        source.steps_per_execution = count


def skip(iterator: Any, batches: int, say: Callable[[str], None], uncertain: int = 0) -> None:
    """Takes batches and throws them away.

    Args:
        iterator: where they are taken from.
        batches: how many.
        say: prints a line for the user.
        uncertain: how many of them may not be there: several steps at once count some that no data was left for.

    Raises:
        BackupError: the data ends before.
    """
    if batches:
        say(f"resuming: skipping batches of the data that were taken already: {batches}")
    told = time.monotonic()
    for number in range(batches):
        try:
            next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            if number < batches - uncertain:
                raise BackupError.fewer_batches(batches, number, None) from None
            return
        if time.monotonic() - told > _EVERY:
            told = time.monotonic()
            say(f"resuming: {number + 1} of {batches} batches skipped")
