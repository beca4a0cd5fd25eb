"""Everything that this library changes in TensorFlow and Keras, in one place: what, why, when, and for how long.

`PATCHES` is the list; `docs/in_your_process.md` shows it to users, and a test looks up every row. A patch passes on to
the original wherever no strategy of this library is concerned. Checked on TensorFlow 2.21.0 and Keras 3.15.1.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Generic, NamedTuple

import numpy as np
import tensorflow as tf

# get_seed: the pair of seeds of a random op, from the global seed and that of the op.
from tensorflow.python.framework import random_seed as _random_seed

from replica_engine._tf import checkpoints, collectives, distribute
from replica_engine._tf.graphs import control_flow
from replica_engine._tf.keras import accumulation as keras_accumulation
from replica_engine._tf.keras import added_losses, files
from replica_engine._tf.keras import metrics as keras_metrics
from replica_engine._tf.keras.trainer import (
    BUILD,
    COMPILES,
    EXCLUDED,
    FRAMES,
    METHOD,
    MODULE,
    REDUCE,
    TRAINER,
    first_batch,
    size_of_rest,
    strategy_of,
)


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
_LOSSES = "keras.src.losses.loss"
_METRICS = "keras.src.metrics.reduction_metrics"
_FIRST_SCOPE = "the first `TPUStrategy.scope()`"
_FIRST_WORKERS_SCOPE = "the first scope of a `MultiWorkerMirroredStrategy`, or of a `TPUStrategy` of several workers"
_FIRST_THREADS = "the first strategy whose replicas run on threads"
_FIRST_COMPILED = "the first `TPUStrategy`, and the import of `replica_engine.xla`"
_JOINED = "the first `MultiWorkerMirroredStrategy` of several workers"
_OTHERS = "passes on to Keras for models of other strategies"
_NOT_OF_WORKERS = "passes on to TensorFlow for what is not trained on several workers"
_NOT_FAILED = "passes on to TensorFlow for all other errors"
_FIT = "a replicated `fit`, `evaluate` or `predict`"
_OUTSIDE = "taken back when the last one ends; passes on to Keras for other models meanwhile"
_OPTIMIZER = f"{keras_accumulation.MODULE}.{keras_accumulation.OPTIMIZER}"
_LOSS_SCALE = f"{keras_accumulation.LOSS_SCALE_MODULE}.{keras_accumulation.LOSS_SCALE}"
_FIRST_VARIABLE = "the first variable that a strategy makes once Keras is imported"
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
        Patch(_SEVERAL, name, f"{uses} of the result of `run` are errors that say what to write", "import", until)
        for name, uses, until in (
            ("__float__", "`float(result)`, `result + 1`, `result > 1`, `f'{result:.3f}'`", "only added"),
            ("__getitem__", "`result[0]`, `for each in result`", "only added"),
            ("__getattr__", "`result.numpy()`, `result.shape`", "only added; for names that no tensor has, as before"),
            ("__bool__", "`if result:`", "only for values of dtype bool; True for all others, as before"),
        )
    ),
    Patch(_SEVERAL, "_is_mirrored", "reductions find at once what `__getattr__` would say", "import", "only added"),
    Patch(
        _VALUES,
        "_update",
        "an eager update that an exception breaks off is made on all components or on none",
        "the first `MirroredStrategy`",
        "only notes which variables an update writes",
    ),
    Patch(
        f"{COMPILES}.Trainer",
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
    Patch(
        f"{keras_metrics.MODULE}.{keras_metrics.VARIABLE}",
        keras_metrics.INITIALIZE,
        "Keras before 3.10: the variables of metrics have a value on each replica",
        "the first `scope()` once Keras is imported",
        "only notes that Keras makes a variable",
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
    Patch(MODULE, REDUCE, "logs are means over replicas, not those of replica 0", _FIRST_SCOPE, _OTHERS),
    Patch(MODULE, REDUCE, "logs are reduced over all workers", _FIRST_WORKERS_SCOPE, _OTHERS),
    *(
        Patch(owner, name, "the chief writes files for all workers", _FIRST_WORKERS_SCOPE, _OTHERS)
        for owner, name in (
            *((files.SAVING, name) for name in files.SAVES),
            (f"{files.CALLBACKS}.{files.BACKUP}", "_save_model"),
            (f"{files.CALLBACKS}.{files.BACKUP}", "on_train_end"),
            (f"{files.CALLBACKS}.{files.BOARD}", "set_model"),
            (f"{files.CALLBACKS}.{files.CSV}", "on_train_begin"),
        )
    ),
    *(
        Patch(owner, name, "the chief writes files for all workers", _FIRST_WORKERS_SCOPE, _NOT_OF_WORKERS)
        for owner, name in (
            (checkpoints.CHECKPOINT, checkpoints.WRITE),
            (checkpoints.CHECKPOINT, checkpoints.SAVE),
            (checkpoints.MANAGEMENT, checkpoints.STATE),
            (checkpoints.MANAGEMENT, checkpoints.DELETE),
            (checkpoints.SAVED_MODEL, checkpoints.NODES),
        )
    ),
    Patch(_LOSSES, "reduce_weighted_values", "a shard's loss counts by its samples", _FIT, _OUTSIDE),
    Patch(_LOSSES, "scale_loss_for_distribution", "the losses of shards are scaled once", _FIT, _OUTSIDE),
    Patch(_LOSSES, "unscale_loss_for_distribution", "the losses of shards are scaled once", _FIT, _OUTSIDE),
    Patch(_METRICS, "reduce_to_samplewise_values", "means over shards count by samples", _FIT, _OUTSIDE),
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
        "the graph optimizer does less to functions in which replicas run, see `graph_optimizer`; calls are watched, "
        "and warn of a batch that goes whole to all replicas",
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
        (control_flow.BY_THREADS, _FIRST_THREADS),
    )
    for owner, name, why in table.values()
)

_MARK = "_replica_engine"


class FirstBatch(NamedTuple):
    """What is known when `fit` or `evaluate` begins.

    Attributes:
        model: the model.
        strategy: the strategy under which it was built.
        batch: the first batch of all replicas.
        rest: the number of samples in a smaller last batch; None if there is none, or if Keras does not know it.
        is_fit: whether the method is `fit`.
    """

    model: Any
    strategy: Any
    batch: Any
    rest: int | None
    is_fit: bool


Make = Callable[[Any, Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""Takes a model, its step and Keras' own function; returns the function to call with an iterator."""


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
    if "_is_mirrored" not in own:  # TensorFlow asks for it, with this default, in each reduction: here it is at hand
        distribute.PerReplica._is_mirrored = lambda _: False
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


def extend_trainer(make: Make) -> None:
    """Makes models call the function that `make` returns; only once per process."""
    trainer = getattr(sys.modules.get(MODULE), TRAINER, None)
    method = getattr(trainer, METHOD, None)
    if method is None or hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def extended(self: Any, step_function: Callable[..., Any]) -> Callable[..., Any]:
        return make(self, step_function, method(self, step_function))

    setattr(extended, _MARK, True)
    setattr(trainer, METHOD, extended)


def compile_in_scope(is_ours: Callable[[Any], bool]) -> None:
    """Makes `compile` work under the scope of the model that it is called for; only once per process.

    `compile` makes the variables of the loss, of metrics and of an optimizer that is given by its name, and users call
    it outside of the scope. An optimizer of no strategy cannot train the model. Compiled replicas each have their own
    value of a metric's variable that was made there, and only one of the values would count.

    Args:
        is_ours: whether a strategy is one of this library's.
    """
    trainer: Any = getattr(sys.modules.get(COMPILES), "Trainer", None)
    method = getattr(trainer, "compile", None)
    if method is None or hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        # A replica is in the scope already, and must not enter it.
        outside = strategy is not None and is_ours(strategy) and tf.distribute.get_strategy() is not strategy
        with strategy.scope() if outside else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    setattr(compiled, _MARK, True)
    trainer.compile = compiled


def extend_build(
    check: Callable[[FirstBatch], None],
    explained: Callable[[Exception], Exception],
    is_ours: Callable[[Any], bool],
    built_now: Callable[[Any], None],
) -> None:
    """Makes Keras build a model from one replica's part of the first batch; only once per process.

    Keras builds the model from the mean over the parts of all replicas: strings have no mean, and parts of different
    sizes fail in an op, AddN.

    Args:
        check: called before the model is built, and before the first callback.
        explained: makes another error of one that is raised while the model is built.
        is_ours: whether a strategy is one of this library's.
        built_now: called with the model when it is built, before its first step.
    """
    trainer: Any = getattr(sys.modules.get(MODULE), TRAINER, None)
    method = getattr(trainer, BUILD, None)
    if method is None or hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def built(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = strategy_of(self)
        if strategy is None or not is_ours(strategy):
            return method(self, iterator=iterator, data_batch=data_batch)
        if iterator is not None:
            batch = first_batch(iterator, strategy)
            is_fit = _begun.get() is self
            _begun.set(None)  # what `fit` calls later, such as `evaluate`, is not its beginning
            check(FirstBatch(self, strategy, batch, size_of_rest(iterator), is_fit))
            iterator, data_batch = None, distribute.first_values(batch)
        try:
            result = method(self, iterator=iterator, data_batch=data_batch)
        except Exception as error:
            raise explained(error)
        built_now(self)
        return result

    fit = trainer.fit

    @functools.wraps(fit)
    def fitted(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _begun.set(self)
        try:
            return fit(self, *args, **kwargs)
        finally:
            _begun.reset(token)

    setattr(built, _MARK, True)
    setattr(trainer, BUILD, built)
    trainer.fit = fitted


_begun: contextvars.ContextVar[Any] = contextvars.ContextVar("replica_engine_fit", default=None)
"""The model whose `fit` has been called and has not built it yet. Keras builds it in the same way in `evaluate`."""


def hide_frames(folders: tuple[str, ...]) -> None:
    """Makes TensorFlow, and Keras once it is imported, leave folders out of tracebacks that they filter; once each."""
    for name in (TF_FRAMES, FRAMES):
        module: Any = sys.modules.get(name)
        paths = getattr(module, EXCLUDED, None)
        if paths is not None and folders[0] not in paths:
            setattr(module, EXCLUDED, (*paths, *folders))


def average_logs(strategies: type) -> None:
    """Makes Keras log the mean over replicas under strategies of a class; only once per process."""
    module = sys.modules.get(MODULE)
    reduce = getattr(module, REDUCE, None)
    if reduce is None or hasattr(reduce, _MARK):
        return

    @functools.wraps(reduce)
    def averaged(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction == "auto" and isinstance(strategy, strategies):
            reduction = "mean"
        return reduce(values, strategy, reduction)

    setattr(averaged, _MARK, True)
    setattr(module, REDUCE, averaged)


def extend_optimizers(
    apply: Callable[[Any, Any, Any], None],
    agreed: Callable[[Any], Any],
    is_ours: Callable[[Any], bool],
    check_foreign: Callable[[Any, Any], None],
    explained: Callable[[Exception], Exception],
) -> None:
    """Makes Keras' optimizers accumulate gradients on each replica separately; only once per process.

    Args:
        apply: called as `apply(optimizer, grads, variables)` in a replica where an optimizer accumulates gradients.
        agreed: combines the flag of a replica, whether its gradients are finite, with those of the others.
        is_ours: whether a strategy is one of this library's.
        check_foreign: called as `check_foreign(optimizer, variables)` in a replica with an optimizer of no strategy.
        explained: takes an exception of `build`; returns one in the user's terms, or the exception itself.
    """
    names = keras_accumulation
    optimizer = getattr(sys.modules.get(names.MODULE), names.OPTIMIZER, None)
    scaling = getattr(sys.modules.get(names.LOSS_SCALE_MODULE), names.LOSS_SCALE, None)
    own_apply, own_add = getattr(optimizer, names.APPLY, None), getattr(optimizer, names.ADD_VARIABLE, None)
    own_check = getattr(scaling, names.CHECK_FINITE, None)
    if own_apply is None or own_add is None or own_check is None or hasattr(own_apply, _MARK):
        return

    def in_replica_of_ours() -> bool:
        context = tf.distribute.get_replica_context()
        return context is not None and is_ours(context.strategy)

    @functools.wraps(own_apply)
    def applied(self: Any, grads: Any, trainable_variables: Any) -> None:
        if names.accumulates(self) and in_replica_of_ours():
            apply(self, grads, trainable_variables)
            return
        if names.is_of_no_strategy(self) and in_replica_of_ours():
            check_foreign(self, trainable_variables)
        own_apply(self, grads, trainable_variables)

    @functools.wraps(own_add)
    def added(self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        of_each = name == names.ACCUMULATOR and is_ours(self._distribution_strategy)
        with tf.variable_creator_scope(_for_each_replica) if of_each else contextlib.nullcontext():
            try:
                return own_add(self, reference_variable, name=name, initializer=initializer)
            except Exception as error:
                # Keras calls an optimizer built before it has all of its variables. If it kept that, a second call
                # would miss the others: AttributeError: no attribute '_momentums'.
                self.built = False
                raise explained(error)

    @functools.wraps(own_check)
    def checked(self: Any, grads: Any) -> Any:
        finite = own_check(self, grads)
        return agreed(finite) if in_replica_of_ours() else finite

    setattr(applied, _MARK, True)
    setattr(optimizer, names.APPLY, applied)
    setattr(optimizer, names.ADD_VARIABLE, added)
    setattr(scaling, names.CHECK_FINITE, checked)


def _for_each_replica(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """A variable creator: the variable has one value on each replica, and elsewhere their sum."""
    kwargs.update(synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
    return next_creator(**kwargs)


def reduce_over_workers(strategies: type) -> None:
    """Makes Keras reduce the logs of all workers under strategies of a class; a process may do so for several classes.

    Keras calls `strategy.reduce("MEAN", value, axis=0)` there, which fails for scalars, and logs are scalars. Rows of
    predictions are joined by the strategy's `join_rows`, if it has that method.
    """
    module = sys.modules.get(MODULE)
    reduce = getattr(module, REDUCE, None)
    if reduce is None:
        return
    if hasattr(reduce, _OF_WORKERS):
        getattr(reduce, _OF_WORKERS).add(strategies)
        return
    classes = {strategies}
    operations = {"auto": "MEAN", "mean": "MEAN", "sum": "SUM"}

    @functools.wraps(reduce)
    def reduced(values: Any, strategy: Any, reduction: str) -> Any:
        if not isinstance(strategy, tuple(classes)):
            return reduce(values, strategy, reduction)
        if reduction == "concat" and hasattr(strategy, "join_rows"):
            return tf.nest.map_structure(strategy.join_rows, values)
        if reduction not in operations:
            return reduce(values, strategy, reduction)
        assert isinstance(strategy, tf.distribute.Strategy)
        return strategy.reduce(operations[reduction], values, axis=None)

    setattr(reduced, _OF_WORKERS, classes)
    setattr(module, REDUCE, reduced)


_OF_WORKERS = "_replica_engine_workers"  # the attribute of Keras' function that has the classes; wrappers copy it
