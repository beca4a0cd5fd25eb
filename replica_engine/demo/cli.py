"""The flags of `python -m replica_engine demo`. TensorFlow is imported only if all flags are right."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable

from replica_engine.demo.quiet import quiet_start

STRATEGIES = ("mirrored", "tpu")
BATCH_SIZE = 64  # samples; rounded down to a multiple of the number of replicas
LOOPS = ("custom", "keras")
TEST_SAMPLES = 450  # 1,347 remain for training. Keras needs an evenly split first batch in tests too

DESCRIPTION = """\
Trains a classifier of handwritten digits on N replicas, trains it again on one device, and compares the two.

Prints the loss and accuracy of each epoch, the accuracy on test samples, whether the weights of all replicas are
bitwise equal, and the distance between these weights and those of one device. Draws a picture at the end.
The replicas run on GPUs if there are enough, and otherwise on logical CPU devices.
"""
EPILOG = """\
example:
  %(prog)s --strategy mirrored --replicas 4 --epochs 5

exit status:
  0    the weights of the replicas are bitwise equal, and close to those of one device
  1    they are not, or the demo failed
  2    a flag is invalid
  130  interrupted with Ctrl-C

Copy the two training loops into your program: replica_engine/demo/custom_loop.py, replica_engine/demo/keras_fit.py.
"""
# Import name to install name.
NEEDED = {"sklearn": "scikit-learn", "tqdm": "tqdm"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `demo` command to `python -m replica_engine`.

    Args:
        subparsers: the result of `ArgumentParser.add_subparsers`.
    """
    parser = subparsers.add_parser(
        "demo",
        help="train a model on N replicas and compare with one device",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="mirrored", help="how replicas run (default: %(default)s)")
    add(
        "--replicas",
        type=_whole(1, TEST_SAMPLES),
        default=4,
        metavar="N",
        help="number of replicas (default: %(default)s)",
    )
    add("--epochs", type=_whole(1), default=5, metavar="N", help="number of epochs (default: %(default)s)")
    add(
        "--batch-size",
        type=_whole(1, TEST_SAMPLES),
        metavar="N",
        help="samples in a global batch, a multiple of --replicas (default: 64, or the multiple below it)",
    )
    add("--loop", choices=("both", *LOOPS), default="both", help="which training loop to run (default: %(default)s)")
    add("--learning-rate", type=_positive, default=0.1, metavar="RATE", help="learning rate (default: %(default)s)")
    add(
        "--seed",
        type=_whole(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="seed for weights and sample order (default: %(default)s)",
    )
    add(
        "--picture",
        default="demo.png",
        metavar="FILE",
        help='file to draw the losses and the throughput to: .png, .svg or .pdf; "none" for no picture '
        "(default: %(default)s)",
    )
    parser.set_defaults(run=lambda flags: _run(parser, flags))


def _run(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> int:
    if flags.batch_size is None:
        flags.batch_size = max(BATCH_SIZE // flags.replicas, 1) * flags.replicas
    if flags.batch_size % flags.replicas:
        parser.error(
            f"--batch-size {flags.batch_size} does not split evenly over --replicas {flags.replicas}: "
            f"{max(flags.batch_size // flags.replicas, 1) * flags.replicas} would"
        )
    needed = {**NEEDED, "jax": "jax"} if flags.strategy == "tpu" else NEEDED
    missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        needs, extras = " and ".join(missing), "demo,xla" if "jax" in needed else "demo"
        print(f'{parser.prog}: needs {needs}; install with: pip install "replica-engine[{extras}]"', file=sys.stderr)
        return 1

    print("starting TensorFlow", file=sys.stderr)
    with quiet_start():
        from replica_engine.demo import trial

        devices = trial.choose_devices(flags.replicas)
    settings = trial.TrialSettings(
        strategy=flags.strategy,
        loops=LOOPS if flags.loop == "both" else (flags.loop,),
        replicas=flags.replicas,
        epochs=flags.epochs,
        batch_size=flags.batch_size,
        learning_rate=flags.learning_rate,
        seed=flags.seed,
        picture=None if flags.picture == "none" else flags.picture,
    )
    return 0 if trial.run(settings, devices) else 1


def _whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Makes a reader of whole numbers in a range, for argparse."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= number <= most:
            limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {limits}, got {number}")
        return number

    return read


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return number
