"""A Keras optimizer for custom training loops that reduces gradients over replicas before it applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.graphs import autograph
from replica_engine.errors import OptimizerError
from replica_engine.errors.base import brief, shown
from replica_engine.keras.optimizer import REDUCTIONS, Gradient, Weights, apply_across_replicas


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
                f"CrossReplicaOptimizer wraps a Keras optimizer (keras.optimizers.Optimizer); got {brief(optimizer)}."
            )
        if reduction not in REDUCTIONS:
            raise OptimizerError(f'reduction must be "mean" or "sum"; got {shown(reduction)}.')
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
