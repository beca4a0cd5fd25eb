"""One run of the demo: trains on N replicas, trains again on one device, and compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

import replica_engine
from replica_engine import MirroredStrategy
from replica_engine.demo import custom_loop, keras_fit
from replica_engine.demo.data import Digits, load_digits, steps_per_epoch
from replica_engine.demo.progress import Progress
from replica_engine.demo.report import TOLERANCE, compare
from replica_engine.testing import logical_devices

Train = Callable[..., tuple[list[tf.Variable], float]]

STRATEGIES: dict[str, Callable[[list[str]], tf.distribute.Strategy]] = {
    "mirrored": MirroredStrategy,
    "tpu": lambda devices: replica_engine.TPUStrategy(num_cores=len(devices)),  # imports jax only if chosen
}
LOOPS: dict[str, tuple[str, Train]] = {
    "custom": ("custom training loop (replica_engine/demo/custom_loop.py)", custom_loop.train),
    "keras": ("Keras fit (replica_engine/demo/keras_fit.py)", keras_fit.train),
}


@dataclass(frozen=True)
class Settings:
    """The settings from the flags.

    Attributes:
        strategy: a key of `STRATEGIES`.
        loops: keys of `LOOPS`.
        replicas: the number of replicas.
        epochs: how many times to go through the training samples.
        batch_size: the number of samples in a global batch, split over the replicas.
        learning_rate: the step size.
        seed: the seed of the initial weights and of the order of the samples.
    """

    strategy: str
    loops: tuple[str, ...]
    replicas: int
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


def run(settings: Settings, devices: list[str]) -> bool:
    """Runs the demo and prints the results.

    Args:
        settings: the settings from the flags.
        devices: one device per replica; the training on one device uses the first.

    Returns:
        Whether, in every loop, the replicas ended bitwise equal and near the training on one device.
    """
    started = time.monotonic()
    digits = load_digits()
    _print_setting(settings, digits, devices)
    failures = []
    for loop in settings.loops:
        failures += [f"{loop}: {failure}" for failure in _run_loop(loop, settings, digits, devices)]
    for failure in failures:
        print(f"FAILED, {failure}")
    if not failures:
        print(f"all checks passed, {time.monotonic() - started:.0f} s")
    return not failures


def choose_devices(replicas: int) -> list[str]:
    """Chooses one GPU per replica if there are enough; otherwise logical devices of one CPU."""
    if len(tf.config.list_physical_devices("GPU")) < replicas:
        return logical_devices(replicas, "CPU")
    # By default GPUs round float32 factors to 10 bits, and each kernel rounds differently. Full precision makes N
    # replicas and one device comparable.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return logical_devices(replicas, "GPU")


def _run_loop(loop: str, settings: Settings, digits: Digits, devices: list[str]) -> list[str]:
    """Trains twice and prints a paragraph; returns the failures."""
    title, train = LOOPS[loop]
    print(f"\n{title}", flush=True)

    strategy = STRATEGIES[settings.strategy](devices)
    label = _count(settings.replicas, "replica")
    weights, accuracy = _train(train, strategy, settings, digits, label, epoch_lines=True)
    print(f"  test accuracy    {accuracy:.4f}", flush=True)

    # TensorFlow's own strategy for one device: the training to compare with runs no code of this library.
    reference = tf.distribute.OneDeviceStrategy(devices[0])
    one_weights, one_accuracy = _train(train, reference, settings, digits, "one device", epoch_lines=False)

    found = compare(strategy, weights, one_weights)
    verdict = "DIFFERENT" if found.differences else "bitwise equal"
    print(f"  replicas         {verdict}: {found.weights:,} weights on each of {found.replicas}, compared byte by byte")
    print(f"  one device       same training on {devices[0]} alone: test accuracy {one_accuracy:.4f}")
    print(
        f"  distance         {found.distance:.1e} between their weights at most, tolerance {TOLERANCE:.0e}", flush=True
    )
    return found.failures()


def _train(
    train: Train, strategy: tf.distribute.Strategy, settings: Settings, digits: Digits, label: str, *, epoch_lines: bool
) -> tuple[list[tf.Variable], float]:
    steps = steps_per_epoch(digits, settings.batch_size)
    with Progress(label, epochs=settings.epochs, steps_per_epoch=steps, epoch_lines=epoch_lines) as progress:
        return train(
            strategy,
            digits,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            seed=settings.seed,
            progress=progress,
        )


def _print_setting(settings: Settings, digits: Digits, devices: list[str]) -> None:
    train, test = len(digits.train_labels), len(digits.test_labels)
    steps, share = steps_per_epoch(digits, settings.batch_size), settings.batch_size // settings.replicas
    print(f"data      {train + test:,} handwritten digits of 8x8 pixels: {train:,} to train on, {test} to test on")
    where = devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
    print(f"replicas  {settings.replicas} on {where}, strategy {settings.strategy}")
    print(f"training  {_count(settings.epochs, 'epoch')} of {_count(steps, 'step')}", end=", ")
    print(f"a global batch of {settings.batch_size} each, {_count(share, 'sample')} a replica", flush=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
