"""The parts of a Keras optimizer that accumulate gradients: `gradient_accumulation_steps`.

Keras keeps one accumulator per weight. `_backend_apply_gradients` adds to the accumulators in k - 1 of k steps, and
updates the weights in the last one, in two branches of one condition. The functions here are the pieces of that method,
for code that puts a reduction over replicas between them. Checked on Keras 3.10 to 3.16. This module does not import
Keras.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from replica_engine._tf.distribute import DistributedVariable

if TYPE_CHECKING:
    import keras

MODULE = "keras.src.backend.tensorflow.optimizer"
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
