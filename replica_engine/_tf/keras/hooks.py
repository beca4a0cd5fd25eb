"""What this library replaces in Keras, for models in a scope and for `replicate_model`.

Each function here does nothing until Keras is imported, or a second time. A replacement calls Keras' own function
wherever no strategy of this library is concerned. Checked on Keras 3.15.1; a name that Keras does not have is left out.
This module does not import Keras.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.hook import FIRST_SCOPE, REPLICATED, Hook, StandIn
from replica_engine._tf.keras import accumulation as names
from replica_engine._tf.keras import trainer
from replica_engine.errors import InputsError
from replica_engine.process import scoped

if TYPE_CHECKING:
    import keras

    Gradients = Sequence[tf.Tensor | tf.IndexedSlices | None]
    Weights = Sequence[keras.Variable]

_OTHERS = "passes on to Keras for models of other strategies"
_SHARDS = "passes on to Keras outside the steps of models on replicas"
_NOT_SHARDS = "passes on to TensorFlow outside the steps of models on replicas"
_ELSEWHERE = "passes on to Keras outside the replicas of this library's strategies"
_FIRST_VARIABLE = "the first variable that a strategy makes once Keras is imported"
_TRAINERS, _OPTIMIZERS = f"{trainer.MODULE}.{trainer.TRAINER}", f"{names.MODULE}.{names.OPTIMIZER}"
_LOSSES, _AVERAGES = "keras.src.losses.loss", "tensorflow.python.ops.nn_impl_distribute"
_ONE_REPLICA = "in a shard, one device has one replica and the whole batch"
_INSIDE = f"{_NOT_SHARDS}. The function stays, and what it calls inside is replaced"
_CHANGED = "gradients that a step changes are known"

_of_scope = functools.partial(Hook, since=FIRST_SCOPE, until=_OTHERS)
_of_variables = functools.partial(Hook, since=_FIRST_VARIABLE, until=_ELSEWHERE)
_of_shards = functools.partial(Hook, since=f"{REPLICATED}, or the first step of a model in a scope", until=_SHARDS)

MAKE_FUNCTION = _of_scope(
    _TRAINERS, trainer.METHOD, why="a batch of any size is divided, and gives the numbers of one device"
)
MAKE_PREDICT = _of_scope(_TRAINERS, "make_predict_function", why="a batch of any size is divided")
COMPILE = _of_scope(
    f"{trainer.COMPILES}.{trainer.BASE}",
    "compile",
    why="metrics, and an optimizer that is given by its name, are made in the scope of the model",
)
BUILD = _of_scope(
    _TRAINERS,
    "_maybe_symbolic_build",
    why="models are built from one replica's part, after a check; own metrics are looked at; errors are explained",
)
FIT = _of_scope(
    _TRAINERS,
    "fit",
    why="the check before the model is built knows `fit` from `evaluate`",
    until="only notes that it was called",
)
COMBINE = _of_scope(
    trainer.MODULE,
    trainer.REDUCE,
    why="logs are means over replicas of all workers, not those of replica 0",
    since="the first scope of a strategy",
)
APPLY = _of_variables(
    _OPTIMIZERS,
    names.APPLY,
    why="gradients are summed before they are clipped; accumulated ones only in the last step of a group",
)
ADD_VARIABLE = _of_variables(
    _OPTIMIZERS,
    names.ADD_VARIABLE,
    why="each replica has its own accumulators of gradients, which are saved as their sum",
    until="passes on to Keras for all other variables",
)
CHECK_FINITE = _of_variables(
    "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer",
    "check_finite",
    why="an overflow on one replica counts for all; Keras asks replica 0 alone",
)
REDUCE_LOSSES = _of_shards(_LOSSES, "reduce_weighted_values", why="a shard's loss counts by its samples")
LOSS = _of_shards(f"{_LOSSES}.Loss", "__call__", why="whether a sum of losses is that of `compile` or of another call")
# What scale_loss_for_distribution and unscale_loss_for_distribution ask first.
BACKEND = _of_shards(_LOSSES, "backend", why="the losses of shards are scaled once")
MEAN = _of_shards(
    "keras.src.metrics.reduction_metrics", "reduce_to_samplewise_values", why="means over shards count by samples"
)
AVERAGE_LOSS = _of_shards(_AVERAGES, "compute_average_loss", why=_ONE_REPLICA, until=_INSIDE)
REGULARIZATION = _of_shards(_AVERAGES, "scale_regularization_loss", why=_ONE_REPLICA, until=_INSIDE)
TAPE_GRADIENT = _of_shards("tensorflow.python.eager.backprop.GradientTape", "gradient", why=_CHANGED, until=_NOT_SHARDS)
GRADIENTS = _of_shards(
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
        strategy = trainer.strategy_of(model)
        # A replica is in the scope already, and must not enter it.
        outside = strategy is not None and is_ours(strategy) and tf.distribute.get_strategy() is not strategy
        with strategy.scope() if outside else contextlib.nullcontext():
            return own(model, *args, **kwargs)

    COMPILE.around(compiled)


def extend_build(
    check: Callable[[keras.Model, tf.distribute.Strategy, object, int | None, bool], None],
    explained: Callable[[Exception], Exception],
    is_ours: Callable[[tf.distribute.Strategy], bool],
    built_now: Callable[[keras.Model], None],
    divides_itself: Callable[[keras.Model, object], bool],
) -> None:
    """Makes Keras build a model from one replica's part of the first batch.

    Keras builds the model from the mean over the parts of all replicas: strings have no mean, and parts of different
    sizes fail in an op, AddN.

    Args:
        check: called before the model is built, and before the first callback. It takes the model; its strategy; the
            first batch of all replicas; the number of samples in a smaller last batch, None if there is none or Keras
            does not know it; and whether the method is `fit`.
        explained: makes another error of one that is raised while the model is built.
        is_ours: whether a strategy is one of this library's.
        built_now: called with the model when it is built, before its first step, if it takes what TensorFlow has
            distributed, or its `train_step` or `compute_loss` is the user's own.
        divides_itself: whether the functions of a model take whole batches such as one that TensorFlow has distributed.
            Then its data is not distributed, but by the user, and there is nothing to check.

    `fit` and `evaluate` then raise InputsError if their data has no batch.
    """

    def built(own: Own, model: keras.Model, iterator: object = None, data_batch: object = None) -> object:
        strategy = trainer.strategy_of(model)
        if strategy is None or not is_ours(strategy):
            return own(model, iterator=iterator, data_batch=data_batch)
        divides = divides_itself(model, None)
        is_own = not (trainer.has_keras_step(model, "train_step") and trainer.has_keras_loss(model))
        if iterator is not None:
            is_fit = _begun.get() is model
            try:
                batch = trainer.first_batch(iterator, strategy)
            except StopIteration:
                raise InputsError(
                    f"The data of {'fit' if is_fit else 'evaluate'} has no batch: its arrays have no rows, or its "
                    "dataset or generator ends before the first batch. A generator that has been read must be made "
                    "again."
                ) from None
            _begun.set(None)  # what `fit` calls later, such as `evaluate`, is not its beginning
            rest = trainer.size_of_rest(iterator)
            divides = divides_itself(model, batch) and trainer.undistribute(iterator)
            if not divides or is_own:
                check(model, strategy, batch, rest, is_fit)
            iterator, data_batch = None, distribute.first_values(batch)
        try:
            result = own(model, iterator=iterator, data_batch=data_batch)
        except Exception as error:
            raise explained(error)
        if not divides or is_own:
            built_now(model)
        return result

    BUILD.around(built)
    FIT.around(_fit)


_begun: contextvars.ContextVar[keras.Model | None] = contextvars.ContextVar("replica_engine_fit", default=None)
"""The model whose `fit` has been called and has not built it yet. Keras builds it in the same way in `evaluate`."""


def _fit(own: Own, model: keras.Model, *args: object, **kwargs: object) -> object:
    with scoped.variable(_begun, model):
        return own(model, *args, **kwargs)


def make_functions(made: Callable[[keras.Model, str], Own | None], of_parts: Callable[..., Own]) -> None:
    """Gives models other functions to train, test and predict than Keras makes.

    Args:
        made: called with a model and "train_step", "test_step" or "predict_step"; returns what Keras calls with an
            iterator over whole batches, or with the batches of a prediction, or None if the model takes what TensorFlow
            has distributed.
        of_parts: makes the function of such a model, as `of_parts(own, model, step_function)` with Keras' own method.
    """

    def make(own: Own, model: keras.Model, step_function: object) -> object:
        name = "train_step" if step_function == model.train_step else "test_step"
        whole = made(model, name)
        if whole is None:
            return of_parts(own, model, step_function)
        keras_own: list[Own] = []

        def function(iterator: Iterator[object]) -> object:
            if not isinstance(iterator, tf.distribute.DistributedIterator):
                return whole(iterator)
            if not keras_own:  # the user has distributed the dataset
                keras_own.append(of_parts(own, model, step_function))
            return keras_own[0](iterator)

        return function

    def make_predict(own: Own, model: keras.Model, force: bool = False) -> object:
        if model.predict_function is not None and not force:
            return model.predict_function
        whole = made(model, "predict_step")
        if whole is None:
            return own(model, force)
        own(model, True)
        of_parts = model.predict_function

        def function(batches: Sequence[object]) -> object:
            return (whole if all(map(_can_be_joined, batches)) else of_parts)(batches)

        model.predict_function = function
        return function

    MAKE_FUNCTION.around(make)
    MAKE_PREDICT.around(make_predict)


def _can_be_joined(batch: object) -> bool:
    """Whether the parts of replicas differ in nothing but their numbers of samples."""
    leaves = [leaf.values for leaf in tf.nest.flatten(batch) if isinstance(leaf, distribute.DistributedValues)]
    shapes = ([tuple(getattr(part, "shape", ()))[1:] for part in parts] for parts in leaves)
    return all(len(set(each)) == 1 for each in shapes)


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
    explained: Callable[[Exception], Exception],
) -> None:
    """Makes Keras' optimizers accumulate gradients on each replica separately, and clip their sum over replicas.

    Args:
        apply: called as `apply(optimizer, grads, variables)` in a replica where an optimizer accumulates gradients, or
            clips them and there are others.
        agreed: combines the flag of a replica, whether its gradients are finite, with those of the others.
        is_ours: whether a strategy is one of this library's.
        check_foreign: called as `check_foreign(optimizer, variables)` in a replica with an optimizer of no strategy.
        explained: takes an exception of `build`; returns one in the user's terms, or the exception itself.
    """

    def in_replica_of_ours() -> bool:
        context = tf.distribute.get_replica_context()
        return context is not None and is_ours(context.strategy)

    def applied(
        own: Own, optimizer: keras.optimizers.Optimizer, grads: Gradients, trainable_variables: Weights
    ) -> None:
        context = tf.distribute.get_replica_context()
        if context is not None and is_ours(context.strategy):
            if names.is_of_no_strategy(optimizer):
                check_foreign(optimizer, trainable_variables)
            elif optimizer.gradient_accumulation_steps or (names.clips(optimizer) and context.num_replicas_in_sync > 1):
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
        of_each = name == names.ACCUMULATOR and is_ours(optimizer._distribution_strategy)
        with tf.variable_creator_scope(_for_each_replica) if of_each else contextlib.nullcontext():
            try:
                return own(optimizer, reference_variable, name=name, initializer=initializer)
            except Exception as error:
                # Keras calls an optimizer built before it has all of its variables. If it kept that, a second call
                # would miss the others: AttributeError: no attribute '_momentums'.
                optimizer.built = False
                raise explained(error)

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
    BACKEND.put(lambda own: own if isinstance(own, _Backend) else _Backend(own, shard))


class _Backend(StandIn):
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
