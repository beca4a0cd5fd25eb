"""The demo, run as a newcomer runs it: `python -m replica_engine demo`; with its flags in the process of the tests."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy
from replica_engine.__main__ import main
from replica_engine.demo import cli, trial
from replica_engine.demo.data import load_digits, steps_per_epoch, training_batches
from replica_engine.demo.report import TOLERANCE, Comparison, compare, replica_differences

DEMO = [sys.executable, "-m", "replica_engine", "demo"]
# Logical CPU devices everywhere, TensorFlow's notes left for the demo to silence, and what conftest.py sets left out.
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"):
    ENVIRONMENT.pop(name, None)


@pytest.fixture
def demo(capsys, monkeypatch):
    """`demo(*flags)`: what it prints and what it prints as errors, when all is well."""

    def demo(*flags):
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")  # so that nothing is set for the tests that follow
        assert main(["demo", "--picture", "none", *flags]) == 0
        return capsys.readouterr()

    return demo


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


# What it prints.


@pytest.mark.full("it takes as long as `make demo`, and the tests below show the same on less data")
def test_with_the_default_flags(tmp_path):
    """Four replicas, five epochs, both loops: what `make demo` runs."""
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(DEMO, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "replicas  4 on CPU:0 to CPU:3, strategy mirrored" in done.stdout
    accuracies = numbers(r"\n  test accuracy +(\S+)", done.stdout)
    assert len(accuracies) == 2
    assert min(accuracies) > 0.95
    for epoch in range(1, 6):
        assert len(re.findall(rf"epoch {epoch}/5   loss \d+\.\d+   accuracy \d\.\d+\n", done.stdout)) == 2
    assert done.stdout.count("bitwise equal: ") == 2
    distances = numbers(r"distance +(\S+) between their weights at most, tolerance 1e-04", done.stdout)
    assert len(distances) == 2
    assert max(distances) < 1e-5
    assert re.search(r"\nall checks passed, \d+ s\n$", done.stdout)
    assert "\npicture   demo.png: the loss by epoch, and the throughput by number of replicas\n" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    # Neither TensorFlow's notes nor a progress bar: stderr is a pipe here.
    assert done.stderr == "starting TensorFlow\n"


@pytest.mark.parametrize("loop", ["keras", pytest.param("custom", marks=pytest.mark.full("as on threads below"))])
def test_on_compiled_replicas(demo, loop):
    out, err = demo("--strategy", "tpu", "--replicas", "2", "--epochs", "1", "--loop", loop)
    assert "replicas  2 on CPU:0 to CPU:1, strategy tpu" in out
    assert out.count("bitwise equal: ") == 1
    (distance,) = numbers(r"distance +(\S+) between their weights at most, tolerance 1e-04", out)
    assert distance < 1e-5
    assert "starting TensorFlow\n" in err
    assert err.count("  compiling the step for 2 replicas; the first epoch waits for it\n") == 1


def test_with_flags(demo):
    """With a picture that cannot be drawn, which is told in one line."""
    loop = ("--replicas", "2", "--epochs", "2", "--loop", "custom", "--batch-size", "128", "--seed", "7")
    out, _ = demo(*loop, "--picture", "nowhere/loss.png")
    assert "replicas  2 on CPU:0 to CPU:1, strategy mirrored" in out
    assert "2 epochs of 10 steps, a global batch of 128 each, 64 samples a replica" in out
    assert "custom_loop.py" in out
    assert "keras_fit.py" not in out
    assert "weights on each of 2" in out
    assert "no picture: could not draw nowhere/loss.png: [Errno 2] No such file or directory" in out


CTRL_C = """
import os, signal, sys, threading
from replica_engine.__main__ import main

ended = threading.Event()
write = sys.stdout.write


def interrupt():
    for _ in range(5):  # One that comes while TensorFlow's iterator goes, at the end of an epoch, Python ignores.
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(15)
    os._exit(1)


def interrupt_in_the_fourth_epoch(text):
    if "epoch   3/500" in text:
        threading.Thread(target=interrupt, daemon=True).start()
    return write(text)


sys.stdout.write = interrupt_in_the_fourth_epoch
main(["demo", "--epochs", "500", "--loop", "custom", "--replicas", "2"])
"""


def test_ctrl_c(programs):
    done = programs.run(CTRL_C)
    assert done.returncode == 130
    assert done.stderr.startswith("starting TensorFlow\n")
    assert done.stderr.endswith("\ninterrupted\n")
    assert "Traceback" not in done.stderr.partition("Exception ignored in")[0]
    assert "epoch 500/500" not in done.stdout


def test_an_error_that_ctrl_c_caused_is_ctrl_c():
    """TensorFlow raises one of its own if Ctrl-C comes while it enters a variable scope."""
    program = """
from replica_engine import __main__
from replica_engine.demo import cli

def interrupted(parser, flags):
    try:
        raise KeyboardInterrupt
    finally:
        raise RuntimeError("Improper nesting of variable_scope.")

cli._run = interrupted
__main__.main(["demo"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


# Flags.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "argument --replicas: must be from 1 to 450, got 0"),
        (["--replicas", "many"], "argument --replicas: 'many' is not a whole number"),
        (["--epochs", "-1"], "argument --epochs: must be at least 1, got -1"),
        (["--strategy", "unknown"], "argument --strategy: invalid choice: 'unknown'"),
        (["--loop", "unknown"], "argument --loop: invalid choice: 'unknown'"),
        (["--batch-size", "66"], "--batch-size 66 does not split evenly over --replicas 4: 64 would"),
        (["--batch-size", "3"], "--batch-size 3 does not split evenly over --replicas 4: 4 would"),
        (["--batch-size", "451"], "argument --batch-size: must be from 1 to 450, got 451"),
        (["--learning-rate", "nan"], "argument --learning-rate: must be positive, got nan"),
        (["--learning-rate", "fast"], "argument --learning-rate: 'fast' is not a number"),
        (["--seed", "-1"], "argument --seed: must be from 0 to 4294967295, got -1"),
        (["--replica", "2"], "unrecognized arguments: --replica 2"),
    ],
    ids=" ".join,
)
def test_a_wrong_flag_is_one_line(capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", *flags])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_flags_are_checked_before_tensorflow_is_imported():
    program = """
import sys
from replica_engine.__main__ import main
try:
    main(["demo", "--replicas", "3", "--batch-size", "64"])
finally:
    print("tensorflow" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "Traceback" not in done.stderr


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--help"])
    out, err = capsys.readouterr()
    assert (exit_.value.code, err) == (0, "")
    assert "example:\n  python -m replica_engine demo --strategy mirrored --replicas 4 --epochs 5" in out
    assert "(default: 64, or the multiple below it)" in out


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "demo      train a model on N replicas and compare with one device" in err


def test_a_missing_package_names_the_install_command(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["demo"]) == 1
    needs = 'needs scikit-learn and tqdm; install with: pip install "replica-engine[demo]"'
    assert capsys.readouterr().err == f"python -m replica_engine demo: {needs}\n"


def test_the_flags_know_what_there_is():
    """`cli` may not import what would import TensorFlow, so it repeats this."""
    assert tuple(trial.STRATEGIES) == cli.STRATEGIES
    assert tuple(trial.LOOPS) == cli.LOOPS
    assert len(load_digits().test_labels) == cli.TEST_SAMPLES


# Whether it would notice.


def test_one_different_bit_on_one_replica_is_a_difference():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = [tf.Variable([1.0, 2.0]), tf.Variable([0.0, 1.0, float("nan")], name="second")]
    assert replica_differences(strategy, variables) == []
    strategy.experimental_local_results(variables[1])[1].assign([-0.0, 1.0, float("nan")])
    (difference,) = replica_differences(strategy, variables)
    assert str(difference) == "weight 1 (second:0) on replica 1 differs from replica 0 in 1 elements"


@pytest.mark.parametrize("distance", [2 * TOLERANCE, float("nan"), float("inf")])
def test_weights_far_from_one_device_are_a_failure(distance):
    assert Comparison(replicas=2, weights=1, differences=(), distance=TOLERANCE).failures() == []
    (failure,) = Comparison(replicas=2, weights=1, differences=(), distance=distance).failures()
    assert f"{distance:.1e} from one device, more than the tolerance 1e-04" in failure


def test_the_distance_is_the_largest_difference():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    found = compare(strategy, variables, [tf.Variable([1.0, 2.25]), tf.Variable([3.125])])
    assert (found.distance, found.weights, found.replicas) == (0.25, 3, 2)


def test_a_failure_is_printed_and_is_the_exit_status(capsys, monkeypatch):
    def train(strategy, digits, **_):
        with strategy.scope():
            weight = tf.Variable([1.0, 2.0], name="weight")
        strategy.experimental_local_results(weight)[-1].assign([1.0, 3.0])
        return [weight], 0.5

    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")  # so that nothing is set for the tests that follow
    monkeypatch.setitem(trial.LOOPS, "custom", ("a broken loop", train))
    assert main(["demo", "--loop", "custom", "--replicas", "2", "--picture", "none"]) == 1
    out = capsys.readouterr().out
    assert "replicas         DIFFERENT: 2 weights on each of 2" in out
    assert "FAILED, custom: weight 0 (weight:0) on replica 1 differs from replica 0 in 1 elements\n" in out
    assert "FAILED, custom: weights are 1.0e+00 from one device" in out
    assert "passed" not in out


# The picture.


def test_the_picture_has_each_loss_and_the_throughput_by_number_of_replicas(demo, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(trial.picture, "draw", lambda trained, path: drawn.append((trained, path)))
    out, _ = demo("--replicas", "4", "--epochs", "2", "--loop", "custom", "--picture", "loss.svg")
    ((trained, path),) = drawn
    assert path == "loss.svg"
    assert [(each.replicas, len(each.losses)) for each in trained] == [(1, 2), (2, 0), (4, 2)]
    assert trained[0].losses == pytest.approx(trained[2].losses, abs=1e-4)
    assert min(each.rate for each in trained) > 0
    assert "picture   loss.svg" in out


# The data.


def test_every_epoch_has_an_order_of_its_own_and_every_opening_the_same():
    digits = load_digits()
    dataset = training_batches(digits, batch_size=64, epochs=2, seed=3)
    once, again = ([labels.numpy() for _, labels in dataset] for _ in range(2))
    assert np.array_equal(once, again)
    steps = steps_per_epoch(digits, 64)
    assert len(once) == 2 * steps
    assert not np.array_equal(once[:steps], once[steps:])
    other = [labels.numpy() for _, labels in training_batches(digits, batch_size=64, epochs=2, seed=4)]
    assert not np.array_equal(once, other)
