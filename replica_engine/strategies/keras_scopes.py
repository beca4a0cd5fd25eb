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

import importlib
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine.backend import has_backend
from replica_engine.diagnostics.misuse import check_optimizer, translate_error
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.engine import current_replica
from replica_engine.errors import DistributionError
from replica_engine.threads.replica_run import keep_attributes
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import operators
from replica_engine.upstream.hook import hide_frames
from replica_engine.upstream.keras import keras_hooks, keras_training, keras_variables
from replica_engine.values.regroup import regroup


def extend_keras() -> None:
    """Makes Keras' optimizers clip and accumulate as above; strategies of others keep what Keras does.

    Does nothing until Keras is imported, or a second time.
    """
    keras_hooks.extend_optimizers(_apply, _on_all_replicas, has_backend, check_optimizer, translate_error)


@operators.artifact
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

    @operators.artifact
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

    @operators.artifact
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


@operators.artifact
def _on_all_replicas(flag: Any) -> Any:
    """Whether a flag is true on all replicas; called in replica context."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return flag
    return tf.equal(context.all_reduce("SUM", tf.cast(tf.logical_not(flag), tf.int32)), 0)


def imported() -> tuple[bool, bool]:
    """Whether Keras, and this library's part for it, are imported: hooks wait for their modules."""
    return "keras" in sys.modules, "replica_engine.keras" in sys.modules


def install_keras_hooks() -> None:
    """Makes `compile` work outside the scope, and Keras' methods train, evaluate and predict on the replicas.

    On threads each replica has its own losses of layers, and its own attributes that a step sets. Synchronized
    normalizations are so with a mask too. A program that has imported `replica_engine.keras`
    can load models with a `CrossReplicaOptimizer`.

    Strategies that do not run on a backend of this library keep what Keras does. Does nothing until Keras is imported,
    or a second time.
    """
    if all(imported()):  # for models that the program loads
        importlib.import_module("replica_engine.keras.replica_optimizer")
    keras_hooks.extend_build(translate_error, has_backend, _takes_whole)
    keras_hooks.make_functions(_make_step_function, _takes_whole)
    keras_hooks.compile_in_scope(has_backend)
    hide_frames(FOLDERS)
    keras_hooks.synchronize_masked(has_backend)
    keep_attributes()
    keras_hooks.for_each_replica(lambda: (replica := current_replica()) is not None and replica.index > 0)


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
