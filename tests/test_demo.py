"""The demo, run as `make demo` runs it; with its flags in the process of the tests."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from examples.demo import __main__ as demo
from examples.demo.data import TEST_SAMPLES, load_digits, steps_per_epoch, training_batches
from replica_engine import MirroredStrategy

ROOT = pathlib.Path(__file__).parents[1]


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


@pytest.mark.full("it takes as long as `make demo`, and the tests below show the same on less data")
def test_with_the_default_flags(tmp_path):
    """Four replicas, five epochs, both loops: what `make demo` runs."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "examples.demo"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "replicas  4 on CPU:0, CPU:1, CPU:2, CPU:3, strategy mirrored" in done.stdout
    accuracies = numbers(r"test accuracy +(\d\.\d+)", done.stdout)
    assert len(accuracies) == 2
    assert min(accuracies) > 0.95
    assert done.stdout.count("bitwise equal weights") == 2
    distances = numbers(r"one device +(\S+) away from its weights", done.stdout)
    assert len(distances) == 2
    assert max(distances) < 1e-5
    assert re.search(r"\nall checks passed, \d+ s\n$", done.stdout)
    assert "\npicture   demo.png: the loss by epoch, and the throughput by number of replicas\n" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_make_passes_its_variables_on():
    flags = ["REPLICAS=2", "EPOCHS=3", "STRATEGY=tpu", "PYTHON=true"]
    done = subprocess.run(["make", "--dry-run", "demo", *flags], capture_output=True, text=True, cwd=ROOT)
    assert "python -m examples.demo --strategy tpu --replicas 2 --epochs 3" in done.stdout, done.stderr


@pytest.mark.parametrize("loop", ["keras", pytest.param("custom", marks=pytest.mark.full("as on threads below"))])
def test_on_compiled_replicas(capsys, loop):
    flags = ("--strategy", "tpu", "--replicas", "2", "--epochs", "1", "--loop", loop, "--picture", "none")
    assert demo.main(flags) == 0
    out = capsys.readouterr().out
    assert "replicas  2 on CPU:0, CPU:1, strategy tpu" in out
    assert out.count("bitwise equal weights") == 1
    (distance,) = numbers(r"one device +(\S+) away from its weights", out)
    assert distance < 1e-5


def test_the_picture_has_each_loss_and_the_throughput_by_number_of_replicas(capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(demo, "draw", lambda trained, path: drawn.append((trained, path)))
    assert demo.main(("--replicas", "4", "--epochs", "2", "--loop", "custom", "--picture", "loss.svg")) == 0
    ((trained, path),) = drawn
    assert path == "loss.svg"
    assert [(each.replicas, len(each.losses)) for each in trained] == [(1, 2), (2, 0), (4, 2)]
    assert trained[0].losses == pytest.approx(trained[2].losses, abs=1e-4)
    assert min(each.rate for each in trained) > 0
    out = capsys.readouterr().out
    assert "custom_loop.py" in out
    assert "keras_fit.py" not in out
    assert "epoch 2/2 - loss: " in out
    assert "picture   loss.svg" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], f"--replicas must be from 1 to {TEST_SAMPLES}, got 0"),
        (["--epochs", "-1"], "--epochs must be at least 1, got -1"),
        (["--strategy", "unknown"], "argument --strategy: invalid choice: 'unknown'"),
    ],
    ids=" ".join,
)
def test_a_wrong_flag(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        demo.main(flags)
    assert message in capsys.readouterr().err


def test_a_failure_is_printed_and_is_the_exit_status(capsys, monkeypatch):
    """One bit of one replica: 0.0 and -0.0 are equal numbers, and nan is not equal to itself."""

    def train(strategy, digits, **_):
        with strategy.scope():
            weight = tf.Variable([0.0, 1.0], name="weight")
        replicas = strategy.experimental_local_results(weight)
        replicas[-1].assign([-0.0, 1.0] if len(replicas) > 1 else [0.0, 1.5])
        return [weight], {"loss": [1.0], "seconds": [1.0]}, 0.5

    monkeypatch.setitem(demo.LOOPS, "custom", train)
    assert demo.main(["--loop", "custom", "--replicas", "2", "--picture", "none"]) == 1
    out = capsys.readouterr().out
    assert "replicas       DIFFERENT weights" in out
    assert "FAILED, custom: weight 0 (weight:0) on replica 1 differs from replica 0\n" in out
    assert "FAILED, custom: the weights are 5.0e-01 away from those of one device\n" in out
    assert "passed" not in out


def test_weights_that_are_no_numbers_are_far_from_one_device():
    weights = [tf.Variable([1.0, float("nan")]), tf.Variable([2.0])]
    assert not demo.largest_distance(weights, [tf.Variable([1.0, 2.0]), tf.Variable([2.5])]) <= demo.TOLERANCE
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        copies = [tf.Variable([1.0, float("nan")])]
    assert demo.unequal_copies(strategy, copies) == []


def test_every_epoch_has_an_order_of_its_own_and_every_opening_the_same():
    digits = load_digits()
    dataset = training_batches(digits, batch_size=64, epochs=2)
    once, again = ([labels.numpy() for _, labels in dataset] for _ in range(2))
    assert np.array_equal(once, again)
    steps = steps_per_epoch(digits, 64)
    assert len(once) == 2 * steps
    assert not np.array_equal(once[:steps], once[steps:])
