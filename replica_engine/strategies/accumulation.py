"""Keras' optimizers on replicas: they clip the gradient of the whole batch, and gradients travel once in k steps.

Keras clips the gradient of each replica, and sums what is left. One device clips the sum. So in a replica, an optimizer
that clips first sums the gradients of all, in a merge call, and all replicas update with the clipped sum.

With `gradient_accumulation_steps`, each replica adds its gradients to accumulators of its own (variables with `ON_READ`
synchronization). In the last step of a group the sums of all replicas are reduced, and the optimizer clips, decays and
updates with the result: the gradient of the whole group, as on one device. In the other k - 1 steps no gradient leaves
its replica.

Whether a step is the last one depends on the optimizer's counter, which is equal on all replicas. Replica threads
cannot meet inside a branch, so they meet before it: in each step a merge call, which moves no data, builds one
condition for all replicas. In a compiled program the condition is part of the program, with the collectives in one of
its branches.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.graphs import autograph
from replica_engine._tf.keras import accumulation as keras_accumulation
from replica_engine._tf.keras import hooks as keras_hooks
from replica_engine.backend import has_backend
from replica_engine.diagnostics.misuse import explained
from replica_engine.diagnostics.suspicions import check_optimizer
from replica_engine.values.regroup import regroup


def extend_keras() -> None:
    """Makes Keras' optimizers clip and accumulate as above; strategies of others keep what Keras does.

    Does nothing until Keras is imported, or a second time.
    """
    keras_hooks.extend_optimizers(_apply, _on_all_replicas, has_backend, check_optimizer, explained)


@autograph.artifact
def _apply(optimizer: Any, grads: Any, variables: Any) -> None:
    """Accumulates gradients, or sums them before they are clipped; called in replica context in place of Keras' code.

    Args:
        optimizer: an optimizer with `gradient_accumulation_steps`, or one that clips.
        grads: this replica's gradients, none of them None.
        variables: the variables of the gradients.
    """
    kind = _AccumulationStep if keras_accumulation.accumulates(optimizer) else _ClippedStep
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
            keras_accumulation.average(self._optimizer)

    def _update(self, strategy: tf.distribute.Strategy, grads: list[Any]) -> None:
        """Reduces gradients, and updates the variables with their sums."""
        pairs = [
            (grad, variable if isinstance(variable, tf.Variable) else variable.value)
            for grad, variable in zip(grads, self._variables, strict=True)
        ]
        sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        if keras_accumulation.clips(self._optimizer):
            sums = [distribute.first_values(grad) for grad in sums]
        with distribute.merged():
            keras_accumulation.update(self._optimizer, sums, self._variables)


class _AccumulationStep(_ClippedStep):
    """One of the k steps of a group."""

    def __init__(self, optimizer: Any, variables: list[Any]):
        super().__init__(optimizer, variables)
        self._accumulators = [each.value for each in keras_accumulation.accumulators(optimizer, variables)]

    @autograph.artifact
    def run(self, strategy: tf.distribute.Strategy, grads: list[Any]) -> None:
        """Adds the gradients to the accumulators, and ends the group if this is its last step."""
        for accumulator, grad in zip(self._accumulators, grads, strict=True):
            strategy.extended.update(accumulator, _add, args=(grad,), group=False)
        tf.cond(keras_accumulation.is_update_step(self._optimizer), lambda: self._end_group(strategy), lambda: None)
        with distribute.merged():
            keras_accumulation.average(self._optimizer)

    def _end_group(self, strategy: tf.distribute.Strategy) -> None:
        """Reduces and clears the accumulators, and updates the variables with the mean over the steps of the group."""
        steps = self._optimizer.gradient_accumulation_steps
        mine = {id(each) for each in self._accumulators}
        for other in keras_accumulation.accumulators(self._optimizer):
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


@autograph.artifact
def _on_all_replicas(flag: Any) -> Any:
    """Whether a flag is true on all replicas; called in replica context."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return flag
    return tf.equal(context.all_reduce("SUM", tf.cast(tf.logical_not(flag), tf.int32)), 0)
