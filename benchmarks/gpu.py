"""Training steps on one GPU, by `TPUStrategy` and by Keras on JAX. Not among the groups that run everywhere.

The models are those of the group `aot`, with SGD with momentum for ResNet-50 and Adam for the others. The batches of
`TPUStrategy` are tensors on the host, as those of a dataset are; JAX has its batch on the GPU. "A step" reads the loss
of each step, as a loop that prints it does. "A step, loss not read" launches twenty steps and reads one loss, or none:
then no step waits for the one before. Each figure is of a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import command
from benchmarks.aot import MODELS, OURS, THEIRS, made, policies
from benchmarks.fresh import in_fresh_process
from benchmarks.keras_training import jax_step, tensorflow_step
from benchmarks.measure import Row, milliseconds, same, seconds

TOLERANCE = 0.02
"""The largest relative difference of the first losses: GPUs multiply in TF32, and libraries choose other kernels."""

UNREAD = 20  # the number of steps whose losses are not read


class Took(NamedTuple):
    """What one process measured: milliseconds of the first step, and of later ones with and without a read loss."""

    first: float  # of the first step, from the call to its loss
    step: float  # of a step whose loss is read
    unread: float  # of a step whose loss is not read
    loss: float  # of the first step


def ours(name: str, policy: str, batch: int, steps: int, platform: str) -> Took:
    """The figures of `TPUStrategy`. Runs in a process of its own."""
    os.environ |= {
        "KERAS_BACKEND": "tensorflow",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    import tensorflow as tf

    from replica_engine import TPUStrategy, xla

    strategy = TPUStrategy(xla.PjrtClusterResolver(platform), num_cores=1)
    with strategy.scope():
        model, optimizer, compute_loss = made(name, policy)
    train = tensorflow_step(model, optimizer, compute_loss)

    def train_alone(x: Any, y: Any) -> None:
        train(x, y)

    with tf.device("CPU:0"):
        given = tuple(map(tf.constant, MODELS[name].data(batch)))
    weight = model.trainable_variables[0]

    def unread() -> Any:
        for _ in range(UNREAD):
            strategy.run(train_alone, args=given)
        return strategy.run(lambda: tf.reshape(weight, [-1])[0])

    return _timed(lambda: strategy.run(train, args=given), unread, steps)


def theirs(name: str, policy: str, batch: int, steps: int, platform: str) -> Took:
    """The figures of Keras on JAX. Runs in a process of its own."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    device = jax.devices(platform)[0]
    step = jax_step(*made(name, policy), MODELS[name].data(batch), device, device)
    return _timed(step, lambda: [step() for _ in range(UNREAD)][-1], steps)


def _timed(step: Callable[[], Any], unread: Callable[[], Any], steps: int) -> Took:
    first, loss = seconds(lambda: float(step()))
    float(step())
    read = milliseconds(lambda: float(step()), steps)
    float(unread())
    not_read = milliseconds(lambda: float(unread()), max(1, steps // UNREAD)) / UNREAD
    return Took(first * 1e3, read, not_read, loss)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each model and policy."""
    for policy, name in itertools.product(flags.policies, flags.models):
        took: dict[str, list[Took]] = {OURS: [], THEIRS: []}
        for _ in range(flags.repeats):
            for who, train in ((OURS, ours), (THEIRS, theirs)):
                took[who].append(in_fresh_process(train, name, policy, flags.batch, flags.steps, flags.platform))
        check = same("loss", {who: each[-1].loss for who, each in took.items()}, TOLERANCE)
        title = f"{MODELS[name].title}, {policy.removeprefix('mixed_')}, batch {flags.batch}"
        for what, field in (("step", "step"), ("step, loss not read", "unread"), ("first step", "first")):
            figures = {who: [getattr(found, field) for found in each] for who, each in took.items()}
            yield Row("gpu", f"{title}: {what}", figures, replicas=1, check=check)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("repeats", "2", "1", "processes of each contender"),
        command.models(MODELS, "lstm"),
        policies(),
        command.Option("batch", "64", "2", "the number of examples"),
        command.Option("steps", "40", "2", "steps for each figure of a step"),
        command.Option("platform", "gpu", "gpu", "where to run: gpu, or cpu to try it", str),
    )
