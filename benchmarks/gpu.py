"""Training steps on one GPU, by `TPUStrategy` and by Keras on JAX. Not among the groups that run everywhere.

    python -m benchmarks.gpu [--models resnet,transformer,bert,lstm] [--policies float32,mixed_bfloat16] [--batch 64]
        [--steps 40] [--repeats 2] [--platform gpu] [--quick] [--json out.json]

The models are those of the group `aot`, with SGD with momentum for ResNet-50 and Adam for the others. The batches of
`TPUStrategy` are tensors on the host, as those of a dataset are; JAX has its batch on the GPU. "A step" reads the loss
of each step, as a loop that prints it does. "A step, loss not read" launches twenty steps and reads one loss, or none:
then no step waits for the one before. Each figure is of a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.aot import MODELS, OURS, POLICIES, THEIRS
from benchmarks.fresh import in_fresh_process
from benchmarks.keras_models import initial
from benchmarks.keras_training import jax_step
from benchmarks.measure import Row, same

TOLERANCE = 0.02
"""The largest relative difference of the first losses: GPUs multiply in TF32, and libraries choose other kernels."""

UNREAD = 20
"""The number of steps whose losses are not read."""


@dataclasses.dataclass(frozen=True)
class Took:
    """What one process measured: seconds of the first step, and of later ones with and without a read loss.

    Attributes:
        first: of the first step, from the call to its loss.
        step: of a step whose loss is read.
        unread: of a step whose loss is not read.
        loss: of the first step.
    """

    first: float
    step: float
    unread: float
    loss: float


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
        model, optimizer, compute_loss = _made(name, policy)

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = compute_loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def train_alone(x: Any, y: Any) -> None:
        train(x, y)

    with tf.device("CPU:0"):
        given = tuple(map(tf.constant, _batch(name, batch)))
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
    step = jax_step(*_made(name, policy), _batch(name, batch), device, device)
    return _timed(step, lambda: [step() for _ in range(UNREAD)][-1], steps)


def _made(name: str, policy: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """The model with its initial weights, its optimizer, and the mean loss of labels and logits."""
    import keras

    keras.config.set_dtype_policy(policy)
    model = MODELS[name].build()
    model.set_weights(initial(model.get_weights()))
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9) if name == "resnet" else keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)

    def compute_loss(labels: Any, logits: Any) -> Any:
        logits = keras.ops.cast(logits, "float32")
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    return model, optimizer, compute_loss


def _batch(name: str, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch and its labels."""
    random, case = np.random.default_rng(1), MODELS[name]
    (_, *shape), dtype = case.example
    x: np.ndarray
    if dtype == "float32":
        x = random.standard_normal((batch, *shape), "float32")
    else:
        x = random.integers(10000, size=(batch, *shape), dtype="int32")
    return x, random.integers(10, size=(batch, *case.labels[1:]), dtype="int32")


def _timed(step: Callable[[], Any], unread: Callable[[], Any], steps: int) -> Took:
    began = time.perf_counter()
    loss = float(step())
    first = time.perf_counter() - began
    float(step())
    began = time.perf_counter()
    for _ in range(steps):
        float(step())
    read = (time.perf_counter() - began) / steps
    float(unread())
    times = max(1, steps // UNREAD)
    began = time.perf_counter()
    for _ in range(times):
        float(unread())
    return Took(first, read, (time.perf_counter() - began) / times / UNREAD, loss)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each model and policy."""
    for policy in flags.policies:
        for name in flags.models:
            options = (name, policy, flags.batch, flags.steps, flags.platform)
            took: dict[str, list[Took]] = {OURS: [], THEIRS: []}
            for _ in range(flags.repeats):
                for who, train in ((OURS, ours), (THEIRS, theirs)):
                    took[who].append(in_fresh_process(train, *options))
            check = same("loss", {who: each[-1].loss for who, each in took.items()}, TOLERANCE)
            title = f"{MODELS[name].title}, {policy.removeprefix('mixed_')}, batch {flags.batch}"
            for what, field in (("step", "step"), ("step, loss not read", "unread"), ("first step", "first")):
                figures = {who: [1e3 * getattr(found, field) for found in each] for who, each in took.items()}
                yield Row("gpu", f"{title}: {what}", figures, replicas=1, check=check)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("repeats", "2", "1", "processes of each contender"),
        command.Option("models", ",".join(MODELS), "lstm", "models", command.choose_some(*MODELS)),
        command.Option("policies", ",".join(POLICIES), "float32", "dtype policies", command.choose_some(*POLICIES)),
        command.Option("batch", "64", "2", "the number of examples"),
        command.Option("steps", "40", "2", "steps for each figure of a step"),
        command.Option("platform", "gpu", "gpu", "where to run: gpu, or cpu to try it", str),
    )
