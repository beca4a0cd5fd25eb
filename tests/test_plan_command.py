"""`replica-engine plan`: a script whose steps are planned and not run."""

import pytest

from replica_engine.__main__ import main

pytest.importorskip("jax")

OWN_LOOP = """
import sys
import tensorflow as tf
import replica_engine

strategy = replica_engine.TPUStrategy(num_cores=2)
with strategy.scope():
    first, second = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 8]))


def critic(x):
    first.assign_sub(tf.distribute.get_replica_context().all_reduce("SUM", first @ x))
    return tf.reduce_sum(first)


def maker(x):
    second.assign_add(x)


@tf.function
def both(x):
    return strategy.reduce("SUM", strategy.run(critic, (x,)), axis=None)


print("arguments", sys.argv)
for _ in range(1000):
    print("loss", float(both(tf.ones([8, 8]))), float(first[0, 0]))
    strategy.run(maker, (tf.ones([8, 8]),))
print("this is too far")
"""

FIT = """
import keras
import numpy as np
import replica_engine

with replica_engine.TPUStrategy(num_cores=2).scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])
x, y = np.ones([64, 4], "float32"), np.ones([64, 3], "float32")
model.evaluate(x, y, batch_size=8, verbose=0)
print("evaluated")
try:
    model.fit(x, y, batch_size=8, verbose=0)
finally:
    print("this is too far")
"""

NONE = """
import tensorflow as tf
import replica_engine

print(replica_engine.MirroredStrategy(["CPU:0"]).run(lambda: 1))
"""

TOO_LARGE = """
import tensorflow as tf
import replica_engine

strategy = replica_engine.TPUStrategy(num_cores=1)
tiled = lambda x: tf.tile(x[:, None, None], [1, 2048, 2048])
strategy.run(lambda x: tf.reduce_sum(tf.sort(tiled(x), axis=0)[0]), (tf.ones([40_000]),))
"""

WITH_HOST_CALLS = """
import tensorflow as tf
import replica_engine

strategy = replica_engine.TPUStrategy(num_cores=2)
strategy.run(lambda: tf.print("this is not printed"))
print("this is too far")
"""


FAILS = """
import tensorflow as tf
import replica_engine

strategy = replica_engine.TPUStrategy(num_cores=2)


def check(loss):
    raise OSError(f"{loss} is too small")


check(float(strategy.reduce("SUM", strategy.run(lambda: tf.ones([])), axis=None)))
"""


@pytest.fixture
def planned(programs, tmp_path):
    """`planned(script, *flags)`: how the command ended, in a process that has TensorFlow already."""

    def planned(script, *flags):
        file = tmp_path / "train.py"
        file.write_text(script)
        command = ["plan", *flags, str(file), "--epochs", "3"]
        return programs.run(f"import sys; from replica_engine.__main__ import main; sys.exit(main({command}))")

    return planned


def test_the_steps_of_a_loop(planned, tmp_path):
    done = planned(OWN_LOOP)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert lines == [
        f"arguments ['{tmp_path}/train.py', '--epochs', '3']",
        "critic: 2 replicas on CPU, each device:",
        "loss 0.0 1.0",  # steps return zero, and variables keep their values
        "maker: 2 replicas on CPU, each device:",
        "planned 2 steps; nothing was trained",
    ]
    assert "all-reduce              1 of 256 bytes in all" in done.stdout


def test_more_launches_go_further(planned):
    done = planned(OWN_LOOP, "--launches", "3")
    assert done.stdout.count("loss 0.0 1.0") == 3
    assert "planned 2 steps" in done.stdout


def test_fit_ends_after_its_first_step_and_evaluate_does_not(planned):
    done = planned(FIT)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if line and not line.startswith(" ")] == [
        "test_step",
        "evaluated",
        "train_step",
        "planned 2 steps; nothing was trained",
    ]


def test_a_step_that_does_not_fit(planned):
    done = planned(TOO_LARGE)
    assert done.returncode == 1
    assert "DOES NOT FIT" in done.stdout


def test_a_step_that_calls_the_host_ends_the_script(planned):
    done = planned(WITH_HOST_CALLS)
    assert done.returncode == 0, done.stderr
    assert "planned 1 step;" in done.stdout
    assert "this is" not in done.stdout + done.stderr


def test_a_script_that_fails_shows_its_own_frames(planned, tmp_path):
    done = planned(FAILS)
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("Traceback") :].splitlines()
    frames = [line for line in error if line.startswith("  File")]
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["<module>", "check"]
    assert all(str(tmp_path) in frame for frame in frames)
    assert "OSError: 0.0 is too small" in error
    assert "so its 1 compiled steps so far returned zeros" in error[-1]


def test_a_script_without_compiled_steps(planned):
    done = planned(NONE)
    assert done.returncode == 1
    assert "ran no compiled step" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--topology", "v5e:3x3", __file__], "No such topology: 'v5e:3x3'"),
        (["--launches", "0", __file__], "--launches must be at least 1, got 0"),
        (["nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_wrong_flags(capsys, flags, says):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *flags])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_script_that_exits(planned):
    done = planned(TOO_LARGE + "raise SystemExit(0)\n")
    assert done.returncode == 1
    assert "planned 1 step;" in done.stdout
    assert planned("raise SystemExit(3)\n").returncode == 3


def test_an_error_of_a_script_says_that_its_steps_return_zeros(planned):
    done = planned(OWN_LOOP.replace('print("loss"', 'assert float(both(tf.ones([8, 8]))) > 0\n    print("loss"'))
    assert "AssertionError" in done.stderr
    assert "1 compiled steps so far returned zeros" in done.stderr


def test_flags_after_the_script_are_the_scripts(planned, tmp_path):
    done = planned("import sys; print(sys.argv[1:])", "--launches", "2")
    assert "stands after" not in done.stderr
    late = planned("import sys; print(sys.argv[1:])", str(tmp_path / "train.py"), "--topology")
    assert "--topology stands after the script" in late.stderr
