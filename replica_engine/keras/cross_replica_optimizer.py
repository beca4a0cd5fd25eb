"""A Keras optimizer for custom loops, which reduces gradients over replicas before it applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf import autograph
from replica_engine.errors import OptimizerError
from replica_engine.keras.optimizer import REDUCTIONS, apply_across_replicas


@keras.saving.register_keras_serializable(package="replica_engine")
class CrossReplicaOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer: gradients are summed or averaged over replicas, and then applied.

    Keras' own optimizers sum gradients as they update, after clipping, so that each replica clips its own part. This
    one brings them together first: clipping, gradient accumulation, weight decay and loss scaling see the gradient of
    the global batch, as on one device.

    For custom loops: in the function that is given to `strategy.run`, call `apply` or `apply_gradients` as of any
    optimizer. Outside of replicas it is the wrapped optimizer. Where each replica computes the mean over its share of
    the batch, and shares are equal, reduce with "mean"; where losses are divided by the size of the global batch, with
    "sum". `Model.fit` under a strategy scales its losses for "sum"; `replicate_model` needs no wrapper.

    Args:
        optimizer: any Keras optimizer. Learning rate, variables and settings are its own.
        reduction: "mean" or "sum".
        name: of this optimizer; None takes that of the wrapped one.

    Raises:
        OptimizerError: `optimizer` is none, or `reduction` is unknown.

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
            raise OptimizerError.no_optimizer(optimizer)
        if reduction not in REDUCTIONS:
            raise OptimizerError.bad_reduction(reduction)
        super().__init__(learning_rate=0.0, name=name or optimizer.name)
        self.inner_optimizer = optimizer
        self.reduction = reduction

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the wrapped optimizer's variables."""
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        self._trainable_variables = list(variables)
        self.built = True

    @autograph.artifact
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces gradients over replicas and applies them.

        Args:
            grads: gradients, one for each variable; None for variables without.
            trainable_variables: the variables; None for those that `build` was given.

        Raises:
            OptimizerError: called in cross-replica context, where there is nothing to reduce.
        """
        optimizer = self.inner_optimizer
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if tf.distribute.has_strategy():
            apply_across_replicas(optimizer, optimizer.apply, grads, variables, self.reduction)
        else:
            optimizer.apply(grads, variables)
        self._trainable_variables = variables
        self.built = True

    def scale_loss(self, loss: Any) -> Any:
        """As of the wrapped optimizer."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As of the wrapped optimizer."""
        self.inner_optimizer.finalize_variable_values(var_list)

    @property
    def variables(self) -> list[Any]:
        """Those of the wrapped optimizer."""
        return self.inner_optimizer.variables

    @property
    def learning_rate(self) -> Any:
        """That of the wrapped optimizer; may be set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """How many updates were made."""
        return self.inner_optimizer.iterations

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes it again of."""
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "reduction": self.reduction,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> CrossReplicaOptimizer:
        """The optimizer of a configuration."""
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return cls(optimizer, config["reduction"], config["name"])
