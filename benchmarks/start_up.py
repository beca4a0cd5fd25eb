"""The cost of the first training step of a large Keras model, beside tf.distribute, each in a new process.

    python -m benchmarks.start_up [--replicas 4] [--repeats 7] [--quick] [--json out.json]

The program is a user's: Keras' ResNet-50, a `tf.function` step with `strategy.run`, and a Keras optimizer. Each figure
has a new process, of this library and of tf.distribute in turn, because only the first time is slow. The first step is
traced, optimized and run. The other row also includes making the strategy, the model and the optimizer. The second step
is not timed, but its loss, after an update of all weights, must be the same too. tf.distribute uses its fastest
all-reduce for CPUs.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from benchmarks import command
from benchmarks.fresh import in_fresh_process
from benchmarks.measure import Row, interleaved, same, seconds

BATCH = 8
"""The number of images for each replica."""

SHAPE = (64, 64, 3)
"""Of an image."""

TOLERANCE = 1e-3
"""The largest relative difference of losses, after an update of 50 layers."""

OURS, THEIRS = "MirroredStrategy", "tf.distribute"

TARGET = {THEIRS: 0.5}


def start_up(who: str, replicas: int) -> dict[str, float]:
    """Seconds before and for the first step, and the losses of two steps. Called in a new process."""
    import keras
    import numpy as np
    import tensorflow as tf

    import replica_engine

    devices = replica_engine.testing.logical_devices(replicas)
    keras.utils.set_random_seed(0)

    def build() -> tuple[Any, Any, Any]:
        if who == OURS:
            strategy = replica_engine.MirroredStrategy(devices)
        else:
            strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
        with strategy.scope():
            model = keras.applications.ResNet50(weights=None, input_shape=SHAPE, classes=10)
            optimizer = keras.optimizers.SGD(0.01)
            optimizer.build(model.trainable_variables)
        return strategy, model, optimizer

    built, (strategy, model, optimizer) = seconds(build)

    def replica_step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x: Any, labels: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(x, labels)), axis=None)

    random = np.random.default_rng(0)
    images = random.standard_normal((replicas, BATCH, *SHAPE), dtype=np.float32)
    labels = random.integers(10, size=(replicas, BATCH))
    batch = [
        strategy.experimental_distribute_values_from_function(
            lambda context, values=values: tf.constant(values[context.replica_id_in_sync_group])
        )
        for values in (images, labels)
    ]
    first, loss = seconds(lambda: float(step(*batch)))
    return {"built": built, "first": first, "loss 1": loss, "loss 2": float(step(*batch))}


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for the first step, and one that includes building the model."""
    found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}

    def first(who: str) -> float:
        found[who].append(in_fresh_process(start_up, who, flags.replicas))
        return found[who][-1]["first"]

    figures = interleaved({who: functools.partial(first, who) for who in found}, flags.repeats)
    whole = {who: [each["built"] + each["first"] for each in results] for who, results in found.items()}
    check = "; ".join(
        same(f"loss of step {step}", {who: results[-1][f"loss {step}"] for who, results in found.items()}, TOLERANCE)
        for step in (1, 2)
    )
    row = functools.partial(Row, "start_up", unit="s", replicas=flags.replicas, check=check)
    yield row("first step of ResNet-50", figures, targets=TARGET)
    yield row("building ResNet-50, and its first step", whole)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("repeats", "7", "3", "processes of each strategy"),
        command.Option("replicas", "4", "2", "number of replicas"),
    )
