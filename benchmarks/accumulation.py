"""Gradients that are accumulated over four batches and reduced once, beside four plain steps, in one process.

    python -m benchmarks.accumulation [--models small,mlp] [--replicas 2,4] [--groups 5] [--repeats 3] [--quick]
        [--json out.json]

A figure is the mean time of four batches. `gradient_accumulation_steps` is Keras' SGD with that argument, which adds up
the gradients of four steps. `accumulate` computes the four batches in one step, in a loop. Four plain steps are Keras'
SGD without it. All start from the same weights; the two that accumulate must come to the same loss, or there is nothing
to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.measure import Row, interleaved, milliseconds, same
from benchmarks.shared_models import MODELS, Model, TensorFlowOps
from benchmarks.train_step import TOLERANCE

STEPS = 4
"""Batches in a group, as many as a model has."""

PLAIN, KERAS, LOOP = "four plain steps", "gradient_accumulation_steps", "accumulate"

TARGETS = {"small": {PLAIN: 0.8}}
"""By model: where all-reduces are most of a step."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train on four batches.

    Attributes:
        train: trains on so many groups of four batches, and waits for the result.
        loss: the mean loss over all batches, with the weights that it has now.
    """

    train: Callable[[int], None]
    loss: Callable[[], float]


def contenders(make: Callable[[], Any], model: Model) -> dict[str, Contender]:
    """All of them, on a strategy each."""
    return {
        f"{type(make()).__name__}, {KERAS}": _in_steps(make(), model, STEPS),
        f"{type(make()).__name__}, {LOOP}": _in_a_loop(make(), model),
        PLAIN: _in_steps(make(), model, None),
    }


def _in_steps(strategy: Any, model: Model, accumulated: int | None) -> Contender:
    """Keras' optimizer, called once for each batch."""
    import tensorflow as tf

    weights, optimizer = _made(strategy, model, accumulated)

    def replica_step(x: Any, labels: Any) -> Any:
        loss, gradients = _gradients(model, weights, x, labels)
        optimizer.apply(gradients, weights)
        return loss

    batches = [_on_replicas(strategy, *batch) for batch in model.data(strategy.num_replicas_in_sync)]
    run = _compiled(strategy, tf, replica_step)

    def train(groups: int) -> None:
        for _ in range(groups):
            for batch in batches[:STEPS]:
                run(*batch)
        weights[0].numpy()

    return Contender(train, lambda: _loss(strategy, model, weights))


def _in_a_loop(strategy: Any, model: Model) -> Contender:
    """Four batches in one step, which reduces their gradients once."""
    import tensorflow as tf

    import replica_engine

    weights, optimizer = _made(strategy, model, None)

    def replica_step(x: Any, labels: Any) -> Any:
        part = functools.partial(_gradients, model, weights)
        loss, gradients = replica_engine.accumulate(part, (x, labels), STEPS)
        optimizer.apply(gradients, weights)
        return loss

    data = model.data(strategy.num_replicas_in_sync)[:STEPS]
    batch = _on_replicas(strategy, *(np.concatenate(arrays, axis=1) for arrays in zip(*data, strict=True)))
    run = _compiled(strategy, tf, replica_step)

    def train(groups: int) -> None:
        for _ in range(groups):
            run(*batch)
        weights[0].numpy()

    return Contender(train, lambda: _loss(strategy, model, weights))


def _made(strategy: Any, model: Model, accumulated: int | None) -> tuple[list[Any], Any]:
    import keras
    import tensorflow as tf

    with strategy.scope():
        weights = [tf.Variable(value) for value in model.weights()]
        rate = model.rate / strategy.num_replicas_in_sync  # Keras sums gradients over replicas
        optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=accumulated)
        optimizer.build(weights)
    return weights, optimizer


def _gradients(model: Model, weights: list[Any], x: Any, labels: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = model.loss(TensorFlowOps(), weights, x, labels)
    return loss, tape.gradient(loss, weights)


def _on_replicas(strategy: Any, *arrays: np.ndarray) -> list[Any]:
    import tensorflow as tf

    def value(array: np.ndarray) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(array[context.replica_id_in_sync_group])
        )

    return [value(array) for array in arrays]


def _compiled(strategy: Any, tf: Any, replica_step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as users write it: in a `tf.function` for threads; a compiled run needs none."""
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return lambda *args: strategy.run(replica_step, args=args)
    return tf.function(lambda *args: strategy.run(replica_step, args=args))


def _loss(strategy: Any, model: Model, weights: list[Any]) -> float:
    now = [weight.numpy() for weight in weights]
    data = model.data(strategy.num_replicas_in_sync)[:STEPS]
    losses = [model.loss(TensorFlowOps(), now, x, labels) for xs, ys in data for x, labels in zip(xs, ys, strict=True)]
    return float(np.mean(losses))


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """A row for each way to accumulate, with each strategy, model and number of replicas."""
    from benchmarks.contenders import start

    start(max(flags.replicas))
    import replica_engine

    def timed(contender: Contender) -> float:
        return milliseconds(lambda: contender.train(flags.groups)) / flags.groups

    for name in flags.models:
        for replicas in flags.replicas:
            devices = [f"CPU:{index}" for index in range(replicas)]
            for make in (
                functools.partial(replica_engine.MirroredStrategy, devices),
                functools.partial(replica_engine.TPUStrategy, num_cores=replicas),
            ):
                every = contenders(make, MODELS[name])
                for contender in every.values():
                    contender.train(2)
                losses = {who: contender.loss() for who, contender in every.items() if who != PLAIN}
                check = same("loss after 2 groups", losses, TOLERANCE)
                figures = interleaved(
                    {who: functools.partial(timed, each) for who, each in every.items()}, flags.repeats
                )
                for who in losses:
                    shown = {each: figures[each] for each in (who, PLAIN)}
                    targets = TARGETS.get(name, {})
                    yield Row("accumulation", name, shown, "ms", replicas, targets=targets, check=check)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.FEW_REPEATS,
        command.Option("models", "small,mlp", "small", "which", command.choose_some(*MODELS)),
        command.Option("replicas", "2,4", "2", "how many", command.numbers),
        command.Option("groups", "20", "1", "groups of four batches that are timed together", command.positive),
    )
