"""Gradients across replicas: reduced first, then applied once, in cross-replica context.

Keras sums gradients inside an optimizer's update. That is after clipping, so each replica clips only its own part. Here
a merge call reduces gradients first, and the optimizer's own `apply` runs inside the merge call, for all replicas at
once. So all that an optimizer does with a gradient, it does with the gradient of the global batch, as on one device.
`CrossReplicaOptimizer` does so in custom training loops.

An optimizer with `gradient_accumulation_steps` is called in replica context instead, with the gradients of the replica.
`strategies/keras_scopes.py` reduces them in the last step of a group, before the optimizer clips.

Gradients of embedding tables are rows with their indices, where a row that was looked up twice appears twice. Keras
does not add up duplicate rows. Adam squares each duplicate, and clipping by norm takes the norm over all of them. So an
optimizer treats a row that is split into two parts differently from the whole row, although both add the same to the
table. Together, the replicas must therefore have the rows that one device has: each row once, and zeros elsewhere.

What a variable is to be overwritten with (the scales of float8) is no gradient, and has no sum. It is the largest of
the replicas' values: so Keras combines the values of several steps, and the largest absolute value in a batch is the
largest of its shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from replica_engine.errors import OptimizerError, base
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import autograph
from replica_engine.upstream.keras import keras_models, keras_training
from replica_engine.values import linear


@keras.saving.register_keras_serializable(package="replica_engine")
class CrossReplicaOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer: gradients are first summed or averaged over replicas, and then applied.

    Under the strategies of `tf.distribute`, Keras' own optimizers sum gradients after they are clipped, so each replica
    clips only its own part. Under those of this library they sum first, as this class does. What it adds is the mean,
    for replicas that each compute the mean over their shard: clipping, gradient accumulation, weight decay and loss
    scaling then work on the mean gradient of the global batch, as on one device.

    This class is for custom loops: in the function that `strategy.run` runs, call `apply` or `apply_gradients`, as with
    any optimizer. Outside all strategy scopes, each call goes to the wrapped optimizer. Use "mean" if each replica
    computes the mean over its shard of the batch and all shards have the same size. Use "sum" if losses are divided by
    the size of the global batch. `Model.fit` under a strategy scales its losses for "sum". `replicate_model` needs no
    wrapper.

    Args:
        optimizer: any Keras optimizer. It keeps its learning rate, variables and settings.
        reduction: "mean" or "sum".
        name: the name of this optimizer; None takes the name of the wrapped optimizer.

    Raises:
        OptimizerError: `optimizer` is not a Keras optimizer, or `reduction` is unknown.

    Example:
        >>> import keras, tensorflow as tf, replica_engine
        >>> from replica_engine.keras import CrossReplicaOptimizer
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> with strategy.scope():
        ...     weight = keras.Variable(1.0)
        ...     optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(1.0), reduction="mean")
        >>> def step(gradient):
        ...     optimizer.apply([gradient], [weight])
        >>> gradients = strategy.experimental_distribute_values_from_function(
        ...     lambda context: tf.constant([0.2, 0.4][context.replica_id_in_sync_group])
        ... )
        >>> strategy.run(step, args=(gradients,))
        >>> round(float(weight.numpy()), 6)  # 1 - (0.2 + 0.4) / 2
        0.7
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, reduction: str = "mean", name: str | None = None):
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise OptimizerError(
                "CrossReplicaOptimizer wraps a Keras optimizer (keras.optimizers.Optimizer); got "
                f"{base.brief(optimizer)}."
            )
        if reduction not in REDUCTIONS:
            raise OptimizerError(f'reduction must be "mean" or "sum"; got {base.shown(reduction)}.')
        # This rate is never used: the property `learning_rate` is that of the wrapped optimizer.
        super().__init__(learning_rate=0.0, name=name or optimizer.name)
        self.inner_optimizer = optimizer
        self.reduction = reduction

    def build(self, variables: Weights) -> None:
        """Makes the variables of the wrapped optimizer."""
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        self._trainable_variables = list(variables)  # a checkpoint refuses a list that its owner changes
        self.built = True

    @autograph.artifact
    def apply(self, grads: Sequence[Gradient], trainable_variables: Weights | None = None) -> None:
        """Reduces gradients over replicas and applies them.

        Args:
            grads: one gradient for each variable; None for a variable without a gradient.
            trainable_variables: the variables; None takes the variables that were passed to `build`.

        Raises:
            OptimizerError: the call is in cross-replica context, where gradients cannot be reduced.
        """
        optimizer = self.inner_optimizer
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if tf.distribute.has_strategy() and not distribute.is_merged():  # else one around it has reduced them
            apply_across_replicas(optimizer, optimizer.apply, grads, variables, self.reduction)
        else:
            optimizer.apply(grads, variables)
        self._trainable_variables = variables
        self.built = True

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales a loss as the wrapped optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Weights) -> None:
        """Sets the final values of variables as the wrapped optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the wrapped optimizer."""
        return self.inner_optimizer.variables

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the wrapped optimizer; it can be set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> keras.Variable:
        """The number of updates so far."""
        return self.inner_optimizer.iterations

    def get_config(self) -> dict[str, object]:
        """The configuration from which `from_config` makes an equal optimizer."""
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "reduction": self.reduction,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> CrossReplicaOptimizer:
        """Makes the optimizer from a configuration."""
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return cls(optimizer, config["reduction"], config["name"])


REDUCTIONS = ("mean", "sum")
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
"""What a tape gives for a weight; None if the loss does not depend on it."""
Weights: TypeAlias = Sequence[keras.Variable]


@autograph.artifact
def apply_across_replicas(
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[..., object],
    grads: Sequence[Gradient],
    variables: Weights | None,
    reduction: str,
) -> None:
    """Reduces the gradients of all replicas and applies them.

    Args:
        optimizer: the optimizer to update with.
        apply: the optimizer's own `apply`.
        grads: this replica's gradients; None for a variable without a gradient.
        variables: the variables of the gradients; None takes the variables that the optimizer was built with.
        reduction: "sum" or "mean".

    Raises:
        OptimizerError: the call is in cross-replica context.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise OptimizerError(
            "The optimizer reduces gradients over the replicas and applies them in replica context: call apply() "
            "in the function that is given to strategy.run, not in a merge function or under strategy.scope() "
            "alone."
        )
    op = tf.distribute.ReduceOp[reduction.upper()]
    merge = _ApplyMerge(optimizer, apply, None if variables is None else list(variables), op)
    # Before the reduction: a sum of such values would be of no use.
    grads = _with_largest(grads, variables or keras_models.trained_by(optimizer))
    if any(map(keras_training.accumulates, keras_models.with_inner_optimizers(optimizer))):
        if not optimizer.built:
            context.merge_call(merge.build)
        size = 1 if reduction == "sum" else context.num_replicas_in_sync
        known = variables or keras_models.trained_by(optimizer)
        grads = [  # the sum over replicas of what is divided is their mean
            grad
            if size == 1 or keras_models.is_overwritten(variable)
            else distribute.changed(grad, lambda values: values / size)
            for grad, variable in zip(grads, known, strict=True)
        ]
        apply(grads, variables)
        return
    context.merge_call(merge.run, args=(list(grads),))


def build_across_replicas(optimizer: keras.optimizers.Optimizer, variables: Weights) -> None:
    """Makes an optimizer's variables if there are none, in replica context; elsewhere it does so itself."""
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    if context is not None and not optimizer.built:
        merge = _ApplyMerge(optimizer, optimizer.apply, list(variables), tf.distribute.ReduceOp.SUM)
        context.merge_call(merge.build)


def move_rows_to_first(grads: Sequence[Gradient]) -> list[Gradient]:
    """Moves the rows of tables to the first replica, for a batch that every replica has computed.

    Only the loss of the first replica counts. But a reduction in a layer of the user's own sends its gradient to all
    replicas, so each replica gets a part of every row. This function adds up the parts.

    Args:
        grads: this replica's gradients; their sum over replicas is the gradient of the batch.

    Returns:
        Gradients with the same sum. If another replica has the same index as the first replica, its row is zero.
    """
    tables = {
        index: grad
        for index, grad in enumerate(grads)
        if isinstance(grad, tf.IndexedSlices) and grad.values.shape.rank is not None
    }
    if not tables:
        return list(grads)
    context = tf.distribute.get_replica_context()
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    wanted = context.all_reduce("SUM", [_if(is_first, grad.indices) for grad in tables.values()])
    # Replicas that draw different random numbers may look up different rows.
    is_same = [
        _column(tf.equal(grad.indices, rows), grad.values) for grad, rows in zip(tables.values(), wanted, strict=True)
    ]
    whole = context.all_reduce(
        "SUM", [_if(same, grad.values) for grad, same in zip(tables.values(), is_same, strict=True)]
    )
    moved: dict[int, Gradient] = {}
    for (index, grad), same, values in zip(tables.items(), is_same, whole, strict=True):
        values = tf.where(same, _if(is_first, values), grad.values)
        moved[index] = tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return [moved.get(index, grad) for index, grad in enumerate(grads)]


@contextlib.contextmanager
def through_strategy(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes the optimizer update variables of `strategy` inside the block, wherever the optimizer was made."""
    parts = keras_models.with_inner_optimizers(optimizer)
    before = [vars(each)[keras_models.STRATEGY] for each in parts]
    for each in parts:
        vars(each)[keras_models.STRATEGY] = strategy
    try:
        yield
    finally:
        for each, own in zip(parts, before, strict=True):
            vars(each)[keras_models.STRATEGY] = own


@dataclasses.dataclass(eq=False)
class _ApplyMerge:
    """The merge function: one object per replica; all run the same code, so the engine sees one merge function."""

    optimizer: keras.optimizers.Optimizer
    apply: Callable[..., object]
    variables: list[keras.Variable] | None
    op: tf.distribute.ReduceOp

    @autograph.artifact
    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Makes the optimizer's variables if there are none."""
        if not self.optimizer.built:
            with tf.init_scope(), strategy.scope():  # its variables outlive the traced function
                self.optimizer.build(self.variables)

    @autograph.artifact
    def run(self, strategy: tf.distribute.Strategy, grads: list[Gradient]) -> None:
        """Reduces and applies the gradients; runs in cross-replica context."""
        optimizer = self.optimizer
        with through_strategy(optimizer, strategy):
            self.build(strategy)
            variables = self.variables or keras_models.trained_by(optimizer)
            given = [index for index, grad in enumerate(grads) if grad is not None]
            same = [index for index in given if keras_models.is_overwritten(variables[index])]  # on all replicas
            given = [index for index in given if index not in same]
            pairs = [(grads[index], keras_models.underlying_or_itself(variables[index])) for index in given]
            reduced = strategy.extended.batch_reduce_to(self.op, pairs) if pairs else []
            # A step may use gradients of all replicas in any way: one device has the same.
            linear.tag(tf.nest.flatten([getattr(each, "values", each) for each in reduced]), linear.COMMON)
            # Clipping and scaling compute with a gradient itself, which must be a tensor there.
            if keras_models.touches_gradients(optimizer):
                reduced = [distribute.first_values(grad) for grad in reduced]
            whole: list[Gradient] = [None] * len(grads)
            for index, grad in zip(given, reduced, strict=True):
                whole[index] = grad
            for index in same:
                whole[index] = distribute.first_values(grads[index])
            # Without this, the optimizer would make a merge call of its own, and the replicas have met already.
            with distribute.merged():
                keras_models.apply_across(optimizer, self.apply, whole, self.variables)


def _with_largest(grads: Sequence[Gradient], variables: Weights) -> list[Gradient]:
    """The gradients, where those that overwrite their variable are the largest of all replicas, on each replica."""
    overwriting = {
        place: grad
        for place, (grad, variable) in enumerate(zip(grads, variables, strict=False))
        if grad is not None and keras_models.is_overwritten(variable)
    }
    context = tf.distribute.get_replica_context()
    found = list(grads)
    if overwriting and context.num_replicas_in_sync > 1:
        all_values = context.all_gather([grad[tf.newaxis] for grad in overwriting.values()], axis=0)
        for place, values in zip(overwriting, all_values, strict=True):
            found[place] = tf.reduce_max(values, 0)
    return found


def _if(condition: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return tf.where(condition, value, tf.zeros([], value.dtype))


def _column(flags: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(flags, [-1] + [1] * (values.shape.rank - 1))
