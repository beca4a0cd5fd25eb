"""Keras' `steps_per_execution` as a device loop: that many steps of `fit` and `evaluate` in one launch.

A device loop runs steps of one shape. So a batch of a new shape (such as the last batch of a dataset) ends one launch
and begins the next one. A batch that does not split evenly over the replicas runs as a single step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.backend import compiles
from replica_engine.errors import BatchError, ReplicaMismatchError
from replica_engine.strategies.multi_step import MultiStepContext
from replica_engine.strategies.tpu.device_loops import LoopSettings

if TYPE_CHECKING:
    import keras

Steps = Callable[[Iterator[object]], object]
"""Runs the steps of one execution on the next batches."""


def device_loop(own: Callable[..., Steps], model: keras.Model, step_function: Callable[[object], object]) -> Steps:
    """Returns the function that `fit` or `evaluate` calls for `steps_per_execution` steps.

    Args:
        own: makes Keras' own function, used if there is only one step or no device loop.
        model: the model whose steps run.
        step_function: runs one step on one batch.
    """
    plain = own(model, step_function)
    strategy = keras_trainer.strategy_of(model)
    if strategy is None or not compiles(strategy) or model.run_eagerly:
        return plain

    if strategy.extended.backend.distribution is not None:
        strategy.extended.backend.distribution.check_layouts()

    def one_step(iterator: Iterator[object]) -> object:
        try:
            return plain(iterator)
        except ReplicaMismatchError as mismatch:
            if len({shape[:1] for shape in mismatch.by_replica}) > 1:
                raise BatchError(
                    f"A batch, probably the last one, does not divide by {strategy.num_replicas_in_sync} replicas, "
                    "and a compiled step has one shape on all of them. Leave the rest out, dataset.batch(n, "
                    "drop_remainder=True). Or let replicate_model(model) divide batches of any size, with the "
                    "results of one device."
                ) from None
            raise

    def step(context: MultiStepContext, data: object) -> None:
        context.set_last_step_output("logs", step_function(data))

    programs = strategy.extended.backend.own_programs()  # they live as long as the model

    def function(iterator: Iterator[object]) -> object:
        if model.steps_per_execution == 1 or not isinstance(iterator, tf.distribute.DistributedIterator):
            return one_step(iterator)
        logs, left = None, model.steps_per_execution
        for shapes, alike in itertools.groupby(_next_batches(iterator, left), _shapes):
            if all(shape == of_leaf[0] for of_leaf in shapes for shape in of_leaf):
                # All workers must ask for as many steps: the first one without a batch ends the launch of all.
                context = _launch(strategy, step, alike, LoopSettings(left, spread=False, programs=programs))
                left -= context.steps
                logs = context.last_step_outputs["logs"]
            else:
                for batch in alike:
                    left -= 1
                    logs = strategy.run(step_function, args=(batch,))
        if left == model.steps_per_execution:
            raise StopIteration
        return keras_trainer.reduced(logs, strategy)

    return function


def _next_batches(iterator: Iterator[object], most: int) -> Iterator[object]:
    """Up to `most` batches, each taken when it is asked for: a launch runs while its next batches are read."""
    for _ in range(most):
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return
        yield tf.nest.map_structure(_without_optional, batch)


def _launch(
    strategy: tf.distribute.Strategy, step: Callable[..., None], batches: Iterator[object], settings: LoopSettings
) -> MultiStepContext:
    try:
        return strategy.extended.backend.run_steps(step, batches, settings)
    except tf.errors.OutOfRangeError as ended:
        if not getattr(ended, "context", None):
            raise
        return ended.context


def _shapes(batch: object) -> list[tuple]:
    """For each leaf of a batch, its shapes on the replicas."""
    leaves = tf.nest.flatten(batch)
    return [tuple(getattr(part, "shape", None) for part in getattr(leaf, "values", (leaf,))) for leaf in leaves]


def _without_optional(value: object) -> object:
    """Replaces an empty optional by None. Keras passes one where data is missing, for example sample weights."""
    return None if isinstance(value, tf.experimental.Optional) else value
