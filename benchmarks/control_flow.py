"""A merge call in a loop and in a branch: what the operator costs when it runs, and when it is traced.

    python -m benchmarks.control_flow [--replicas 2,4] [--iterations 50] [--runs 20] [--repeats 5] [--quick]
        [--json out.json]

- "loop": a step of a tf.while_loop on N replicas that all-reduces a gradient, beside the same loop on one device with
  the work of N replicas, without an all-reduce, and beside a call of the step for each iteration.
- "branch": a step in a tf.cond, beside the step without it.
- "trace": the first trace of a convolutional model whose training step stands in a tf.cond, beside the step without it;
  the difference is the aborted attempt. tf.distribute refuses all of these.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import command
from benchmarks.measure import Row, interleaved, milliseconds, same

GROUP = "control_flow"

LOOP, ONE_DEVICE, CALLS = "loop on N replicas", "loop on one device", "a call for each step"
BRANCH, PLAIN = "in a tf.cond", "without it"

SIZE = 200
"""Rows and columns of the weights."""


def loops(replicas: int, iterations: int, runs: int, repeats: int) -> Iterator[Row]:
    """A step in a loop, and in a branch."""
    import tensorflow as tf

    import replica_engine

    devices = replica_engine.logical_devices(replicas)
    strategy = replica_engine.MirroredStrategy(devices)
    with strategy.scope():
        weights, flag = tf.Variable(tf.eye(SIZE)), tf.Variable(True)
    alone = tf.Variable(tf.eye(SIZE))
    x = tf.linspace(0.0, 1.0, SIZE * SIZE)
    x = tf.reshape(x, [SIZE, SIZE])

    def gradient(w: Any) -> Any:
        return tf.matmul(x, w - tf.eye(SIZE), transpose_a=True) / SIZE + 1e-3

    def replica_step() -> Any:
        mean = tf.distribute.get_replica_context().all_reduce("MEAN", gradient(weights))
        weights.assign_sub(0.01 * mean)
        return mean

    def one_step() -> Any:
        mean = tf.add_n([gradient(alone) for _ in range(replicas)]) / replicas
        alone.assign_sub(0.01 * mean)
        return mean

    def loop(step: Callable[[], Any]) -> Any:
        return tf.while_loop(lambda i, _: i < iterations, lambda i, _: (i + 1, step()), (0, tf.zeros([SIZE, SIZE])))[1]

    on_all = tf.function(lambda: strategy.run(lambda: loop(replica_step)), autograph=False)
    on_one = tf.function(lambda: loop(one_step), autograph=False)
    once = tf.function(lambda: strategy.run(replica_step), autograph=False)
    chosen = tf.function(
        lambda: strategy.run(lambda: tf.cond(flag, replica_step, lambda: tf.zeros([SIZE, SIZE]))), autograph=False
    )
    on_all(), on_one()
    check = same(
        f"weights after {iterations} steps",
        {LOOP: float(tf.norm(weights.values[0] - tf.eye(SIZE))), ONE_DEVICE: float(tf.norm(alone - tf.eye(SIZE)))},
        1e-4,
    )

    def timed(call: Callable[[], Any], each: int) -> float:
        def waited() -> None:
            call()
            weights.values[0].numpy(), alone.numpy()

        waited()
        return milliseconds(waited, max(1, runs // each)) / each

    figures = interleaved(
        {
            LOOP: functools.partial(timed, on_all, iterations),
            ONE_DEVICE: functools.partial(timed, on_one, iterations),
            CALLS: functools.partial(timed, once, 1),
        },
        repeats,
    )
    yield Row(GROUP, "loop, one step", figures, replicas=replicas, targets={ONE_DEVICE: 1.2}, check=check)
    figures = interleaved(
        {BRANCH: functools.partial(timed, chosen, 1), PLAIN: functools.partial(timed, once, 1)}, repeats
    )
    yield Row(GROUP, "branch, one step", figures, replicas=replicas)


def traces(replicas: int, repeats: int) -> Iterator[Row]:
    """The first trace of a training step in a branch."""
    import keras
    import tensorflow as tf

    import replica_engine

    strategy = replica_engine.MirroredStrategy(replica_engine.logical_devices(replicas))
    with strategy.scope():
        flag = tf.Variable(True)

    def traced(in_branch: bool) -> float:
        with strategy.scope():
            layers: list[Any] = [keras.Input((32, 32, 3))]
            for _ in range(8):
                layers += [keras.layers.Conv2D(8, 3, padding="same"), keras.layers.BatchNormalization()]
            model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
            optimizer = keras.optimizers.SGD(0.01)
            optimizer.build(model.trainable_variables)

        def train() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.ones([8, 32, 32, 3]), training=True) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        def body() -> Any:
            return tf.cond(flag, train, lambda: 0.0) if in_branch else train()

        step = tf.function(lambda: strategy.run(body), autograph=False)
        began = time.perf_counter()
        step.get_concrete_function()
        return 1e3 * (time.perf_counter() - began)

    contenders = {BRANCH: functools.partial(traced, True), PLAIN: functools.partial(traced, False)}
    yield Row(GROUP, "first trace", interleaved(contenders, repeats), replicas=replicas)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """The rows of each number of replicas."""
    import tensorflow as tf

    import replica_engine

    replica_engine.logical_devices(max(flags.replicas))
    tf.get_logger().setLevel("ERROR")
    for replicas in flags.replicas:
        yield from loops(replicas, flags.iterations, flags.runs, flags.repeats)
        yield from traces(replicas, max(1, flags.repeats // 2))


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("replicas", "2,4", "2", "how many", command.numbers),
        command.Option("iterations", "50", "5", "steps of a loop"),
        command.Option("runs", "100", "5", "steps a figure, about"),
    )
