"""What this library replaces in Keras, for models in a scope and for `replicate_model`.

Each function here does nothing until Keras is imported, or a second time. A replacement calls Keras' own function
wherever no strategy of this library is concerned. Checked on Keras 3.15.1; a name that Keras does not have is left out.
This module does not import Keras.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import tensorflow as tf

from replica_engine.errors import InputsError
from replica_engine.upstream import distribute
from replica_engine.upstream.hook import FIRST_SCOPE, REPLICATED, Hook, StandIn
from replica_engine.upstream.keras import keras_training

if TYPE_CHECKING:
    import keras

    Gradients = Sequence[tf.Tensor | tf.IndexedSlices | None]
    Weights = Sequence[keras.Variable]
if TYPE_CHECKING:
    import keras


_OTHERS = "passes on to Keras for models of other strategies"
_SHARDS = "passes on to Keras outside the steps of models on replicas"
_NOT_SHARDS = "passes on to TensorFlow outside the steps of models on replicas"
_ELSEWHERE = "passes on to Keras outside the replicas of this library's strategies"
_FIRST_VARIABLE = "the first variable that a strategy makes once Keras is imported"
_TRAINERS, _OPTIMIZERS = (
    f"{keras_training.MODULE}.{keras_training.TRAINER}",
    f"{keras_training._BASE_OPTIMIZER}.{keras_training.OPTIMIZER}",
)
_LOSSES, _AVERAGES = "keras.src.losses.loss", "tensorflow.python.ops.nn_impl_distribute"
_ONE_REPLICA = "in a shard, one device has one replica and the whole batch"
_INSIDE = f"{_NOT_SHARDS}. The function stays, and what it calls inside is replaced"
_CHANGED = "gradients that a step changes are known"

_scope_hook = functools.partial(Hook, since=FIRST_SCOPE, until=_OTHERS)
_variable_hook = functools.partial(Hook, since=_FIRST_VARIABLE, until=_ELSEWHERE)
_shard_hook = functools.partial(Hook, since=f"{REPLICATED}, or the first step of a model in a scope", until=_SHARDS)

MAKE_FUNCTION = _scope_hook(
    _TRAINERS, keras_training.METHOD, why="a batch of any size is divided, and gives the numbers of one device"
)
MAKE_PREDICT = _scope_hook(_TRAINERS, "make_predict_function", why="a batch of any size is divided")
COMPILE = _scope_hook(
    f"{keras_training.COMPILES}.{keras_training.BASE}",
    "compile",
    why="metrics, and an optimizer that is given by its name, are made in the scope of the model",
)
BUILD = _scope_hook(
    _TRAINERS,
    "_maybe_symbolic_build",
    why="models are built from one replica's part; whole batches come to those that divide them; errors are explained",
)
ITERATE = _scope_hook(
    "keras.src.trainers.epoch_iterator.EpochIterator",
    "_enumerate_iterator",
    why="`predict` gets whole batches",
    order=1,
)
COMBINE = _scope_hook(
    keras_training.MODULE,
    keras_training.REDUCE,
    why="logs are means over replicas of all workers, not those of replica 0",
    since="the first scope of a strategy",
)
APPLY = _variable_hook(
    _OPTIMIZERS,
    keras_training.APPLY,
    why="gradients are summed before they are clipped; accumulated ones only in the last step of a group",
)
ADD_VARIABLE = _variable_hook(
    _OPTIMIZERS,
    keras_training.ADD_VARIABLE,
    why="each replica has its own accumulators of gradients, which are saved as their sum",
    until="passes on to Keras for all other variables",
)
CHECK_FINITE = _variable_hook(
    "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer",
    "check_finite",
    why="an overflow on one replica counts for all; Keras asks replica 0 alone",
)
REDUCE_LOSSES = _shard_hook(_LOSSES, "reduce_weighted_values", why="a shard's loss counts by its samples")
LOSS = _shard_hook(f"{_LOSSES}.Loss", "__call__", why="whether a sum of losses is that of `compile` or of another call")
# What scale_loss_for_distribution and unscale_loss_for_distribution ask first.
BACKEND = _shard_hook(_LOSSES, "backend", why="the losses of shards are scaled once")
MEAN = _shard_hook(
    "keras.src.metrics.reduction_metrics", "reduce_to_samplewise_values", why="means over shards count by samples"
)
AVERAGE_LOSS = _shard_hook(_AVERAGES, "compute_average_loss", why=_ONE_REPLICA, until=_INSIDE)
REGULARIZATION = _shard_hook(_AVERAGES, "scale_regularization_loss", why=_ONE_REPLICA, until=_INSIDE)
TAPE_GRADIENT = _shard_hook(
    "tensorflow.python.eager.backprop.GradientTape", "gradient", why=_CHANGED, until=_NOT_SHARDS
)
GRADIENTS = _shard_hook(
    "tensorflow.python.ops.gradients_util", "_GradientsHelper", why=_CHANGED, until=_NOT_SHARDS, order=1
)

Own = Callable[..., object]
"""A function of Keras or TensorFlow, which a hook calls."""


def compile_in_scope(is_ours: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Makes `compile` work under the scope of the model that it is called for.

    `compile` makes the variables of the loss, of metrics and of an optimizer that is given by its name, and users call
    it outside of the scope. An optimizer of no strategy cannot train the model. Compiled replicas each have their own
    value of a metric's variable that was made there, and only one of the values would count.

    Args:
        is_ours: whether a strategy is one of this library's.
    """

    def compiled(own: Own, model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = keras_training.find_strategy(model)
        # A replica is in the scope already, and must not enter it.
        outside = strategy is not None and is_ours(strategy) and tf.distribute.get_strategy() is not strategy
        with strategy.scope() if outside else contextlib.nullcontext():
            return own(model, *args, **kwargs)

    COMPILE.around(compiled)


def extend_build(
    translate_error: Callable[[Exception], Exception],
    is_ours: Callable[[tf.distribute.Strategy], bool],
    takes_whole: Callable[[keras.Model, object], bool],
) -> None:
    """Makes Keras build a model from one replica's part of the first batch.

    Keras builds the model from the mean over the parts of all replicas: strings have no mean, and parts of different
    sizes fail in an op, AddN.

    Args:
        translate_error: makes another error of one that is raised while the model is built.
        is_ours: whether a strategy is one of this library's.
        takes_whole: whether a model takes whole batches such as the first one, which TensorFlow has distributed. Then
            its data is not distributed, but by the user.

    `fit` and `evaluate` then raise InputsError if their data has no batch.
    """

    def built(own: Own, model: keras.Model, iterator: object = None, data_batch: object = None) -> object:
        strategy = keras_training.find_strategy(model)
        if strategy is None or not is_ours(strategy):
            return own(model, iterator=iterator, data_batch=data_batch)
        _predicting.set(None)  # it is of a `predict` that a callback has ended
        if iterator is not None:
            try:
                batch = keras_training.first_batch(iterator, strategy)
            except StopIteration:
                raise InputsError(
                    "The data of `fit` or `evaluate` has no batch: its arrays have no rows, or its dataset or "
                    "generator ends before the first batch. A generator that has been read must be made again."
                ) from None
            if takes_whole(model, batch):
                keras_training.undistribute(iterator)
            iterator, data_batch = None, distribute.first_values(batch)
        try:
            return own(model, iterator=iterator, data_batch=data_batch)
        except Exception as error:
            raise translate_error(error)

    BUILD.around(built)


def make_functions(
    made: Callable[[keras.Model, str], Own | None], takes_whole: Callable[[keras.Model, object], bool]
) -> None:
    """Gives models other functions to train, test and predict than Keras makes.

    Args:
        made: called with a model and "train_step", "test_step" or "predict_step"; returns what Keras calls with an
            iterator, or with the batches of a prediction, or None for Keras' own function.
        takes_whole: as for `extend_build`. The data of `predict` is not distributed then either.
    """

    def make(own: Own, model: keras.Model, step_function: object) -> object:
        name = "train_step" if step_function == model.train_step else "test_step"
        return made(model, name) or own(model, step_function)

    def make_predict(own: Own, model: keras.Model, force: bool = False) -> object:
        if model.predict_function is None or force:
            function = made(model, "predict_step")
            if function is None:
                _predicting.set(None)  # it may be of another model, whose `predict` calls this one's
                return own(model, force)
            model.predict_function = _Predict(function)
        _predicting.set(weakref.ref(model) if isinstance(model.predict_function, _Predict) else None)
        return model.predict_function

    def enumerated(own: Own, iterator: object) -> object:
        predicting, strategy = _predicting.get(), keras_training.find_strategy(iterator)
        _predicting.set(None)
        model = None if predicting is None else predicting()
        is_its = model is not None and strategy is not None and strategy is keras_training.find_strategy(model)
        if is_its and takes_whole(model, None):
            keras_training.undistribute(iterator)
        return own(iterator)

    MAKE_FUNCTION.around(make)
    MAKE_PREDICT.around(make_predict)
    ITERATE.around(enumerated)


class _Predict:
    """What Keras calls with the batches of a prediction."""

    def __init__(self, function: Own):
        self._function = function

    def __call__(self, batches: Sequence[object]) -> object:
        _predicting.set(None)
        return self._function(batches)


_predicting: contextvars.ContextVar[weakref.ref[keras.Model] | None]
_predicting = contextvars.ContextVar("replica_engine_predict", default=None)
"""The model whose `predict` begins: Keras then iterates over its data, or calls the function with a single batch."""


def combine_logs(strategies: type) -> None:
    """Makes Keras combine the values of replicas, under strategies of a class, by their method `combined`.

    It is called as `combined(own, values, reduction)`, with Keras' own function.
    """

    def combined(own: Own, values: object, strategy: tf.distribute.Strategy, reduction: str) -> object:
        ours = isinstance(strategy, strategies)
        return strategy.combined(own, values, reduction) if ours else own(values, strategy, reduction)

    COMBINE.around(combined)


def extend_optimizers(
    apply: Callable[[keras.optimizers.Optimizer, Gradients, Weights], None],
    agreed: Callable[[tf.Tensor], tf.Tensor],
    is_ours: Callable[[tf.distribute.Strategy], bool],
    check_foreign: Callable[[keras.optimizers.Optimizer, Weights], None],
    translate_error: Callable[[Exception], Exception],
) -> None:
    """Makes Keras' optimizers accumulate gradients on each replica separately, and clip their sum over replicas.

    Args:
        apply: called as `apply(optimizer, grads, variables)` in a replica where an optimizer accumulates gradients, or
            clips them and there are others.
        agreed: combines the flag of a replica, whether its gradients are finite, with those of the others.
        is_ours: whether a strategy is one of this library's.
        check_foreign: called as `check_foreign(optimizer, variables)` in a replica with an optimizer of no strategy.
        translate_error: takes an exception of `build`; returns one in the user's terms, or the exception itself.
    """

    def in_replica_of_ours() -> bool:
        context = tf.distribute.get_replica_context()
        return context is not None and is_ours(context.strategy)

    def applied(
        own: Own, optimizer: keras.optimizers.Optimizer, grads: Gradients, trainable_variables: Weights
    ) -> None:
        context = tf.distribute.get_replica_context()
        if context is not None and is_ours(context.strategy):
            if keras_training.is_of_no_strategy(optimizer):
                check_foreign(optimizer, trainable_variables)
            elif optimizer.gradient_accumulation_steps or (
                keras_training.clips(optimizer) and context.num_replicas_in_sync > 1
            ):
                apply(optimizer, grads, trainable_variables)
                return
        own(optimizer, grads, trainable_variables)

    def added(
        own: Own,
        optimizer: keras.optimizers.Optimizer,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: object = "zeros",
    ) -> object:
        of_each = name == keras_training.ACCUMULATOR and is_ours(optimizer._distribution_strategy)
        with tf.variable_creator_scope(_for_each_replica) if of_each else contextlib.nullcontext():
            try:
                return own(optimizer, reference_variable, name=name, initializer=initializer)
            except Exception as error:
                # Keras calls an optimizer built before it has all of its variables. If it kept that, a second call
                # would miss the others: AttributeError: no attribute '_momentums'.
                optimizer.built = False
                raise translate_error(error)

    def checked(own: Callable[..., tf.Tensor], optimizer: keras.optimizers.Optimizer, grads: Gradients) -> tf.Tensor:
        finite = own(optimizer, grads)
        return agreed(finite) if in_replica_of_ours() else finite

    APPLY.around(applied)
    ADD_VARIABLE.around(added)
    CHECK_FINITE.around(checked)


def _for_each_replica(next_creator: Own, **kwargs: object) -> object:
    """A variable creator: the variable has one value on each replica, and elsewhere their sum."""
    kwargs.update(synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
    return next_creator(**kwargs)


def scale_losses_once(shard: Callable[[], object]) -> None:
    """Keeps Keras from scaling the losses of a shard for a strategy.

    Args:
        shard: the shard that is being computed; None outside.
    """
    BACKEND.put(lambda own: own if isinstance(own, _UndividedBackend) else _UndividedBackend(own, shard))


class _UndividedBackend(StandIn):
    """Keras' backend for its losses, which has no distribution in a shard: what is scaled for one stays as it is.

    Args:
        own: the module.
        shard: the shard that is being computed; None outside.
    """

    def __init__(self, own: ModuleType, shard: Callable[[], object]):
        super().__init__(own)
        self._shard = shard

    def backend(self) -> str:
        """The name of the backend, by which losses know whether TensorFlow distributes them."""
        return self._own.backend() if self._shard() is None else ""


def is_of_graph(*args: object, **kwargs: object) -> bool:
    """Whether what `GRADIENTS` gets behind `ys, xs` names a graph.

    Loops, branches and functions name the graph that they differentiate, and have gradients of their own.
    """
    return len(args) >= _BEFORE_GRAPH or "src_graph" in kwargs


_BEFORE_GRAPH = 8  # arguments of `_GradientsHelper` between `ys, xs` and `src_graph`, with which it calls itself


# The losses that layers add (`add_loss`, `activity_regularizer`), for replicas that share the layers.

LOSSES = Hook(
    "keras.src.layers.layer.Layer",
    "_losses",
    why="each replica on a thread has its own list of the losses that layers add",
    since=FIRST_SCOPE,
    until="outside replicas, the list of the layer, as before",
)
"""The attribute of a layer with the losses that it has added."""


class _OfThreads:
    """Stands for the attribute of `LOSSES`.

    Args:
        shares: whether the calling thread runs a replica that must not touch the list of the layer.
    """

    def __init__(self, shares: Callable[[], bool]):
        self._shares = shares
        self._of_thread = threading.local()

    def __get__(self, layer: object | None, owner: type) -> object:
        if layer is None:
            return self
        if self._shares():
            # By identity, since a layer may define equality. An id is free again when its layer is gone.
            lists: dict[int, tuple[weakref.ref[object], list[object]]] = vars(self._of_thread).setdefault("lists", {})
            known = lists.get(id(layer))
            if known is None or known[0]() is not layer:
                known = lists[id(layer)] = weakref.ref(layer, functools.partial(_forget, lists, id(layer))), []
            return known[1]
        try:
            return vars(layer)[LOSSES.name]
        except KeyError:
            raise AttributeError(LOSSES.name) from None

    def __set__(self, layer: object, value: object) -> None:
        vars(layer)[LOSSES.name] = value

    def __delete__(self, layer: object) -> None:
        del vars(layer)[LOSSES.name]


def _forget(lists: dict[int, tuple[weakref.ref[object], list[object]]], number: int, _: object) -> None:
    lists.pop(number, None)


def for_each_replica(shares: Callable[[], bool]) -> None:
    """Gives each replica on a thread its own list of added losses, once Keras is imported; only once per process.

    A layer keeps what it added in a list, which the next call of the model empties. Replicas on threads call one model.
    If they meet between a call and the sum of its losses (a synchronized batch normalization, a masked loss), the list
    is that of the replica which called last. So replica 0 has the layer's list, and each other one a list of its
    thread. After a run, `model.losses` are those of replica 0.

    Args:
        shares: whether the calling thread runs a replica other than the first.
    """
    LOSSES.put(lambda there: there or _OfThreads(shares))


# The statistics of a synchronized `BatchNormalization` that gets a mask.

Moments = tuple[tf.Tensor, tf.Tensor]
"""A mean and a variance."""
MOMENTS = Hook(
    "keras.src.layers.normalization.batch_normalization.BatchNormalization",
    "_moments",  # returns the mean and the variance of what it gets
    why="a synchronized normalization that gets a mask has the statistics of all replicas",
    since=FIRST_SCOPE,
    until="passes on to Keras outside the replicas of this library's strategies",
)


def synchronize_masked(is_ours: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Makes synchronized normalizations use the statistics of all replicas with a mask too.

    Keras synchronizes the statistics of all samples, but computes those of masked samples on each replica for itself.
    Here the sums behind them are those of all replicas.

    Does nothing until Keras is imported, or a second time.

    Args:
        is_ours: whether a strategy is one of this library's.
    """

    def moments(
        own: Callable[..., Moments], layer: keras.layers.Layer, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> Moments:
        context = tf.distribute.get_replica_context() if mask is not None and layer.synchronized else None
        if context is None or context.num_replicas_in_sync == 1 or not is_ours(context.strategy):
            return own(layer, inputs, mask)
        return _reduce_moments(context, inputs, mask, layer._reduction_axes)

    MOMENTS.around(moments)


def _reduce_moments(
    context: tf.distribute.ReplicaContext, inputs: tf.Tensor, mask: tf.Tensor, axes: Sequence[int]
) -> Moments:
    def over_samples(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, axes, keepdims=True)

    seen = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    zero = tf.zeros([], inputs.dtype)
    sums = over_samples(tf.where(seen, inputs, zero)), over_samples(tf.cast(seen, inputs.dtype))
    total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    count += sys.modules["keras"].config.epsilon()  # as Keras does, for a batch of which nothing is seen
    mean = total / count
    squares = over_samples(tf.square(tf.where(seen, inputs - mean, zero)))
    variance = context.all_reduce(tf.distribute.ReduceOp.SUM, squares) / count
    return tf.squeeze(mean), tf.squeeze(variance)
