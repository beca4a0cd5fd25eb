"""Gradients that are accumulated over four batches and reduced once, beside four plain steps, in one process.

A figure is the mean time of four batches. `gradient_accumulation_steps` is Keras' SGD with that argument, which adds up
the gradients of four steps. `accumulate` computes the four batches in one step, in a loop. Four plain steps are Keras'
SGD without it. All start from the same weights; the two that accumulate must come to the same loss, or there is nothing
to compare.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from benchmarks import command
from benchmarks.contenders import COMPILED, THREADS, distributed, start, strategy_of
from benchmarks.measure import Row, interleaved, milliseconds, same
from benchmarks.shared_models import MODELS, Model, tensorflow_ops
from benchmarks.train_step import TOLERANCE

STEPS = 4  # batches in a group, as many as a model has

PLAIN, KERAS, LOOP = "four plain steps", "gradient_accumulation_steps", "accumulate"

TARGETS = {"small": {PLAIN: 0.8}}  # by model: where all-reduces are most of a step


class Contender:
    """One way to train on four batches: `PLAIN`, `KERAS` or `LOOP`."""

    def __init__(self, strategy: Any, model: Model, way: str):
        self._model = model
        self._data = model.data(strategy.num_replicas_in_sync)[:STEPS]
        with strategy.scope():
            self._weights = [tf.Variable(value) for value in model.weights()]
            rate = model.rate / strategy.num_replicas_in_sync  # Keras sums gradients over replicas
            self._optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=STEPS if way == KERAS else None)
            self._optimizer.build(self._weights)
        batches = self._data
        if way == LOOP:
            batches = [tuple(np.concatenate(arrays, axis=1) for arrays in zip(*batches, strict=True))]
        self._batches = [[distributed(strategy, part) for part in batch] for batch in batches]
        step = self._loop_step if way == LOOP else self._step

        def run(x: Any, labels: Any) -> Any:
            return strategy.run(step, args=(x, labels))

        # As users write it: in a `tf.function` for threads; a compiled run needs none.
        self._run = run if isinstance(strategy, tf.distribute.TPUStrategy) else tf.function(run)

    def train(self, groups: int) -> None:
        """Trains on so many groups of four batches, and waits for the result."""
        for _ in range(groups):
            for batch in self._batches:
                self._run(*batch)
        self._weights[0].numpy()

    def loss(self) -> float:
        """The mean loss over all batches, with the weights that it has now."""
        now, pairs = [weight.numpy() for weight in self._weights], [zip(*batch, strict=True) for batch in self._data]
        ops = tensorflow_ops()
        return float(np.mean([self._model.loss(ops, now, x, labels) for x, labels in itertools.chain(*pairs)]))

    def _step(self, x: Any, labels: Any) -> Any:
        """Keras' optimizer, called once for each batch."""
        loss, gradients = self._gradients(x, labels)
        self._optimizer.apply(gradients, self._weights)
        return loss

    def _loop_step(self, x: Any, labels: Any) -> Any:
        """Four batches in one step, which reduces their gradients once."""
        loss, gradients = replica_engine.accumulate(self._gradients, (x, labels), STEPS)
        self._optimizer.apply(gradients, self._weights)
        return loss

    def _gradients(self, x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._model.loss(tensorflow_ops(), self._weights, x, labels)
        return loss, tape.gradient(loss, self._weights)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """A row for each way to accumulate, with each strategy, model and number of replicas."""
    start(max(flags.replicas))

    def timed(contender: Contender) -> float:
        return milliseconds(lambda: contender.train(flags.groups)) / flags.groups

    for name, replicas, strategy in itertools.product(flags.models, flags.replicas, (THREADS, COMPILED)):
        titles = {f"{strategy}, {KERAS}": KERAS, f"{strategy}, {LOOP}": LOOP, PLAIN: PLAIN}
        every = {who: Contender(strategy_of(strategy, replicas), MODELS[name], way) for who, way in titles.items()}
        for contender in every.values():
            contender.train(2)
        losses = {who: contender.loss() for who, contender in every.items() if who != PLAIN}
        check = same("loss after 2 groups", losses, TOLERANCE)
        figures = interleaved(every, flags.repeats, timed)
        for who in losses:
            shown = {each: figures[each] for each in (who, PLAIN)}
            targets = TARGETS.get(name, {})
            yield Row("accumulation", name, shown, "ms", replicas, targets=targets, check=check)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.FEW_REPEATS,
        command.models(MODELS, "small", "small,mlp"),
        command.replicas("2,4"),
        command.Option("groups", "20", "1", "groups of four batches that are timed together"),
    )
