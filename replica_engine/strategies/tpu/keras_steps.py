"""Keras' `steps_per_execution` as a device loop: that many steps of `fit` and `evaluate` in one launch.

A device loop runs steps of one shape. So a batch of a new shape (such as the last batch of a dataset) ends one launch
and begins the next one. A batch that does not split evenly over the replicas runs as a single step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.errors import BatchError
from replica_engine.strategies.tpu.device_loops import LoopSettings


def device_loop(model: Any, step_function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that `fit` or `evaluate` calls for `steps_per_execution` steps.

    Args:
        model: the model whose steps run.
        step_function: runs one step on one batch.
        plain: Keras' own function, used if there is only one step or no device loop.
    """
    strategy = keras_trainer.strategy_of(model)
    if not hasattr(strategy, "run_steps") or model.run_eagerly:
        return plain

    def one_step(iterator: Any) -> Any:
        programs.take_mismatch()
        try:
            return plain(iterator)
        except tf.errors.OpError:
            mismatch = programs.take_mismatch()
            if mismatch is not None and len({shape[:1] for shape in mismatch.by_replica}) > 1:
                raise BatchError(
                    f"A batch, probably the last one, does not divide by {strategy.num_replicas_in_sync} replicas, "
                    "and a compiled step has one shape on all of them. Leave the rest out, dataset.batch(n, "
                    "drop_remainder=True). Or let replicate_model(model) divide batches of any size, with the "
                    "results of one device."
                ) from None
            raise

    def step(context: Any, data: Any) -> None:
        context.set_last_step_output("logs", step_function(data))

    source: _Batches | None = None
    programs = strategy.extended.own_programs()  # they live as long as the model

    def function(iterator: Any) -> Any:
        nonlocal source
        if model.steps_per_execution == 1 or not isinstance(iterator, tf.distribute.DistributedIterator):
            return one_step(iterator)
        if source is None or not source.is_of(iterator):  # a new epoch
            source = _Batches(iterator)
        logs = None
        left = model.steps_per_execution
        with source.reading(iterator):
            while left and (batch := source.peek()) is not None:
                if _is_even(batch):
                    context = _launch(strategy, programs, step, source.alike(), left)
                    left -= context.steps
                    logs = context.last_step_outputs["logs"]
                else:
                    left -= 1
                    logs = strategy.run(step_function, args=(source.take(),))
        if left == model.steps_per_execution:
            raise StopIteration
        return keras_trainer.reduced(logs, strategy)

    return function


def _launch(strategy: Any, programs: Any, step: Callable[..., Any], batches: Iterator[Any], most: int) -> Any:
    try:
        return strategy.extended.run_steps(step, batches, LoopSettings(most, spread=False, programs=programs))
    except tf.errors.OutOfRangeError as ended:
        if not getattr(ended, "context", None):
            raise
        return ended.context


class _Batches:
    """The batches of an iterator; the next batch can be read without taking it.

    The object holds the iterator only during `reading`. Keras drops an iterator when an epoch is over, and TensorFlow
    may take long to free an old one.

    Args:
        iterator: the iterator of a distributed dataset.
    """

    def __init__(self, iterator: Any):
        self._of = weakref.ref(iterator)
        self._iterator: Any = None
        self._next: list[Any] = []

    def is_of(self, iterator: Any) -> bool:
        """Whether the batches come from `iterator`."""
        return self._of() is iterator

    @contextlib.contextmanager
    def reading(self, iterator: Any) -> Iterator[None]:
        """Holds the iterator inside the `with` block, so that batches can be read."""
        self._iterator = iterator
        try:
            yield
        finally:
            self._iterator = None

    def peek(self) -> Any:
        """The next batch, without taking it; None at the end."""
        if not self._next:
            try:
                self._next.append(tf.nest.map_structure(_without_optional, next(self._iterator)))
            except (StopIteration, tf.errors.OutOfRangeError):
                return None
        return self._next[0]

    def take(self) -> Any:
        """Takes the next batch, which `peek` must have returned before."""
        return self._next.pop()

    def alike(self) -> Iterator[Any]:
        """Takes the next batches, up to the first one with other shapes."""
        shapes = _shapes(self.peek())
        while (batch := self.peek()) is not None and _shapes(batch) == shapes:
            yield self.take()


def _shapes(batch: Any) -> list[tuple]:
    """For each leaf of a batch, its shapes on the replicas."""
    leaves = tf.nest.flatten(batch)
    return [tuple(getattr(part, "shape", None) for part in getattr(leaf, "values", (leaf,))) for leaf in leaves]


def _is_even(batch: Any) -> bool:
    return all(shape == shapes[0] for shapes in _shapes(batch) for shape in shapes)


def _without_optional(value: Any) -> Any:
    """Replaces an empty optional by None. Keras passes one where data is missing, for example sample weights."""
    return None if isinstance(value, tf.experimental.Optional) else value
