"""Trains a classifier of handwritten digits on N replicas, trains it again on one device, and compares the two.

In a clone, `make demo` installs what it needs and runs it; so does

    pip install -e ".[tensorflow,demo,xla]"
    python -m examples.demo [--strategy mirrored|tpu] [--replicas 4] [--epochs 5] [--loop custom|keras] [--picture FILE]

It prints the loss and accuracy of each epoch, the accuracy on test samples, whether the weights of all replicas are
bitwise equal, and the distance between them and the weights of one device. It draws a picture at the end. The replicas
run on GPUs if there are enough, and otherwise on logical CPU devices. The exit status is 1 if the replicas are not
equal, or far from one device.

`custom_loop.py` and `keras_fit.py` are the two training loops, to copy into your program.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import replica_engine
from examples.demo import custom_loop, keras_fit
from examples.demo.data import TEST_SAMPLES, Digits, load_digits, steps_per_epoch
from examples.demo.picture import Trained, draw

LOOPS = {"custom": custom_loop.train, "keras": keras_fit.train}
STRATEGIES: dict[str, Callable[[list[str]], tf.distribute.Strategy]] = {
    "mirrored": replica_engine.MirroredStrategy,
    "tpu": lambda devices: replica_engine.TPUStrategy(num_cores=len(devices)),
}
BATCH_SIZE = 64  # rounded down to a multiple of the number of replicas

# N replicas add the same numbers as one device, but in another order, so float32 sums differ in the last bits: with the
# default flags the weights differ by less than 1e-6. Leaving one sample out of every batch moves them by 3e-2.
TOLERANCE = 1e-4


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and compares as the flags say; returns the exit status."""
    flags = _flags(argv)
    started = time.monotonic()
    digits, devices = load_digits(), choose_devices(flags.replicas)
    batch_size = max(BATCH_SIZE // flags.replicas, 1) * flags.replicas
    print(f"data      {len(digits.train_labels):,} handwritten digits of 8x8 pixels, {TEST_SAMPLES} more to test on")
    print(f"replicas  {flags.replicas} on {', '.join(devices)}, strategy {flags.strategy}")
    print(f"training  epochs: {flags.epochs}, steps in each: {steps_per_epoch(digits, batch_size)}", end="")
    print(f", global batch: {batch_size} samples, on each replica: {batch_size // flags.replicas}", flush=True)

    failures: list[str] = []
    trained: list[Trained] = []
    for loop in LOOPS if flags.loop == "both" else (flags.loop,):
        train = LOOPS[loop]
        print(f"\n{loop} loop (examples/demo/{train.__module__.rpartition('.')[2]}.py)", flush=True)
        strategy = STRATEGIES[flags.strategy](devices)
        weights, history, accuracy = train(strategy, digits, epochs=flags.epochs, batch_size=batch_size, verbose=True)
        # TensorFlow's own strategy for one device: the training to compare with runs no code of this library.
        one_device = tf.distribute.OneDeviceStrategy(devices[0])
        alone, alone_history, alone_accuracy = train(
            one_device, digits, epochs=flags.epochs, batch_size=batch_size, verbose=False
        )
        differences = unequal_copies(strategy, weights)
        distance = largest_distance(weights, alone)
        print(f"  test accuracy  {accuracy:.4f}, on {devices[0]} alone {alone_accuracy:.4f}")
        print(f"  replicas       {'DIFFERENT' if differences else 'bitwise equal'} weights, compared byte by byte")
        print(f"  one device     {distance:.1e} away from its weights at most, tolerance {TOLERANCE:.0e}", flush=True)
        failures += [f"{loop}: {difference}" for difference in differences]
        if not distance <= TOLERANCE:  # not `>`: a distance of nan is a failure too
            failures.append(f"{loop}: the weights are {distance:.1e} away from those of one device")
        trained.append(_trained(loop, 1, alone_history, batch_size))
        if flags.replicas > 1:
            trained.append(_trained(loop, flags.replicas, history, batch_size))

    if flags.picture != "none":
        trained += _in_between(flags, trained, digits, devices, batch_size)
        draw(sorted(trained, key=lambda each: each.replicas), flags.picture)
        print(f"\npicture   {flags.picture}: the loss by epoch, and the throughput by number of replicas")
    for failure in failures:
        print(f"FAILED, {failure}")
    if not failures:
        print(f"all checks passed, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def choose_devices(replicas: int) -> list[str]:
    """Chooses one GPU per replica if there are enough; otherwise logical devices of one CPU."""
    if len(tf.config.list_physical_devices("GPU")) < replicas:
        return replica_engine.logical_devices(replicas, "CPU")
    # By default GPUs round float32 factors to 10 bits, and each kernel rounds differently. Full precision makes N
    # replicas and one device comparable.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return replica_engine.logical_devices(replicas, "GPU")


def unequal_copies(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> list[str]:
    """Compares the bytes of every replica's copy of every variable with those of replica 0; says which differ."""
    found = []
    for index, variable in enumerate(variables):
        first, *others = [copy.numpy().tobytes() for copy in strategy.experimental_local_results(variable)]
        for replica, other in enumerate(others, start=1):
            if other != first:
                found.append(f"weight {index} ({variable.name}) on replica {replica} differs from replica 0")
    return found


def largest_distance(some: Sequence[tf.Variable], others: Sequence[tf.Variable]) -> float:
    """The largest absolute difference between two lists of variables; nan if any contains nan."""
    distances = [np.max(np.abs(one.numpy() - other.numpy())) for one, other in zip(some, others, strict=True)]
    return float(np.max(distances))


def _in_between(
    flags: argparse.Namespace, trained: list[Trained], digits: Digits, devices: list[str], batch_size: int
) -> list[Trained]:
    """Measures the throughput on 2, 4, 8 ... replicas below the number that was trained on, for the picture."""
    tf.get_logger().setLevel("ERROR")  # TensorFlow would warn that each number of replicas traces its own steps
    found = []
    for count in (2**power for power in range(1, flags.replicas.bit_length())):
        for loop in dict.fromkeys(each.loop for each in trained):
            if count < flags.replicas and batch_size % count == 0:
                strategy = STRATEGIES[flags.strategy](devices[:count])
                _, history, _ = LOOPS[loop](strategy, digits, epochs=1, batch_size=batch_size, verbose=False)
                found.append(_trained(loop, count, {**history, "loss": []}, batch_size))
    return found


def _trained(loop: str, replicas: int, history: dict[str, list[float]], batch_size: int) -> Trained:
    return Trained(loop, replicas, history["loss"], batch_size / statistics.median(history["seconds"]))


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--strategy", choices=tuple(STRATEGIES), default="mirrored", help="how replicas run (default: %(default)s)")
    add("--replicas", type=int, default=4, metavar="N", help="number of replicas (default: %(default)s)")
    add("--epochs", type=int, default=5, metavar="N", help="number of epochs (default: %(default)s)")
    add("--loop", choices=("both", *LOOPS), default="both", help="which training loop to run (default: %(default)s)")
    add("--picture", default="demo.png", metavar="FILE", help='a .png, .svg or .pdf; "none" for no picture')
    flags = parser.parse_args(argv)
    if not 1 <= flags.replicas <= TEST_SAMPLES:  # Keras needs a first batch that divides evenly in tests too
        parser.error(f"--replicas must be from 1 to {TEST_SAMPLES}, got {flags.replicas}")
    if flags.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {flags.epochs}")
    return flags


if __name__ == "__main__":
    sys.exit(main())
