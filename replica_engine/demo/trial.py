"""One run of the demo: trains on N replicas, trains again on one device, and compares."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import tensorflow as tf

import replica_engine
from replica_engine import MirroredStrategy, logical_devices
from replica_engine.demo import custom_loop, keras_fit, picture
from replica_engine.demo.data import Digits, load_digits, steps_per_epoch
from replica_engine.demo.progress import Progress
from replica_engine.demo.report import TOLERANCE, compare

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
class TrialSettings:
    """The settings from the flags.

    Attributes:
        strategy: a key of `STRATEGIES`.
        loops: keys of `LOOPS`.
        replicas: the number of replicas.
        epochs: how many times to go through the training samples.
        batch_size: the number of samples in a global batch, split over the replicas.
        learning_rate: the step size.
        seed: the seed of the initial weights and of the order of the samples.
        picture: the file of the picture; None for no picture.
    """

    strategy: str
    loops: tuple[str, ...]
    replicas: int
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
    picture: str | None = None


def run(settings: TrialSettings, devices: list[str]) -> bool:
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
    failures, trained = [], []
    for loop in settings.loops:
        found, trainings = _run_loop(loop, settings, digits, devices)
        failures += [f"{loop}: {failure}" for failure in found]
        trained += trainings
    if settings.picture is not None:
        _draw(trained, settings, digits, devices)
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


def _run_loop(
    loop: str, settings: TrialSettings, digits: Digits, devices: list[str]
) -> tuple[list[str], list[picture.Trained]]:
    """Trains twice and prints a paragraph; returns the failures, and the two trainings for the picture."""
    title, train = LOOPS[loop]
    print(f"\n{title}", flush=True)

    strategy = STRATEGIES[settings.strategy](devices)
    label = _count(settings.replicas, "replica")
    if settings.strategy == "tpu":
        print(f"  compiling the step for {label}; the first epoch waits for it", file=sys.stderr, flush=True)
    weights, accuracy, progress = _train(train, strategy, settings, digits, label, epoch_lines=True)
    print(f"  test accuracy    {accuracy:.4f}", flush=True)

    # TensorFlow's own strategy for one device: the training to compare with runs no code of this library.
    reference = tf.distribute.OneDeviceStrategy(devices[0])
    one_weights, one_accuracy, one_progress = _train(train, reference, settings, digits, "one device")

    found = compare(strategy, weights, one_weights)
    verdict = "DIFFERENT" if found.differences else "bitwise equal"
    print(f"  replicas         {verdict}: {found.weights:,} weights on each of {found.replicas}, compared byte by byte")
    print(f"  one device       same training on {devices[0]} alone: test accuracy {one_accuracy:.4f}")
    print(
        f"  distance         {found.distance:.1e} between their weights at most, tolerance {TOLERANCE:.0e}", flush=True
    )
    both = [_trained(loop, 1, settings, one_progress)]
    if settings.replicas > 1:
        both.append(_trained(loop, settings.replicas, settings, progress))
    return found.failures(), both


def _train(
    train: Train,
    strategy: tf.distribute.Strategy,
    settings: TrialSettings,
    digits: Digits,
    label: str,
    *,
    epoch_lines: bool = False,
) -> tuple[list[tf.Variable], float, Progress]:
    steps = steps_per_epoch(digits, settings.batch_size)
    with Progress(label, epochs=settings.epochs, steps_per_epoch=steps, epoch_lines=epoch_lines) as progress:
        weights, accuracy = train(
            strategy,
            digits,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            seed=settings.seed,
            progress=progress,
        )
    return weights, accuracy, progress


def _trained(loop: str, replicas: int, settings: TrialSettings, progress: Progress) -> picture.Trained:
    rate = settings.batch_size / progress.seconds_a_step
    return picture.Trained(loop, replicas, tuple(progress.losses), rate)


def _draw(trained: list[picture.Trained], settings: TrialSettings, digits: Digits, devices: list[str]) -> None:
    """Measures the throughput of the numbers of replicas in between, and draws the picture."""
    if importlib.util.find_spec("matplotlib") is None:
        print('\nno picture: it needs matplotlib; install with: pip install "replica-engine[demo]"')
        return
    # Each number of replicas traces steps of its own, which TensorFlow would warn of.
    tf.get_logger().setLevel("ERROR")
    one_epoch = replace(settings, epochs=1)
    for count in (2**power for power in range(1, settings.replicas.bit_length())):
        if count < settings.replicas and settings.batch_size % count == 0:
            for loop in settings.loops:
                strategy = STRATEGIES[settings.strategy](devices[:count])
                *_, progress = _train(LOOPS[loop][1], strategy, one_epoch, digits, f"{count} replicas")
                trained.append(replace(_trained(loop, count, settings, progress), losses=()))
    assert settings.picture is not None
    try:
        picture.draw(sorted(trained, key=lambda each: each.replicas), settings.picture)
    except (OSError, ValueError) as error:
        print(f"\nno picture: could not draw {settings.picture}: {error}")
    else:
        print(f"\npicture   {settings.picture}: the loss by epoch, and the throughput by number of replicas")


def _print_setting(settings: TrialSettings, digits: Digits, devices: list[str]) -> None:
    train, test = len(digits.train_labels), len(digits.test_labels)
    steps, share = steps_per_epoch(digits, settings.batch_size), settings.batch_size // settings.replicas
    print(f"data      {train + test:,} handwritten digits of 8x8 pixels: {train:,} to train on, {test} to test on")
    where = devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
    print(f"replicas  {settings.replicas} on {where}, strategy {settings.strategy}")
    print(f"training  {_count(settings.epochs, 'epoch')} of {_count(steps, 'step')}", end=", ")
    print(f"a global batch of {settings.batch_size} each, {_count(share, 'sample')} a replica", flush=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
