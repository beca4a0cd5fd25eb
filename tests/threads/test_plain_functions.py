"""The errors of functions in which no replicas of this library run are those of TensorFlow."""

import subprocess
import sys

import pytest

FAILS = """
import re
import sys
import traceback

import tensorflow as tf

if sys.argv[1] == "imported":
    import replica_engine.keras

    replica_engine.MirroredStrategy(["CPU:0"]).run(lambda: None)
    import keras

    with replica_engine.MirroredStrategy(["CPU:0"]).scope():
        keras.Variable(1.0)


def check(x):
    tf.debugging.assert_less(x, 2.0, message="too big!")
    return x


@tf.function
def runs(x):
    return check(x) + 1


@tf.function
def traces(x):
    return branches(x)


@tf.function
def branches(x):
    if tf.reduce_sum(x) > 0:
        x = tf.ones([2, 3]) @ tf.ones([2, 3])
    return x


@tf.function(autograph=False)
def creates(x):
    tf.Variable(1.0)
    return branches(tf.Variable([x]))


def fit(x):
    import keras

    class Checks(keras.layers.Layer):
        def call(self, x):
            return check(x)

    model = keras.Sequential([keras.Input((1,)), Checks(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(tf.fill([2, 1], x), tf.ones([2, 1]), verbose=0)


for function in (runs, traces, creates, fit):
    try:
        function(tf.constant(3.0))
    except Exception:
        text = traceback.format_exc()
        text = re.sub(r"__autograph_generated_file\\w+", "generated", text)
        text = re.sub(r"__inference_(\\w+)_\\d+|_\\d+(?=/|\\b)", r"\\1", text)  # numbers count what was made before
        print(f"{function.__name__ if function is fit else function.python_function.__name__} failed", text)
"""


def output(program, *options):
    return subprocess.run([sys.executable, program, *options], capture_output=True, text=True, check=True).stdout


@pytest.mark.full("two processes, and a minute")
def test_the_errors_of_plain_functions_are_the_same_with_and_without_this_library(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FAILS)
    alone = output(program, "alone")
    assert [line.split()[0] for line in alone.splitlines() if " failed " in line] == [
        "runs",
        "traces",
        "creates",
        "fit",
    ]
    assert output(program, "imported") == alone
