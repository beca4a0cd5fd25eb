"""`TrainingState`: what a loop of one's own puts into `tf.train.Checkpoint` besides the model and the optimizer."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine.checkpoints import file_owners, save
from replica_engine.errors import BackupError, base, value_errors
from replica_engine.keras.backup import backup_files, data_place, preemption, saved_state
from replica_engine.keras.lent_model import is_replicated

_logger = logging.getLogger("replica_engine")


class TrainingState(tf.train.experimental.PythonState):
    """The state of a training loop of your own, to be put into a `tf.train.Checkpoint` with the model and optimizer.

    It has the epoch and the batch, the random numbers of Python, NumPy, TensorFlow, Keras and the strategy, the seeds
    of random layers, and what replicas have each for themselves, such as moving statistics. A process that is killed
    and started again ends, bit by bit, where an undisturbed one ends.

    `batches` gives the batches of an epoch that are left, and counts them. Those that were trained already are taken
    from the dataset and thrown away.

    Args:
        model: a model whose layers may draw random numbers; None if there is none.
        strategy: the strategy that steps run on; None if there is none.
        signals: signals that end the training. `stops` says when.

    Attributes:
        epoch: how many epochs have ended.
        batch: how many batches of the epoch were taken.
        values: plain data of your own, by name: None, bools, numbers, strings, NumPy arrays, and lists, tuples and
            dicts of these.

    Raises:
        BackupError: `model` or `strategy` is none; or, when it is saved, `values` has something else.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> state = replica_engine.TrainingState()
        >>> for batch in state.batches(tf.data.Dataset.range(4).batch(2)):
        ...     print(state.epoch, state.batch)
        0 1
        0 2
        >>> state.epoch, state.batch
        (1, 0)
    """

    def __init__(
        self,
        model: keras.Model | None = None,
        strategy: tf.distribute.Strategy | None = None,
        *,
        signals: Iterable[int] = (signal.SIGTERM,),
    ):
        if model is not None and (not isinstance(model, keras.Model) or is_replicated(model)):
            raise BackupError(f"model must be a Keras model, not {base.brief(model)}. With fit, use BackupAndRestore.")
        if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
            raise BackupError(f"strategy must be a tf.distribute.Strategy, not {base.brief(strategy)}.")
        self.epoch = self.batch = 0
        self.values: dict[str, Any] = {}
        self._strategy = strategy
        self._saving = file_owners.find_strategy_team(strategy)
        workers = 1 if self._saving is None else self._saving.size
        self._size = [workers, 1 if strategy is None else strategy.num_replicas_in_sync]
        self._variables = None if model is None else saved_state.Variables(model, workers)
        save.install()
        if self._saving is not None:
            file_owners.belong(self._saving, self)
        self._made = 0  # iterators of all epochs
        self._batches: int | None = None  # of an epoch; None if that is not known
        self._restored: dict[str, Any] | None = None
        self._preemption = preemption.Preemption(signals, None if self._saving is None else self._saving.exchange)

    def batches(self, dataset: Any) -> Iterator[Any]:
        """The batches of the epoch that are left.

        Args:
            dataset: a dataset of tf.data, or a distributed one.

        Yields:
            Each batch; `batch` counts it. At the end, `epoch` counts the epoch, and `batch` is 0.
        """
        restored, self._restored = self._restored, None
        before, now = self._batches, _count_batches(dataset)
        self._batches = now
        if restored is not None and self.batch and before is not None and now is not None and before != now:
            _logger.warning(value_errors.warn_other_batches(self.batch, before, now, None))
        if restored is not None:
            for _ in range(restored["made"] - bool(self.batch) - self._made):
                iter(dataset)  # each iterator gets another order of `shuffle`
            self._made = restored["made"] - bool(self.batch)
        self._made += 1
        iterator = iter(dataset)
        data_place.skip(iterator, self.batch, print)
        if restored is not None:
            self._continue(restored)
        for batch in iterator:
            self.batch += 1
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def stops(self) -> bool:
        """Whether a signal has come and the training is to save and call `exit`; to be called after each step.

        With several workers it is True on all of them after the same step. All must call it equally often. The first
        call begins to listen; from then on the first signal only makes it True. A second SIGINT ends the process, and
        another signal that comes again does after 10 seconds.
        """
        self._preemption.listen()
        self._stop = self._preemption.agreed()
        return self._stop is not None

    _stop: signal.Signals | None = None

    def exit(self) -> None:
        """Ends the process with a status on which launchers start it again: 128 plus the number of the signal."""
        number = self._stop or signal.SIGTERM
        name, status = signal.Signals(number).name, preemption.exit_status(number)
        if self._saving is None or self._saving.is_chief:
            print(f"{name}, after {backup_files.in_words(self.epoch, self.batch)}. Exit status {status}.", flush=True)
        self._preemption.answered()
        raise SystemExit(status)

    # For `checkpoints.file_owners`: an asynchronous checkpoint of TensorFlow's would ask for the state later, on a
    # thread.
    _saves_at_once = True

    def serialize(self) -> str:
        """What TensorFlow saves."""
        state = {
            "size": self._size,
            "epoch": self.epoch,
            "batch": self.batch,
            "made": self._made,
            "batches": self._batches,
            "values": self.values,
            "random": saved_state.random_numbers(self._strategy),
            "seeds": [] if self._variables is None else self._variables.seeds(),
            "replicas": {} if self._variables is None else self._variables.read_replica_values(),
        }
        try:
            own = backup_files.dumps(state)
        except backup_files.NotPlainError as error:
            raise BackupError(f"TrainingState cannot save {error}. `values` takes plain data only.") from error
        return backup_files.dumps([own] if self._saving is None else self._saving.exchange("the state to save", own))

    def deserialize(self, string_value: bytes) -> None:
        """Restores what TensorFlow has read."""
        states = backup_files.loads(tf.compat.as_text(string_value))
        worker = 0 if self._saving is None else self._saving.worker
        state = backup_files.loads(states[worker if worker < len(states) else 0])
        self.epoch, self.batch, self.values = state["epoch"], state["batch"], state["values"]
        self._batches = state.get("batches")
        self._restored = state
        self._continue(state)

    def _continue(self, state: dict[str, Any]) -> None:
        """Goes on with the random numbers, and with what each replica has, of a state."""
        saved_state.restore_random_numbers(state["random"], self._strategy)
        if self._variables is not None:
            self._variables.give_seeds(state["seeds"])
            if state["size"] == self._size:
                self._variables.give_replicas(state["replicas"])


def _count_batches(dataset: Any) -> int | None:
    """How many batches an epoch has; None if that is not known."""
    found = getattr(dataset, "cardinality", None)
    count = found() if callable(found) else found
    return None if count is None or int(count) < 0 else int(count)
