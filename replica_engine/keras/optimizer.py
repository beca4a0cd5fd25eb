"""Applying gradients across replicas: reduced first, then applied once, in cross-replica context.

Keras sums gradients inside an optimizer's update, after it has clipped them and in the branch that gradient
accumulation takes: each replica clips its own part, and the threads of a branch cannot meet. Here they are reduced
before, in a merge call, and the optimizer's own `apply` runs in it, for all replicas at once. So whatever an optimizer
does with a gradient it does with that of the global batch, as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf import autograph, distribute, keras_model
from replica_engine.errors import OptimizerError

REDUCTIONS = ("mean", "sum")


@autograph.artifact
def apply_across_replicas(
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[..., Any],
    grads: Sequence[Any],
    variables: Sequence[Any] | None,
    reduction: str,
) -> None:
    """Reduces the gradients of all replicas, and applies them.

    Args:
        optimizer: whose update it is.
        apply: its own `apply`.
        grads: this replica's gradients; None for variables that have none.
        variables: of which they are; None for those that the optimizer was built with.
        reduction: "sum" or "mean".
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise OptimizerError.not_in_replica()
    merge = _Merge(optimizer, apply, variables, reduction)
    context.merge_call(merge.run, args=(list(grads),))


class _Merge:
    """The merge function; one for each replica, which are equal, so that replicas can be seen to meet in one."""

    def __init__(self, optimizer: Any, apply: Callable[..., Any], variables: Any, reduction: str):
        self._optimizer = optimizer
        self._apply = apply
        self._variables = None if variables is None else list(variables)
        self._op = tf.distribute.ReduceOp[reduction.upper()]

    @autograph.artifact
    def run(self, strategy: tf.distribute.Strategy, grads: list[Any]) -> None:
        """Runs in cross-replica context."""
        optimizer = self._optimizer
        with through_strategy(optimizer, strategy):
            if not optimizer.built:
                with tf.init_scope(), strategy.scope():  # its variables outlive the function that is being traced
                    optimizer.build(self._variables)
            variables = self._variables or keras_model.trained_by(optimizer)
            given = [index for index, grad in enumerate(grads) if grad is not None]
            pairs = [(grads[index], keras_model.underlying_or_itself(variables[index])) for index in given]
            reduced = strategy.extended.batch_reduce_to(self._op, pairs) if pairs else []
            if keras_model.touches_gradients(optimizer):
                reduced = [distribute.first_values(grad) for grad in reduced]
            whole: list[Any] = [None] * len(grads)
            for index, grad in zip(given, reduced, strict=True):
                whole[index] = grad
            with distribute.merged():
                keras_model.apply_across(optimizer, self._apply, whole, self._variables)


@contextlib.contextmanager
def through_strategy(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside, the optimizer updates variables of `strategy`, wherever it was made."""
    before = [(each, keras_model.strategy_of_optimizer(each)) for each in keras_model.with_inner_optimizers(optimizer)]
    for each, _ in before:
        keras_model.set_strategy_of_optimizer(each, strategy)
    try:
        yield
    finally:
        for each, own in before:
            keras_model.set_strategy_of_optimizer(each, own)
