"""What happens while Keras' `fit` runs: the callbacks it calls, and the loop over the batches of an epoch.

Keras tells a callback neither of the other callbacks nor of the iterator. A callback that saves the whole training
needs both. Checked on Keras 3.15.1.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import tensorflow as tf

# OwnedIterator: the iterator of a tf.data.Dataset in eager mode, whose state TensorFlow can save.
from tensorflow.python.data.ops.iterator_ops import OwnedIterator as _OwnedIterator

from replica_engine._tf.graphs import subgraphs
from replica_engine._tf.hook import Hook
from replica_engine._tf.keras.trainer import MODULE, READ_AHEAD, TRAINER

_of_backups = functools.partial(
    Hook, since="the first `replica_engine.keras.BackupAndRestore`", until="passes on to Keras for a `fit` without one"
)
BEGIN = _of_backups(
    "keras.src.callbacks.callback_list.CallbackList",
    "on_train_begin",
    why="a backup saves and restores the state of all callbacks of a `fit`",
)
STEPS = _of_backups(
    "keras.src.trainers.epoch_iterator.EpochIterator",
    "_enumerate_iterator",
    why="a backup saves the place in the data, and begins an epoch there",
)
FIT = _of_backups(
    f"{MODULE}.{TRAINER}",
    "fit",
    why="a backup that listens to signals gives the program its handlers back, also after an exception",
    until="passes on to Keras",
    order=1,
)
_OF_DATASETS, _OF_ARRAYS = "TFDatasetAdapter", "ArrayDataAdapter"
_WRITES = re.compile("Rng.*Skip|Assign.*VariableOp|ResourceScatter.*")


def saveable(iterator: Any) -> Any:
    """The iterator of tf.data inside an iterator over batches, whose state TensorFlow can save; None without one."""
    inner = getattr(iterator, "_iterators", None)  # of a distributed one, that of each worker of this process
    if inner is not None and len(inner) == 1:
        (only,) = inner
        iterator = getattr(only, "iterator", None) or getattr(only, "_iterator", None)
    return iterator if isinstance(iterator, _OwnedIterator) else None


def is_of_dataset(epoch_iterator: Any) -> bool:
    """Whether the data is a tf.data.Dataset that the user made."""
    return type(epoch_iterator.data_adapter).__name__ == _OF_DATASETS


def shuffles(epoch_iterator: Any) -> bool:
    """Whether Keras puts the data in another order."""
    return bool(getattr(epoch_iterator.data_adapter, "_shuffle", False))


def is_made_by_python(epoch_iterator: Any) -> bool:
    """Whether the user's Python code makes the batches: a generator, a PyDataset, a loader of another library."""
    return type(epoch_iterator.data_adapter).__name__ not in (_OF_DATASETS, _OF_ARRAYS)


def shuffles_on_threads(epoch_iterator: Any) -> bool:
    """Whether a thread of Keras shuffles a PyDataset, while another thread, of a distributed dataset, reads it."""
    has_threads = getattr(epoch_iterator.data_adapter, "enqueuer", None) is not None
    is_distributed = not isinstance(epoch_iterator._distributed_dataset, tf.data.Dataset)
    is_read = is_distributed or reads_ahead(epoch_iterator)
    return has_threads and is_read and epoch_iterator.data_adapter.shuffle


def reads_ahead(epoch_iterator: Any) -> bool:
    """Whether it gives whole batches to a model of a scope, which are read before they are asked for."""
    return hasattr(epoch_iterator, READ_AHEAD)


def shuffled_epoch(epoch_iterator: Any) -> int | None:
    """The number by which Keras shuffles a PyDataset in this epoch, since Keras 3.16; None for other data."""
    return getattr(epoch_iterator.data_adapter, "_epoch", None)


def set_shuffled_epoch(epoch_iterator: Any, epoch: int | None) -> None:
    """Lets Keras shuffle a PyDataset as in the epoch with that number, before it begins to read it."""
    adapter = epoch_iterator.data_adapter
    if epoch is None or shuffled_epoch(epoch_iterator) in (None, epoch):
        return
    adapter._epoch = epoch
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is not None and enqueuer.is_running():  # it has begun with the order of another epoch
        enqueuer.stop()


def writes_variables(epoch_iterator: Any) -> bool:
    """Whether a function of a dataset of tf.data writes variables, as one that draws from a generator does."""
    given = [epoch_iterator.data_adapter.get_tf_dataset()] if is_of_dataset(epoch_iterator) else []
    for dataset in subgraphs.reached(given, lambda each: getattr(each, "_inputs", tuple)()):
        for function in getattr(dataset, "_functions", tuple)():
            graph = function.function.graph.as_graph_def()
            inner = (node for each in graph.library.function for node in each.node_def)
            if any(_WRITES.fullmatch(node.op) for node in itertools.chain(graph.node, inner)):
                return True
    return False


def validates(model: Any, epoch_iterator: Any) -> bool:
    """Whether it is the one over the validation data of the `fit` that runs, which keeps it from epoch to epoch."""
    return getattr(model, "_eval_epoch_iterator", None) is epoch_iterator


def logs_of_epoch(model: Any, logs: Any) -> Any:
    """What Keras makes of the logs of the last step of an epoch: the values of the metrics, if these are in them."""
    return model._get_metrics_result_or_logs(logs)


def spec_of(epoch_iterator: Any) -> Any:
    """The shapes and dtypes of the batches."""
    return epoch_iterator._distributed_dataset.element_spec


def rows_of(epoch_iterator: Any) -> int | None:
    """How many samples a batch has; None if that is not known."""
    adapter = epoch_iterator.data_adapter
    if not is_of_dataset(epoch_iterator):
        return adapter.batch_size
    shape = getattr(tf.nest.flatten(adapter._dataset.element_spec)[0], "shape", None)
    return shape[0] if shape is not None and shape.rank else None


def begin_at(model: Any, epoch: int | None) -> None:
    """Lets the `fit` that has just begun continue with an epoch; None lets later ones begin with their own."""
    model._initial_epoch = epoch
