"""A merge call in a loop and in a branch: what the operator costs when it runs, and when it is traced.

- "loop": a step of a tf.while_loop on N replicas that all-reduces a gradient, beside the same loop on one device with
  the work of N replicas, without an all-reduce, and beside a call of the step for each iteration.
- "branch": a step in a tf.cond, beside the step without it.
- "trace": the first trace of a convolutional model whose training step stands in a tf.cond, beside the step without it;
  the difference is the aborted attempt. tf.distribute refuses all of these.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import replica_engine
from benchmarks import command
from benchmarks.contenders import THREADS, strategy_of
from benchmarks.measure import Row, interleaved, milliseconds, same

LOOP, ONE_DEVICE, CALLS = "loop on N replicas", "loop on one device", "a call for each step"
BRANCH, PLAIN = "in a tf.cond", "without it"

SIZE = 200  # rows and columns of the weights


def loops(replicas: int, iterations: int, runs: int, repeats: int) -> Iterator[Row]:
    """A step in a loop, and in a branch."""
    strategy = strategy_of(THREADS, replicas)
    with strategy.scope():
        weights, flag = tf.Variable(tf.eye(SIZE)), tf.Variable(True)
    alone = tf.Variable(tf.eye(SIZE))
    x = tf.reshape(tf.linspace(0.0, 1.0, SIZE * SIZE), [SIZE, SIZE])

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

    def branch() -> Any:
        return tf.cond(flag, replica_step, lambda: tf.zeros([SIZE, SIZE]))

    on_all = tf.function(lambda: strategy.run(lambda: loop(replica_step)), autograph=False)
    on_one = tf.function(lambda: loop(one_step), autograph=False)
    once = tf.function(lambda: strategy.run(replica_step), autograph=False)
    chosen = tf.function(lambda: strategy.run(branch), autograph=False)
    on_all(), on_one()
    moved = {who: float(tf.norm(w - tf.eye(SIZE))) for who, w in ((LOOP, weights.values[0]), (ONE_DEVICE, alone))}
    check = same(f"weights after {iterations} steps", moved, 1e-4)

    def timed(contender: tuple[Callable[[], Any], int]) -> float:
        call, steps = contender

        def waited() -> None:
            call()
            weights.values[0].numpy(), alone.numpy()

        waited()
        return milliseconds(waited, max(1, runs // steps)) / steps

    in_loops = {LOOP: (on_all, iterations), ONE_DEVICE: (on_one, iterations), CALLS: (once, 1)}
    figures = interleaved(in_loops, repeats, timed)
    yield Row("control_flow", "loop, one step", figures, replicas=replicas, targets={ONE_DEVICE: 1.2}, check=check)
    figures = interleaved({BRANCH: (chosen, 1), PLAIN: (once, 1)}, repeats, timed)
    yield Row("control_flow", "branch, one step", figures, replicas=replicas)


def traces(replicas: int, repeats: int) -> Row:
    """The first trace of a training step in a branch."""
    strategy = strategy_of(THREADS, replicas)
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

        return milliseconds(tf.function(lambda: strategy.run(body), autograph=False).get_concrete_function)

    figures = interleaved({BRANCH: True, PLAIN: False}, repeats, traced)
    return Row("control_flow", "first trace", figures, replicas=replicas)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """The rows of each number of replicas."""
    replica_engine.logical_devices(max(flags.replicas))
    tf.get_logger().setLevel("ERROR")
    for replicas in flags.replicas:
        yield from loops(replicas, flags.iterations, flags.runs, flags.repeats)
        yield traces(replicas, max(1, flags.repeats // 2))


if __name__ == "__main__":
    iterations = command.Option("iterations", "50", "5", "steps of a loop")
    runs = command.Option("runs", "100", "5", "steps a figure, about")
    command.main(__doc__, measure, command.replicas("2,4"), iterations, runs)
