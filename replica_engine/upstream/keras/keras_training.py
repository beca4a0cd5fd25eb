"""Keras' trainer, optimizers and files: the parts that this library calls. It does not import Keras.

Checked on Keras 3.10 to 3.16; what happens while `fit` runs, and files, on Keras 3.15.1.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

# OwnedIterator: the iterator of a tf.data.Dataset in eager mode, whose state TensorFlow can save.
from tensorflow.python.data.ops.iterator_ops import OwnedIterator as _OwnedIterator

from replica_engine.upstream import versions
from replica_engine.upstream.checkpoint_hooks import Worker, saved_by
from replica_engine.upstream.distribute import DistributedVariable
from replica_engine.upstream.graphs import graph_walk
from replica_engine.upstream.hook import FIRST_WORKERS_SCOPE, Hook, StandIn

if TYPE_CHECKING:
    import keras


# The parts of a Keras optimizer that accumulate gradients: `gradient_accumulation_steps`.
#
# Keras keeps one accumulator per weight. `_backend_apply_gradients` adds to the accumulators in k - 1 of k steps, and
# updates the weights in the last one, in two branches of one condition. The functions here are the pieces of that
# method, for code that puts a reduction over replicas between them.

_BASE_OPTIMIZER = "keras.src.backend.tensorflow.optimizer"
OPTIMIZER = "TFOptimizer"
APPLY = "_backend_apply_gradients"
ADD_VARIABLE = "add_variable_from_reference"
ACCUMULATOR = "gradient_accumulator"  # the name that `build` passes to ADD_VARIABLE


def accumulates(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer accumulates gradients and its state is on the replicas of a strategy."""
    return bool(optimizer.gradient_accumulation_steps) and isinstance(optimizer._iterations.value, DistributedVariable)


def is_of_no_strategy(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer was made outside all scopes: it has one state, and no merge call around its updates."""
    return not isinstance(optimizer._iterations.value, DistributedVariable)


def accumulators(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable] | None = None
) -> list[keras.Variable]:
    """The Keras variables in which a built optimizer accumulates gradients: those of `variables`, or all."""
    made = getattr(optimizer, "_accumulated_gradients", ())
    if variables is None:
        return [variable for variable in made if variable is not None]
    return [made[optimizer._get_variable_index(variable)] for variable in variables]


def is_update_step(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Whether this step is the last one of its group, which updates the weights; a scalar bool."""
    return tf.equal((optimizer._iterations.value + 1) % optimizer.gradient_accumulation_steps, 0)


def clips(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer clips gradients, by whichever norm."""
    return any(getattr(optimizer, name, None) is not None for name in ("clipnorm", "clipvalue", "global_clipnorm"))


def update(optimizer: keras.optimizers.Optimizer, grads: list[tf.Tensor], variables: list[keras.Variable]) -> None:
    """Updates variables with the gradients of a whole group of steps."""
    clipped = optimizer._clip_gradients(grads)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(clipped, variables, optimizer.learning_rate)


def average(optimizer: keras.optimizers.Optimizer) -> None:
    """Continues the moving averages of weights, as Keras does in every step of a group."""
    if not optimizer.use_ema:
        return
    variables = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(variables)
    if optimizer.ema_overwrite_frequency:
        tf.cond(
            tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0),
            lambda: optimizer._overwrite_model_variables_with_average_value(variables),
            lambda: None,
        )


# Keras' training and test functions, which implement `steps_per_execution`.
#
# Keras runs `steps_per_execution` steps as a loop of a `tf.function` on the host and offers no other way. The trainer's
# method `_make_function` takes the function that does one step, and makes the function that `fit` and `evaluate` call.
# If Keras has no such method, Keras' own loop stays.
#
# `reduce_per_replica` combines the logs of all replicas: it takes the mean, but under a `tf.distribute.TPUStrategy` it
# takes the logs of replica 0. This library's TPUStrategy is a subclass, and takes the mean
# (`keras_hooks.combine_logs`).

MODULE = "keras.src.backend.tensorflow.trainer"
TRAINER = "Trainer" if versions.keras_renamed() else "TensorFlowTrainer"
METHOD = "_make_function"
REDUCE = "reduce_per_replica"
DISTRIBUTED, ORIGINAL = "_distributed_dataset", "_original_dataset"
"""Where Keras keeps the distributed dataset, and TensorFlow in that the one that it was made of."""
KEPT = "_first_batches"
"""What an adapter has taken of a generator to find out the shapes, and will give first."""
COMPILES = "keras.src.trainers.trainer"
BASE = "BaseTrainer" if versions.keras_renamed() else "Trainer"
"""The class of all backends' trainers, which has `compile`, and its module."""


def find_strategy(model: object) -> Any:
    """The strategy under which a model was built; None if it was built under none, and for anything else."""
    return getattr(model, "_distribute_strategy", None)


def has_keras_step(model: keras.Model, name: str) -> bool:
    """Whether a step such as `train_step` is Keras' own and not overridden by the model."""
    trainers = getattr(sys.modules[MODULE], TRAINER)  # the class that has Keras' own step methods
    return getattr(type(model), name) is getattr(trainers, name) and name not in vars(model)


def has_keras_loss(model: keras.Model) -> bool:
    """Whether a model adds its losses up as Keras does."""
    return getattr(type(model).compute_loss, "__module__", "").partition(".")[0] == "keras"


def makes_functions(model: keras.Model) -> str | None:
    """The method of a model that makes a function, such as `make_train_function`, in place of Keras'; None if none."""
    names = (f"make_{name}_function" for name in ("train", "test", "predict"))
    return next((name for name in names if not has_keras_step(model, name)), None)


def undistribute(iterator: Any) -> None:
    """Makes an epoch iterator give whole batches, where Keras has distributed a dataset.

    A dataset that the user has distributed stays as it is. TensorFlow takes a distributed dataset's batches ahead of
    the step, and so does what takes its place.
    """
    dataset = getattr(iterator, DISTRIBUTED)
    given = getattr(iterator.data_adapter, "_dataset", None)
    if not isinstance(dataset, tf.data.Dataset) and not isinstance(given, tf.distribute.DistributedDataset):
        ahead = min(max(_AHEAD, int(iterator.steps_per_execution)), _MOST_AHEAD)
        setattr(iterator, DISTRIBUTED, getattr(dataset, ORIGINAL).prefetch(ahead))
        setattr(iterator, READ_AHEAD, True)


_AHEAD, _MOST_AHEAD = 2, 8  # batches; as many as an execution takes before its steps are read during the one before
READ_AHEAD = "_replica_engine_reads_ahead"
"""On an epoch iterator that `undistribute` has changed: another thread reads its batches before they are asked for."""


def first_batch(iterator: Any, strategy: tf.distribute.Strategy) -> object:
    """The first batch that an epoch will give the replicas, which the epoch still gives.

    A dataset begins again for each iterator. A generator does not: what is taken of it here would be missing in the
    epoch. But its adapter has looked at its first batches and keeps them, so the batch is one of a copy of the first.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    kept = getattr(adapter, KEPT, None)
    if not kept:
        *_, batches = next(iter(iterator))  # after the number of a step; newer Keras has two
        return next(batches)
    copies = itertools.repeat(kept[0], strategy.num_replicas_in_sync)  # for each worker one, and none is needed twice
    return next(iter(strategy.experimental_distribute_dataset(type(adapter)(copies).get_tf_dataset())))


def plain_logs(logs: Mapping[str, object]) -> dict[str, object]:
    """Logs as numbers of Python, as `fit` gives them to callbacks."""
    arrays = ((name, np.asarray(value)) for name, value in logs.items())
    return {name: array if array.ndim else array.item() for name, array in arrays}


# What happens while Keras' `fit` runs: the callbacks it calls, and the loop over the batches of an epoch.
#
# Keras tells a callback neither of the other callbacks nor of the iterator. A callback that saves the whole training
# needs both.

_backup_hook = functools.partial(
    Hook, since="the first `replica_engine.keras.BackupAndRestore`", until="passes on to Keras for a `fit` without one"
)
BEGIN = _backup_hook(
    "keras.src.callbacks.callback_list.CallbackList",
    "on_train_begin",
    why="a backup saves and restores the state of all callbacks of a `fit`",
)
STEPS = _backup_hook(
    "keras.src.trainers.epoch_iterator.EpochIterator",
    "_enumerate_iterator",
    why="a backup saves the place in the data, and begins an epoch there",
)
LOGS = Hook(
    "keras.src.callbacks.callback_list.CallbackList",
    "on_train_begin",
    why="`fit` on GPUs and TPUs waits for the numbers of a batch only if a callback looks at them",
    since="the first step of a model on devices with a queue",
    until="passes on to Keras, and does so for all other logs",
)
FIT = _backup_hook(
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
    for dataset in graph_walk.reached(given, lambda each: getattr(each, "_inputs", tuple)()):
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


def read_batch_spec(epoch_iterator: Any) -> Any:
    """The shapes and dtypes of the batches."""
    return epoch_iterator._distributed_dataset.element_spec


def count_batch_rows(epoch_iterator: Any) -> int | None:
    """How many samples a batch has; None if that is not known."""
    adapter = epoch_iterator.data_adapter
    if not is_of_dataset(epoch_iterator):
        return adapter.batch_size
    shape = getattr(tf.nest.flatten(adapter._dataset.element_spec)[0], "shape", None)
    return shape[0] if shape is not None and shape.rank else None


def count_batches(epoch_iterator: Any) -> int | None:
    """How many batches the data has; None if that is not known."""
    count: int | None = epoch_iterator._num_batches
    return count


def set_batches(epoch_iterator: Any, count: int | None) -> None:
    """Lets an epoch take so many batches of the data; None: until it ends."""
    epoch_iterator._num_batches = count


def begin_at(model: Any, epoch: int | None) -> None:
    """Lets the `fit` that has just begun continue with an epoch; None lets later ones begin with their own."""
    model._initial_epoch = epoch


# Models that Keras writes while several workers train one in one shared folder: the chief writes them.
#
# As with checkpoints (`upstream/checkpoint_hooks.py`), the other workers save into a folder of their own, which is
# deleted at once, and all workers meet before they save and when the chief has written; a worker whose path is not the
# chief's writes there. Callbacks that log (CSVLogger, TensorBoard) are the chief's alone: users give them to no other
# worker.

SAVING = Hook(
    "keras.src.models.model",
    "saving_api",  # which has what `save` and `save_weights` of a model call
    why="the chief writes files for all workers",
    since=FIRST_WORKERS_SCOPE,
    until="passes on to Keras for models of other strategies",
)
MAKE_FOLDER = Hook(
    "keras.src.utils.file_utils",
    "makedirs",
    why="a folder that another worker makes at the same time is no error",
    since=FIRST_WORKERS_SCOPE,
    until="raises all other errors, as before",
)


def let_the_chief_write(find_worker: Callable[[object], Worker | None]) -> None:
    """Keeps all workers but the chief from writing models; only once per process.

    Args:
        find_worker: takes a model, and returns this worker; None if the model is not trained on several workers.
    """
    # Not by its class: another library may have put an object of its own around ours. Inside two, the chief would wait
    # for the other workers twice.
    SAVING.put(lambda own: own if hasattr(own, "_worker_of") else _Saving(own, find_worker))
    MAKE_FOLDER.around(_make_folder)


class _Saving(StandIn):
    """Keras' module that saves models, for the class of models. It alone calls what is replaced here."""

    def __init__(self, own: ModuleType, find_worker: Callable[[object], Worker | None]):
        super().__init__(own)
        self._worker_of = find_worker

    def save_model(self, model: object, filepath: str | os.PathLike[str], *args: object, **kwargs: object) -> object:
        """Writes a model, if this worker does not leave that to the chief."""
        return self._saved(self._own.save_model, model, filepath, *args, **kwargs)

    def save_weights(self, model: object, filepath: str | os.PathLike[str], *args: object, **kwargs: object) -> object:
        """The same for weights."""
        return self._saved(self._own.save_weights, model, filepath, *args, **kwargs)

    def _saved(
        self, save: Callable[..., object], model: object, path: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        return saved_by("a model", self._worker_of(model), path, lambda path: save(model, path, *args, **kwargs))


def _make_folder(own: Callable[[str], object], path: str) -> None:
    """ModelCheckpoint first asks whether a folder exists, and another worker may make it before this one does."""
    try:
        own(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
