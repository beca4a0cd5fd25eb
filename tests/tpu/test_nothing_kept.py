"""What a step was traced with goes with its strategy: no graph and no object of this library stays behind."""

import contextlib
import gc
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.jobs import until

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.keras import replicate_model
from replica_engine.testing import no_leaked_threads

X = np.ones((8, 4), "float32")


def new_strategy():
    return TPUStrategy(xla.PjrtClusterResolver("cpu"), num_cores=2)


def gradient_of(call):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        return tape.gradient(y, x)

    def run():
        new_strategy().run(step, (tf.constant([1.0, 2.0]),))

    return run


def steps_with_text():
    strategy = new_strategy()
    dataset = tf.data.Dataset.from_tensor_slices((X, ["a"] * 8)).batch(2)

    def step(context, x, text):
        tf.distribute.get_replica_context().all_reduce("SUM", x)
        tf.strings.length(text)

    strategy.run_steps(step, iter(strategy.experimental_distribute_dataset(dataset)), 4)


def in_function():
    strategy = new_strategy()
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])
    run = tf.function(lambda x: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", x * v)))
    run(tf.constant([1.0, 2.0]))


def fit():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    replicate_model(model, strategy=new_strategy()).fit(X, X[:, :1], batch_size=4, verbose=0)


def on_threads(call):
    """The same in a `tf.function`, on replica threads."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        return tape.gradient(y, x)

    def run():
        strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        tf.function(lambda: strategy.run(step, args=(tf.constant([1.0, 2.0]),)))()

    return run


PROGRAMS = {
    "threads-sum": on_threads(lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x)),
    "threads-maximum": on_threads(lambda x: tf.distribute.get_replica_context().all_reduce("MAX", x)),
    "threads-gather": on_threads(lambda x: tf.distribute.get_replica_context().all_gather(x, 0)),
    "threads-custom_gradient": on_threads(tf.nn.silu),
    "sum": gradient_of(lambda x: xla.cross_replica_sum(x)),
    "maximum": gradient_of(lambda x: xla.all_reduce(x, "MAX")),
    "gather": gradient_of(lambda x: xla.all_gather(x)),
    "exchange": gradient_of(lambda x: xla.all_to_all(x, 0, 0)),
    "permutation": gradient_of(lambda x: xla.collective_permute(x, [(0, 1), (1, 0)])),
    "in_a_branch": gradient_of(lambda x: tf.cond(tf.size(x) > 1, lambda: xla.cross_replica_sum(x), lambda: x)),
    "custom_gradient": gradient_of(tf.nn.silu),
    "host_call": gradient_of(lambda x: xla.outside_compilation(tf.square, x)),
    "steps_with_text": steps_with_text,
    "in_function": in_function,
    "fit": fit,
}


def present():
    """How many graphs of functions there are, and objects of this library by class.

    TensorFlow knows the context of a trace by its id, so contexts stay.
    """
    for _ in range(3):  # some objects let go of others when they are collected
        gc.collect()
    kinds = map(type, gc.get_objects())
    found = Counter(kind for kind in kinds if kind.__name__ == "FuncGraph" or of_this_library(kind))
    return Counter({kind: found[kind] for kind in found if kind.__name__ != "_BodyContext"})


def of_this_library(kind):
    return str(kind.__module__).startswith("replica_engine")


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_stays_behind_when_a_strategy_is_gone(name):
    program = PROGRAMS[name]
    program()  # what is made once for all strategies
    before = present()
    with no_leaked_threads(grace=60.0, prefix="replica"):
        program()
    left = []

    def is_gone():  # the end of a dataset waits for a thread of TensorFlow that sleeps
        left[:] = present() - before
        return not left

    with contextlib.suppress(AssertionError):  # what is left says more
        until(is_gone)
    assert left == []
