"""Keras models and optimizers that are made in a scope.

Keras clips the gradient of each replica, and sums what is left. One device clips the sum. So in a replica, an optimizer
that clips first sums the gradients of all, in a merge call, and all replicas update with the clipped sum.

With `gradient_accumulation_steps`, gradients travel once in k steps. Each replica adds its gradients to accumulators of
its own (variables with `ON_READ` synchronization). In the last step of a group the sums of all replicas are reduced,
and the optimizer clips, decays and updates with the result: the gradient of the whole group, as on one device. In the
other k - 1 steps no gradient leaves its replica.

Whether a step is the last one depends on the optimizer's counter, which is equal on all replicas. Replica threads
cannot meet inside a branch, so they meet before it: in each step a merge call, which moves no data, builds one
condition for all replicas. In a compiled program the condition is part of the program, with the collectives in one of
its branches.

For models, `install_keras_hooks` changes what Keras calls, and `check_distribution` checks Keras' distributions.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.backend import Backend, has_backend
from replica_engine.diagnostics import misuse, user_frames
from replica_engine.engine import current_replica
from replica_engine.errors import DistributionError, InputsError
from replica_engine.threads.replica_run import keep_attributes
from replica_engine.upstream import distribute, hook
from replica_engine.upstream.graphs import autograph
from replica_engine.upstream.keras import keras_hooks, keras_training, keras_variables
from replica_engine.values.regroup import regroup

Own = Callable[..., Any]
"""A function of Keras, which a hook calls."""


def extend_optimizers() -> None:
    """Makes Keras' optimizers clip and accumulate as above; strategies of others keep what Keras does.

    Does nothing until Keras is imported, or a second time.
    """
    keras_hooks.APPLY.around(_applied)
    keras_hooks.ADD_VARIABLE.around(_added)
    keras_hooks.CHECK_FINITE.around(_checked)


def _context() -> tf.distribute.ReplicaContext | None:
    """The context of the replica of a strategy of this library that this thread runs; None elsewhere."""
    context = tf.distribute.get_replica_context()
    return context if context is not None and has_backend(context.strategy) else None


def _applied(own: Own, optimizer: Any, grads: Sequence[object], trainable_variables: Sequence[object]) -> None:
    context = _context()
    if context is not None:
        if keras_training.is_of_no_strategy(optimizer):
            misuse.check_optimizer(optimizer, trainable_variables)
        elif optimizer.gradient_accumulation_steps or (
            keras_training.clips(optimizer) and context.num_replicas_in_sync > 1
        ):
            # Instead of what Keras does next: it would clip the gradients of this replica alone.
            _apply(optimizer, grads, trainable_variables)
            return
    own(optimizer, grads, trainable_variables)


def _added(
    own: Own, optimizer: Any, reference_variable: object, name: str | None = None, initializer: object = "zeros"
) -> object:
    # Every other variable of an optimizer is equal on all replicas, and must stay so.
    of_each = name == keras_training.ACCUMULATOR and has_backend(optimizer._distribution_strategy)
    with tf.variable_creator_scope(_for_each_replica) if of_each else contextlib.nullcontext():
        try:
            return own(optimizer, reference_variable, name=name, initializer=initializer)
        except Exception as error:
            # Keras calls an optimizer built before it has all of its variables. If it kept that, a second call would
            # miss the others: AttributeError: no attribute '_momentums'.
            optimizer.built = False
            raise misuse.translate_error(error)


def _for_each_replica(next_creator: Own, **kwargs: object) -> object:
    """A variable creator: the variable has one value on each replica, and elsewhere their sum."""
    own = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    return next_creator(**kwargs | own)


@autograph.artifact
def _checked(own: Own, optimizer: object, grads: object) -> tf.Tensor:
    """Whether the gradients of all replicas are finite."""
    flag, context = own(optimizer, grads), _context()
    if context is None or context.num_replicas_in_sync == 1:
        return flag
    return tf.equal(context.all_reduce("SUM", tf.cast(tf.logical_not(flag), tf.int32)), 0)


@autograph.artifact
def _apply(optimizer: Any, grads: Any, variables: Any) -> None:
    """Accumulates gradients, or sums them before they are clipped; called in replica context in place of Keras' code.

    Args:
        optimizer: an optimizer with `gradient_accumulation_steps`, or one that clips.
        grads: this replica's gradients, none of them None.
        variables: the variables of the gradients.
    """
    kind = _AccumulationStep if keras_training.accumulates(optimizer) else _ClippedStep
    tf.distribute.get_replica_context().merge_call(kind(optimizer, list(variables)).run, args=(list(grads),))


class _ClippedStep:
    """A step of an optimizer that clips: the merge function, one object per replica."""

    def __init__(self, optimizer: Any, variables: list[Any]):
        self._optimizer = optimizer
        self._variables = variables

    @autograph.artifact
    def run(self, strategy: tf.distribute.Strategy, grads: list[Any]) -> None:
        """Updates the variables with the clipped sum of the gradients."""
        self._update(strategy, grads)
        with distribute.merged():
            keras_training.average(self._optimizer)

    def _update(self, strategy: tf.distribute.Strategy, grads: list[Any]) -> None:
        """Reduces gradients, and updates the variables with their sums."""
        pairs = [
            (grad, variable if isinstance(variable, tf.Variable) else variable.value)
            for grad, variable in zip(grads, self._variables, strict=True)
        ]
        sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        if keras_training.clips(self._optimizer):
            sums = [distribute.first_values(grad) for grad in sums]
        with distribute.merged():
            keras_training.update(self._optimizer, sums, self._variables)


class _AccumulationStep(_ClippedStep):
    """One of the k steps of a group."""

    def __init__(self, optimizer: Any, variables: list[Any]):
        super().__init__(optimizer, variables)
        self._accumulators = [each.value for each in keras_training.accumulators(optimizer, variables)]

    @autograph.artifact
    def run(self, strategy: tf.distribute.Strategy, grads: list[Any]) -> None:
        """Adds the gradients to the accumulators, and ends the group if this is its last step."""
        for accumulator, grad in zip(self._accumulators, grads, strict=True):
            strategy.extended.update(accumulator, _add, args=(grad,), group=False)
        tf.cond(keras_training.is_update_step(self._optimizer), lambda: self._end_group(strategy), lambda: None)
        with distribute.merged():
            keras_training.average(self._optimizer)

    def _end_group(self, strategy: tf.distribute.Strategy) -> None:
        """Reduces and clears the accumulators, and updates the variables with the mean over the steps of the group."""
        steps = self._optimizer.gradient_accumulation_steps
        # By identity: a variable compares element by element.
        mine = {id(each) for each in self._accumulators}
        for other in keras_training.accumulators(self._optimizer):
            if id(other.value) not in mine:  # a variable without a gradient in this step; Keras forgets earlier ones
                strategy.extended.update(other.value, _clear, group=False)
        means = [
            regroup(strategy.extended.update(accumulator, _take, args=(steps,), group=False))
            for accumulator in self._accumulators
        ]
        self._update(strategy, means)


def _add(accumulator: tf.Variable, grad: Any) -> Any:
    grad = tf.cast(grad, accumulator.dtype)
    return accumulator.scatter_add(grad) if isinstance(grad, tf.IndexedSlices) else accumulator.assign_add(grad)


def _take(accumulator: tf.Variable, steps: int) -> tf.Tensor:
    """Takes the mean over the steps of a group out of an accumulator, which is then zero."""
    mean = accumulator.read_value() / steps
    _clear(accumulator)
    return mean


def _clear(accumulator: tf.Variable) -> Any:
    return accumulator.assign(tf.zeros(accumulator.shape, accumulator.dtype))


def imported() -> tuple[bool, bool]:
    """Whether Keras, and this library's part for it, are imported: hooks wait for their modules."""
    return "keras" in sys.modules, "replica_engine.keras" in sys.modules


def install_keras_hooks() -> None:
    """Makes `compile` work outside the scope, and Keras' methods train, evaluate and predict on the replicas.

    On threads each replica has its own losses of layers, and its own attributes that a step sets. Synchronized
    normalizations are so with a mask too. Attention for TPUs and GPUs is a kernel where one serves. A program that has
    imported `replica_engine.keras` can load models with a `CrossReplicaOptimizer`.

    Strategies that do not run on a backend of this library keep what Keras does. Does nothing until Keras is imported,
    or a second time.
    """
    if all(imported()):  # for models that the program loads
        importlib.import_module("replica_engine.keras.replica_optimizer")
    keras_hooks.BUILD.around(_built)
    keras_hooks.MAKE_FUNCTION.around(_make)
    keras_hooks.MAKE_PREDICT.around(_make_predict)
    keras_hooks.ITERATE.around(_enumerated)
    keras_hooks.COMPILE.around(_compiled)
    hook.hide_frames(user_frames.FOLDERS)
    keras_hooks.MOMENTS.around(_moments)
    keras_hooks.ATTENTION.around(_attended)
    keras_hooks.obey_no_flash_attention()
    keep_attributes()
    keras_hooks.for_each_replica(lambda: (replica := current_replica()) is not None and replica.index > 0)


def _compiled(own: Own, model: object, *args: object, **kwargs: object) -> object:
    """Makes `compile` work under the scope of the model that it is called for.

    `compile` makes the variables of the loss, of metrics and of an optimizer that is given by its name, and users call
    it outside of the scope. An optimizer of no strategy cannot train the model. Compiled replicas each have their own
    value of a metric's variable that was made there, and only one of the values would count.
    """
    strategy = keras_training.find_strategy(model)
    # A replica is in the scope already, and must not enter it.
    outside = strategy is not None and has_backend(strategy) and tf.distribute.get_strategy() is not strategy
    with strategy.scope() if outside else contextlib.nullcontext():
        return own(model, *args, **kwargs)


def _built(own: Own, model: object, iterator: object = None, data_batch: object = None) -> object:
    """Makes Keras build a model from one replica's part of the first batch.

    Keras builds the model from the mean over the parts of all replicas: strings have no mean, and parts of different
    sizes fail in an op, AddN.

    Raises:
        InputsError: the data of `fit` or `evaluate` has no batch.
    """
    strategy = keras_training.find_strategy(model)
    if strategy is None or not has_backend(strategy):
        return own(model, iterator=iterator, data_batch=data_batch)
    _predicting.set(None)  # it is of a `predict` that a callback has ended
    if iterator is not None:
        token = _building.set(True)
        try:
            batch = keras_training.first_batch(iterator, strategy)
        except StopIteration:
            raise InputsError(
                "The data of `fit` or `evaluate` has no batch: its arrays have no rows, or its dataset or "
                "generator ends before the first batch. A generator that has been read must be made again."
            ) from None
        finally:
            _building.reset(token)
        if _takes_whole(model, batch):
            keras_training.undistribute(iterator)
        # Keras must not take a batch itself: one of a generator would be missing in the epoch.
        iterator, data_batch = None, distribute.first_values(batch)
    try:
        return own(model, iterator=iterator, data_batch=data_batch)
    except Exception as error:  # of the user's layers too
        raise misuse.translate_error(error)


def _make(own: Own, model: Any, step_function: object) -> object:
    """What Keras calls with an iterator to train or test a model."""
    name = "train_step" if step_function == model.train_step else "test_step"
    return _make_step_function(model, name) or own(model, step_function)


def _make_predict(own: Own, model: Any, force: bool = False) -> object:
    if model.predict_function is None or force:
        function = _make_step_function(model, "predict_step")
        if function is None:
            _predicting.set(None)  # it may be of another model, whose `predict` calls this one's
            return own(model, force)
        model.predict_function = _Predict(function)
    # Weakly, as a prediction that an exception has ended leaves it there.
    _predicting.set(weakref.ref(model) if isinstance(model.predict_function, _Predict) else None)
    return model.predict_function


def _enumerated(own: Own, iterator: Any) -> object:
    # Only the next iterator is the prediction's: a callback may then evaluate, or predict with another model.
    predicting, strategy = _predicting.get(), keras_training.find_strategy(iterator)
    _predicting.set(None)
    model = None if predicting is None else predicting()
    is_its = model is not None and strategy is not None and strategy is keras_training.find_strategy(model)
    if is_its and _takes_whole(model, None):
        keras_training.undistribute(iterator)
    if strategy is not None and has_backend(strategy) and model is None and not _building.get():
        _agree_on_batches(iterator, strategy.extended.backend)
    return own(iterator)


def _agree_on_batches(iterator: Any, backend: Backend) -> None:
    """Has an epoch end on all workers after the same batch. Keras counts the batches of this worker alone.

    On threads a worker whose data has ended goes on with empty batches. Compiled, all end with the first of them. With
    `steps_per_epoch` they end together anyway: Keras begins the data of each worker again at its own end.
    """
    if backend.saving is not None and iterator.steps_per_epoch is None:
        counts = backend.saving.exchange("the number of batches of an epoch", keras_training.count_batches(iterator))
        known = [each for each in counts if each is not None]
        most = None if len(known) < len(counts) else max(counts)
        keras_training.set_batches(iterator, min(known, default=None) if backend.compiles else most)


class _Predict:
    """What Keras calls with the batches of a prediction."""

    def __init__(self, function: Own):
        self._function = function

    def __call__(self, batches: Sequence[object]) -> object:
        _predicting.set(None)
        return self._function(batches)


_building: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_building", default=False)
"""Whether a first batch is looked at, to build a model: an epoch has not begun, and not every kind of data iterates."""

_predicting: contextvars.ContextVar[weakref.ref[Any] | None]
_predicting = contextvars.ContextVar("replica_engine_predict", default=None)
"""The model whose `predict` begins: Keras then iterates over its data, or calls the function with a single batch."""


def _moments(own: Own, layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean and the variance of a normalization, if it is synchronized those of the samples of all replicas.

    Keras synchronizes the statistics of all samples, but computes those of masked samples on each replica for itself.
    Here the sums behind them are those of all replicas.
    """
    context = _context() if mask is not None and layer.synchronized else None
    if context is None or context.num_replicas_in_sync == 1:
        return own(layer, inputs, mask)

    def over_samples(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, layer._reduction_axes, keepdims=True)

    seen = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    zero = tf.zeros([], inputs.dtype)
    sums = over_samples(tf.where(seen, inputs, zero)), over_samples(tf.cast(seen, inputs.dtype))
    total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    count += sys.modules["keras"].config.epsilon()  # as Keras does, for a batch of which nothing is seen
    mean = total / count
    squares = over_samples(tf.square(tf.where(seen, inputs - mean, zero)))
    variance = context.all_reduce(tf.distribute.ReduceOp.SUM, squares) / count
    return tf.squeeze(mean), tf.squeeze(variance)


def _attended(own: Own, *args: Any, **options: Any) -> Any:
    """Attention: by a kernel of the chips that a body is traced for, if one serves; else by Keras."""
    given = inspect.signature(own).bind(*args, **options).arguments
    wanted = given.get("flash_attention")
    if wanted is None and sys.modules["keras"].config.is_flash_attention_enabled() is False:
        wanted = False
    bodies = sys.modules.get("replica_engine.xla.body")  # without jax there are no bodies
    body = None if bodies is None else bodies.in_body()
    if body is not None and body.kernels and wanted is not False:
        made = importlib.import_module("replica_engine.xla.attention").attended(body, given)
        if made is not None:
            return made
    if wanted and (body is not None or has_backend(tf.distribute.get_strategy())):
        given["flash_attention"] = None  # Keras has no kernel for TensorFlow, and the same numbers without one
    return own(**given)


def _make_step_function(model: Any, name: str) -> Callable[..., Any] | None:
    """What Keras calls to run a step of a model in its scope; None if Keras' own function does."""
    if not _divides(model, name):
        return None
    made = importlib.import_module("replica_engine.keras.scoped_model").make_step_function(model, name)
    return made.predict if name == "predict_step" else made


def _divides(model: Any, name: str = "test_step") -> bool:
    """Whether a step of a model divides batches itself.

    Not if the model makes functions itself. Keras joins the predictions of several workers. It also runs an only
    replica, which has nothing to divide, but for compiled steps: many of them are one launch.
    """
    strategy = keras_training.find_strategy(model)
    if strategy is None or not has_backend(strategy) or keras_training.makes_functions(model):
        return False
    backend, predicts = strategy.extended.backend, name == "predict_step"
    if strategy.num_replicas_in_sync == 1:
        return backend.compiles and not predicts
    return backend.saving is None or not predicts


def _takes_whole(model: Any, batch: Any) -> bool:
    """Whether batches such as one that TensorFlow has dealt come whole, to be divided among the replicas; None: any.

    Not to several workers, or to threads on GPUs, to which TensorFlow copies the next batch during a step; nor if the
    leaves of a batch have other numbers of samples, and are dealt apart.
    """
    strategy = keras_training.find_strategy(model)
    backend = strategy.extended.backend
    on_gpus = not backend.compiles and any("GPU" in device.upper() for device in strategy.extended.worker_devices)
    if on_gpus or backend.saving is not None or not _divides(model):
        return False
    parts = map(strategy.experimental_local_results, tf.nest.flatten(batch))
    rows = ([tuple(getattr(part, "shape", None) or ())[:1] for part in leaf] for leaf in parts)
    return len({tuple(leaf) for leaf in rows if all(leaf)}) <= 1


def check_distribution(strategy: tf.distribute.Strategy) -> None:
    """Checks that no distribution of Keras is set, or only the one that the strategy has: it would be ignored.

    Raises:
        DistributionError: another one is set.
    """
    given, backend = keras_variables.current_distribution(), strategy.extended.backend
    if given is not None and given is not getattr(getattr(backend, "distribution", None), "given", None):
        name = type(strategy).__name__
        how = (
            f"{name}(distribution=...)"
            if backend.compiles
            else f"replica_engine.TPUStrategy(distribution=...), since {name} has whole variables on each replica"
        )
        raise DistributionError(
            "keras.distribution.set_distribution(...), or a scope() of a distribution, is in effect. The strategies of "
            f"replica_engine do not read it: pass the distribution to the strategy, {how}. If it is meant for another "
            "model, end it first: keras.distribution.set_distribution(None)."
        )
