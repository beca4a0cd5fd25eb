"""What a step was traced with goes with its strategy: no graph and no object of this library stays behind."""

import contextlib
import functools
import gc
import weakref
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.jobs import until
from helpers.on_two import gradient_of

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.keras import replicate_model
from replica_engine.testing import no_leaked_threads

X = np.ones((8, 4), "float32")


def new_strategy():
    return TPUStrategy(xla.PjrtClusterResolver("cpu"), num_cores=2)


def compiled(call):
    return lambda: new_strategy().run(gradient_of(call), (tf.constant([1.0, 2.0]),))


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
    step = gradient_of(call)

    def run():
        strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        tf.function(lambda: strategy.run(step, args=(tf.constant([1.0, 2.0]),)))()

    return run


PROGRAMS = {
    "threads-sum": on_threads(lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x)),
    "threads-maximum": on_threads(lambda x: tf.distribute.get_replica_context().all_reduce("MAX", x)),
    "threads-gather": on_threads(lambda x: tf.distribute.get_replica_context().all_gather(x, 0)),
    "threads-custom_gradient": on_threads(tf.nn.silu),
    "sum": compiled(lambda x: xla.cross_replica_sum(x)),
    "maximum": compiled(lambda x: xla.all_reduce(x, "MAX")),
    "gather": compiled(lambda x: xla.all_gather(x)),
    "exchange": compiled(lambda x: xla.all_to_all(x, 0, 0)),
    "permutation": compiled(lambda x: xla.collective_permute(x, [(0, 1), (1, 0)])),
    "in_a_branch": compiled(lambda x: tf.cond(tf.size(x) > 1, lambda: xla.cross_replica_sum(x), lambda: x)),
    "custom_gradient": compiled(tf.nn.silu),
    "host_call": compiled(lambda x: xla.outside_compilation(tf.square, x)),
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


class Model(tf.Module):
    def __init__(self):
        self.w = tf.Variable([1.0, 2.0])
        self.late = None

    def __call__(self, x):
        return tf.reduce_sum(self.w) * x

    def step(self, x):
        if self.late is None:
            self.late = tf.Variable(2.0)
        return self(x) * self.late

    @tf.function
    def compiled(self, x):
        return self(x)


def layer():
    return keras.layers.Dense(1)


def apply(model, x):
    return model(x)


def with_gradient(model, x):
    def step(x):
        with tf.GradientTape() as tape:
            loss = model(x)
        model.w.assign_sub(tape.gradient(loss, model.w))
        return loss

    return step, (x,)


def in_nested_functions(model, x):
    inner = lambda x: model(x)  # noqa: E731
    return lambda x: inner(x) + 1.0, (x,)


def with_a_host_call(model, x):
    return lambda x: model(x) + xla.outside_compilation(tf.square, x), (x,)


ONE, ROWS = tf.constant(1.0), tf.ones((2, 3))
CALLS = {  # what makes a model, and what `run` is called with
    "callable": (Model, lambda model: (model, (ONE,))),
    "bound_method": (Model, lambda model: (model.step, (ONE,))),
    "bound_function": (Model, lambda model: (model.compiled, (ONE,))),
    "function": (Model, lambda model: (tf.function(model), (ONE,))),
    "lambda": (Model, lambda model: (lambda x: model(x), (ONE,))),
    "default": (Model, lambda model: (lambda x, model=model: model(x), (ONE,))),
    "partial": (Model, lambda model: (functools.partial(apply, model), (ONE,))),
    "partial_of_method": (Model, lambda model: (functools.partial(model.step, ONE), ())),
    "argument": (Model, lambda model: (apply, (model, ONE))),
    "in_an_argument": (Model, lambda model: (lambda models, x: models["a"](x), ({"a": model}, ONE))),
    "keyword": (Model, lambda model: (apply, (), {"model": model, "x": ONE})),
    "variable": (Model, lambda model: (lambda v: v * 2.0, (model.w,))),
    "with_gradient": (Model, lambda model: with_gradient(model, ONE)),
    "in_nested_functions": (Model, lambda model: in_nested_functions(model, ONE)),
    "with_a_host_call": (Model, lambda model: with_a_host_call(model, ONE)),
    "keras": (layer, lambda model: (model, (ROWS,))),
    "keras_in_a_lambda": (layer, lambda model: (lambda x: model(x), (ROWS,))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_that_the_program_has_dropped_does_not_stay(name):
    make, call = CALLS[name]
    strategy = new_strategy()
    models, used = [], []
    for _ in range(3):
        with strategy.scope():
            model = make()
        strategy.run(*call(model))
        before = xla.counts()
        strategy.run(*call(model))
        if name != "function":  # a new one in each call
            assert (xla.counts() - before).traces == 0  # the trace is found as long as the model is there
        models.append(weakref.ref(model))
        del model
        gc.collect()
        assert [each() for each in models] == [None] * len(models)
        strategy.run(lambda: tf.constant(1.0))  # what has died goes with the next call
        used.append(present())
    left = {kind.__name__: count for kind, count in (used[2] - used[0]).items()}
    left.pop("LaunchRecord", None)  # of the last launches
    assert left == {}


def test_what_has_died_is_not_found_for_a_new_object_at_its_place():
    strategy = new_strategy()
    found = []
    for factor in range(40):  # CPython gives a new object the address of one that has just gone
        with strategy.scope():
            model = Model()
        model.factor = float(factor)
        result = strategy.run(lambda x, model=model: x * model.factor, (ONE,))
        found.append(float(strategy.experimental_local_results(result)[1]))
        del model, result
    assert found == list(map(float, range(40)))
