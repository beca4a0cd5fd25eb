"""Everything that this library changes in TensorFlow and Keras, in one place: what, why, when, and for how long.

`PATCHES` is the list; `docs/in_your_process.md` shows it to users, and a test looks up every row. A patch passes on to
the original wherever no strategy of this library is concerned. Checked on TensorFlow 2.21.0 and Keras 3.15.1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Generic, NamedTuple

import numpy as np
import tensorflow as tf

# get_seed: the pair of seeds of a random op, from the global seed and that of the op.
from tensorflow.python.framework import random_seed as _random_seed

from replica_engine._tf import checkpoints, collectives, distribute, own_attributes
from replica_engine._tf.graphs import control_flow, row_updates
from replica_engine._tf.keras import accumulation as keras_accumulation
from replica_engine._tf.keras import added_losses, files, fitting, layouts, normalization
from replica_engine._tf.keras import hooks as keras_hooks
from replica_engine._tf.keras.trainer import BASE, BUILD, COMPILES, EXCLUDED, FRAMES, METHOD, MODULE, REDUCE, TRAINER


class Patch(NamedTuple):
    """Something that the library replaces or adds.

    Attributes:
        owner: the class or module, by its full name.
        name: the attribute.
        why: the reason.
        since: what installs it.
        until: when it is taken back or has no effect.
    """

    owner: str
    name: str
    why: str
    since: str
    until: str


TF_FRAMES = "tensorflow.python.util.traceback_utils"
"""The module that filters TensorFlow's tracebacks. Checked on TensorFlow 2.21.0."""
_VALUES = "tensorflow.python.distribute.values.DistributedVariable"
_SEVERAL = "tensorflow.python.distribute.values.PerReplica"
_FIRST_SCOPE = "the first `TPUStrategy.scope()`"
_FIRST_WORKERS_SCOPE = "the first scope of a `MultiWorkerMirroredStrategy`, or of a `TPUStrategy` of several workers"
_FIRST_SCOPE_OF_ALL = "the first scope of a strategy"
_FIRST_SAVED = "the first scope of a strategy, the first `TrainingState`, or the first `BackupAndRestore`"
_NOT_OURS = (
    "passes on to TensorFlow for checkpoints without variables of this library's strategies and without a "
    "`TrainingState`"
)
_FIRST_THREADS = "the first strategy whose replicas run on threads"
_FIRST_COMPILED = "the first `TPUStrategy`, and the import of `replica_engine.xla`"
_JOINED = "the first `MultiWorkerMirroredStrategy` of several workers"
_OTHERS = "passes on to Keras for models of other strategies"
_NOT_OF_WORKERS = "passes on to TensorFlow for what is not trained on several workers"
_NOT_FAILED = "passes on to TensorFlow for all other errors"
_REPLICATED = "the first `replicate_model`"
_FIRST_BACKUP = "the first `replica_engine.keras.BackupAndRestore`"
_SHARDS = "passes on to Keras outside the steps of a replicated model"
_NOT_SHARDS = "passes on to TensorFlow outside the steps of a replicated model"
_INSIDE = f"{_NOT_SHARDS}. The function stays, and what it calls inside is replaced"
_OPTIMIZER = f"{keras_accumulation.MODULE}.{keras_accumulation.OPTIMIZER}"
_LOSS_SCALE = f"{keras_accumulation.LOSS_SCALE_MODULE}.{keras_accumulation.LOSS_SCALE}"
_KERAS_TRACKABLE = f"{own_attributes.KERAS_MODULE}.{own_attributes.KERAS_TRACKABLE}"
_FIRST_VARIABLE = "the first variable that a strategy makes once Keras is imported"
_FIRST_DIVIDED = "the first `TPUStrategy(distribution=...)`"
_ELSEWHERE = "passes on to Keras outside the replicas of this library's strategies"

PATCHES: tuple[Patch, ...] = (
    Patch(
        _VALUES,
        "__float__",
        "`float(variable)`, `int`, `complex` of distributed variables",
        "import",
        "only added",
    ),
    Patch(_VALUES, "__array__", "`np.asarray(variable)` of a scalar that replicas add up", "import", "only added"),
    *(
        Patch(_SEVERAL, name, f"{uses} of the result of `run`: an error that says what to write", "import", until)
        for name, uses, until in (
            ("__float__", "`float(result)`, `result + 1`, `result > 1`, `f'{result:.3f}'`", "only added"),
            ("__getitem__", "`result[0]`, `for each in result`", "only added"),
            ("__getattr__", "`result.numpy()`, `result.shape`", "only added; for names that no tensor has, as before"),
            ("__bool__", "`if result:`", "only for values of dtype bool; True for all others, as before"),
        )
    ),
    Patch(
        _VALUES,
        "_update",
        "an eager update that an exception breaks off is made on all components or on none",
        "the first `MirroredStrategy`",
        "only notes which variables an update writes",
    ),
    Patch(
        f"{COMPILES}.{BASE}",
        "compile",
        "metrics, and an optimizer that is given by its name, are made in the scope of the model",
        "the first `scope()` once Keras is imported",
        _OTHERS,
    ),
    Patch(f"{MODULE}.{TRAINER}", METHOD, "`steps_per_execution` steps in one launch", _FIRST_SCOPE, _OTHERS),
    Patch(
        f"{MODULE}.{TRAINER}",
        BUILD,
        "models are built from one replica's part, after a check; own metrics are looked at; errors are explained",
        "the first `scope()` once Keras is imported",
        _OTHERS,
    ),
    Patch(
        f"{MODULE}.{TRAINER}",
        "fit",
        "the check before the model is built knows `fit` from `evaluate`",
        "the first `scope()` once Keras is imported",
        "only notes that it was called",
    ),
    Patch(
        f"{added_losses.MODULE}.{added_losses.LAYER}",
        added_losses.LOSSES,
        "each replica on a thread has its own list of the losses that layers add",
        "the first `scope()` once Keras is imported",
        "outside replicas, the list of the layer, as before",
    ),
    *(
        Patch(
            owner,
            own_attributes.SET,
            "each replica on a thread has its own value of an attribute that a step sets",
            since,
            "passes on to the original outside the replicas of this library's threads. Where a replica sets an "
            "attribute, the class gets a descriptor of its name, which stays",
        )
        for owner, since in (
            (own_attributes.TRACKABLE, _FIRST_THREADS),
            (
                f"{own_attributes.KERAS_MODULE}.{own_attributes.KERAS_TRACKABLE}",
                "the first `scope()` once Keras is imported",
            ),
        )
    ),
    Patch(
        f"{layouts.VARIABLES}.{layouts.VARIABLE}",
        layouts.INITIALIZE,
        "the path of a variable says how it is divided",
        _FIRST_DIVIDED,
        "only notes which variable Keras makes",
    ),
    Patch(
        f"{layouts.VARIABLES}.{layouts.VARIABLE}",
        layouts.BY_INITIALIZER,
        "a large initial value is made in parts by an initializer of Keras",
        _FIRST_DIVIDED,
        "only notes which initializer Keras calls",
    ),
    Patch(
        _OPTIMIZER,
        keras_accumulation.ADD_VARIABLE,
        "what an optimizer keeps for a weight is divided like the weight",
        _FIRST_DIVIDED,
        "only notes the weight",
    ),
    Patch(
        layouts.NUMPY,
        layouts.DIVIDE,
        "a table's gradient in an optimizer such as Adagrad keeps its number of rows where devices divide the step",
        _FIRST_DIVIDED,
        "passes on to Keras outside the steps of such a strategy",
    ),
    Patch(
        TF_FRAMES,
        EXCLUDED,
        "tracebacks that TensorFlow filters do not show the frames of this library either",
        "import",
        "only added; `tf.debugging.disable_traceback_filtering()` shows them",
    ),
    Patch(
        FRAMES,
        EXCLUDED,
        "tracebacks that Keras filters do not show the frames of this library either",
        "the first `scope()` once Keras is imported, and `replicate_model`",
        "only added; `keras.config.disable_traceback_filtering()` shows them",
    ),
    Patch(
        MODULE,
        REDUCE,
        "logs are means over replicas of all workers, not those of replica 0",
        _FIRST_SCOPE_OF_ALL,
        _OTHERS,
    ),
    *(
        Patch(owner, name, "the chief writes files for all workers", _FIRST_WORKERS_SCOPE, _OTHERS)
        for owner, name in ((files.SAVING, name) for name in files.SAVES)
    ),
    Patch(
        files.FILES,
        files.MAKE_FOLDER,
        "a folder that another worker makes at the same time is no error",
        _FIRST_WORKERS_SCOPE,
        "raises all other errors, as before",
    ),
    *(
        Patch(owner, name, "the chief writes files for all workers", _FIRST_WORKERS_SCOPE, _NOT_OF_WORKERS)
        for owner, name in ((checkpoints.SAVED_MODEL, checkpoints.NODES),)
    ),
    *(
        Patch(owner, name, "checkpoints are atomic, asynchronous, and in parts", _FIRST_SAVED, _NOT_OURS)
        for owner, name in (
            *((checkpoints.CHECKPOINT, name) for name in checkpoints.METHODS),
            (checkpoints.SAVER, checkpoints.SAVE),
        )
    ),
    Patch(
        checkpoints.READER,
        checkpoints.RESTORE,
        "checkpoints are read in parts, and from folders whose names TensorFlow takes for patterns",
        _FIRST_SAVED,
        "the second for all checkpoints",
    ),
    *(
        Patch(checkpoints.MANAGEMENT, name, "the chief writes files for all workers", _FIRST_SAVED, _NOT_OURS)
        for name in (checkpoints.STATE, checkpoints.DELETE)
    ),
    Patch(
        checkpoints.MANAGEMENT,
        checkpoints.FILES,
        "a folder such as `lr[1]` is no pattern for `lr1`: the last checkpoint is found, and only old ones are deleted",
        _FIRST_SAVED,
        "holds for all checkpoints",
    ),
    Patch(
        f"{fitting.CALLBACK_LIST}.{fitting.LIST}",
        fitting.BEGIN,
        "a backup saves and restores the state of all callbacks of a `fit`",
        _FIRST_BACKUP,
        "passes on to Keras for a `fit` without one",
    ),
    Patch(
        f"{fitting.EPOCH_ITERATOR}.{fitting.ITERATOR}",
        fitting.STEPS,
        "a backup saves the place in the data, and begins an epoch there",
        _FIRST_BACKUP,
        "passes on to Keras for a `fit` without one",
    ),
    Patch(
        f"{MODULE}.{TRAINER}",
        "fit",
        "a backup that listens to signals gives the program its handlers back, also after an exception",
        _FIRST_BACKUP,
        "passes on to Keras",
    ),
    Patch(keras_hooks.LOSSES, keras_hooks.REDUCE_LOSSES, "a shard's loss counts by its samples", _REPLICATED, _SHARDS),
    *(
        Patch(keras_hooks.LOSSES, name, "the losses of shards are scaled once", _REPLICATED, _SHARDS)
        for name in keras_hooks.SCALE_LOSSES
    ),
    *(
        Patch(
            owner, "__call__", "whether a sum of losses is that of `compile` or of another call", _REPLICATED, _SHARDS
        )
        for owner in (
            f"{keras_hooks.LOSSES}.{keras_hooks.LOSS}",
            f"{keras_hooks.COMPILED}.{keras_hooks.COMPILED_LOSS}",
        )
    ),
    *(
        Patch("tensorflow.nn", name, "in a shard, one device has one replica and the whole batch", _REPLICATED, _INSIDE)
        for name in (keras_hooks.AVERAGE_LOSS, keras_hooks.REGULARIZATION)
    ),
    *(
        Patch(owner, name, "gradients that a step changes are known", _REPLICATED, _NOT_SHARDS)
        for owner, name in (("tensorflow.GradientTape", "gradient"), (keras_hooks.GRADIENTS, keras_hooks.HELPERS))
    ),
    Patch(keras_hooks.METRICS, keras_hooks.SAMPLEWISE, "means over shards count by samples", _REPLICATED, _SHARDS),
    Patch(
        _OPTIMIZER,
        keras_accumulation.APPLY,
        "`gradient_accumulation_steps` reduces gradients only in the last step of a group",
        _FIRST_VARIABLE,
        _ELSEWHERE,
    ),
    Patch(
        _OPTIMIZER,
        keras_accumulation.ADD_VARIABLE,
        "each replica has its own accumulators of gradients, which are saved as their sum",
        _FIRST_VARIABLE,
        "passes on to Keras for all other variables",
    ),
    Patch(
        _LOSS_SCALE,
        keras_accumulation.CHECK_FINITE,
        "an overflow on one replica counts for all; Keras asks replica 0 alone",
        _FIRST_VARIABLE,
        _ELSEWHERE,
    ),
    Patch(
        f"{normalization.MODULE}.{normalization.LAYER}",
        normalization.MOMENTS,
        "a synchronized normalization that gets a mask has the statistics of all replicas",
        "the first `scope()` once Keras is imported",
        _ELSEWHERE,
    ),
    Patch(
        "tensorflow.python.framework.random_seed",
        "get_seed",
        "what a replica draws follows from the global seed and its id, not from how many replicas drew before",
        _FIRST_THREADS,
        "passes on to TensorFlow outside the replicas of this library's threads, and for ops with a seed of their own",
    ),
    Patch(
        "tensorflow.python.eager.core",
        "_status_to_exception",
        "an op that fails because a worker is lost raises WorkerLostError",
        _JOINED,
        _NOT_FAILED,
    ),
    *(
        Patch(
            "tensorflow.python.pywrap_tfe",
            name,
            "a `tf.function`, or the making of a variable, that fails because a worker is lost raises WorkerLostError",
            _JOINED,
            _NOT_FAILED,
        )
        for name in collectives.EXECUTE
    ),
    Patch(
        "tensorflow.python.ops.control_flow_v2_func_graphs.CondBranchFuncGraph",
        "capture_call_time_value",
        "a function with collectives can be called in a branch of `tf.cond`",
        _JOINED,
        "concerns only what TensorFlow fails at otherwise",
    ),
    Patch(
        "tensorflow.python.eager.polymorphic_function.atomic_function",
        "from_func_graph",
        "the graph optimizer does less to functions in which replicas run, see `graph_optimizer`; calls are watched",
        "import",
        "passes on to TensorFlow for all other functions",
    ),
)

PATCHES += tuple(
    Patch(
        owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}",
        name,
        why,
        since,
        "passes on to TensorFlow outside the replicas of this library",
    )
    for table, since in (
        (control_flow.BY_BOTH, "import"),
        (control_flow.BY_XLA, _FIRST_COMPILED),
        (row_updates.WRAPPED, _FIRST_COMPILED),
        (control_flow.BY_THREADS, _FIRST_THREADS),
        (control_flow.BY_KERAS, _REPLICATED),
    )
    for owner, name, why in table.values()
)

_MARK = "_replica_engine"


def install_numbers() -> None:
    """Lets float(), int() and NumPy take distributed variables, as in float(model.optimizer.learning_rate).

    NumPy finds `__array__` of the tensor behind an `ON_READ` variable otherwise, which gives no array for a scalar.
    """
    added = {f"__{kind.__name__}__": _as_number(kind) for kind in (int, float, complex)} | {"__array__": __array__}
    for name, method in added.items():
        if not hasattr(distribute.DistributedVariable, name):
            setattr(distribute.DistributedVariable, name, method)


def note_writes(note: Callable[[Any], None]) -> None:
    """Lets a function know of each distributed variable before it is assigned or added to; only once per process."""
    update = distribute.DistributedVariable._update
    if hasattr(update, _MARK):
        return

    @functools.wraps(update)
    def _update(self: Any, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        note(self)
        return update(self, update_fn, value, **kwargs)

    setattr(_update, _MARK, True)
    distribute.DistributedVariable._update = _update


def refuse_several(methods: Mapping[str, Callable[..., Any]], as_tensor: Callable[..., Any]) -> None:
    """Adds methods that raise to the class of values of several replicas; only once per process.

    Args:
        methods: the methods by their names; one that the class has already, from another base than `object`, stays.
        as_tensor: raises where TensorFlow asks for a tensor, or returns NotImplemented and leaves it to TensorFlow.
    """
    if vars(distribute.PerReplica).get(_MARK):
        return
    setattr(distribute.PerReplica, _MARK, True)
    own = set().union(*(vars(kind) for kind in distribute.PerReplica.__mro__ if kind not in (object, Generic)))
    for name, method in methods.items():
        if name not in own:
            method.__name__ = name
            method.__qualname__ = f"{distribute.PerReplica.__qualname__}.{name}"
            setattr(distribute.PerReplica, name, method)
    tf.register_tensor_conversion_function(distribute.PerReplica, as_tensor, priority=_BEFORE_TENSORFLOWS)


_BEFORE_TENSORFLOWS = 90  # TensorFlow's own conversion of the class has priority 100


def __array__(variable: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # tracebacks show the name
    if not tf.executing_eagerly():
        raise NotImplementedError("numpy() is only available when eager execution is enabled.")  # TensorFlow says so
    return np.array(variable.numpy(), dtype)  # a copy, whatever `copy` is


def _as_number(kind: type) -> Callable[[Any], Any]:
    return lambda self: kind(self.numpy())


def seed_by_replica(seed_in_replica: Callable[[Callable[[], int | None]], int | None]) -> None:
    """Lets replicas choose the seeds of random ops that have none of their own; only once per process.

    Args:
        seed_in_replica: returns the seed of an op that is being made, or None if TensorFlow's own is right. It is given
            a function that draws TensorFlow's own, which is None without a global seed.
    """
    get_seed = _random_seed.get_seed
    if hasattr(get_seed, _MARK):
        return

    @functools.wraps(get_seed)
    def get_seed_of_replica(op_seed: Any) -> Any:
        if op_seed is None:
            op_seed = seed_in_replica(lambda: get_seed(None)[1])
        return get_seed(op_seed)

    setattr(get_seed_of_replica, _MARK, True)
    _random_seed.get_seed = get_seed_of_replica


def hide_frames(folders: tuple[str, ...]) -> None:
    """Makes TensorFlow, and Keras once it is imported, leave folders out of tracebacks that they filter; once each."""
    for name in (TF_FRAMES, FRAMES):
        module: Any = sys.modules.get(name)
        paths = getattr(module, EXCLUDED, None)
        if paths is not None and folders[0] not in paths:
            setattr(module, EXCLUDED, (*paths, *folders))
