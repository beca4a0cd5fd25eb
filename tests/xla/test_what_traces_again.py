"""What may change between two calls, and whether the function is traced again then.

As in a `tf.function`, what a function finds behind an object that it uses is read while it is traced. What it uses by
itself (globals, cells, defaults) counts, and so does the state of the caller that the program depends on.
"""

import contextlib
import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.keras import replicate_model

ONE, TWO = tf.constant(1.0), tf.constant([1.0, 2.0])
SCALE = 2.0
CASES = {}


def case(again, compiles=None):
    """Adds a case: a function of a strategy and of pytest's `monkeypatch` and `tmp_path`.

    It yields a function and its argument, or a call, and changes something. It may yield what is called then.

    Args:
        again: whether the second call traces.
        compiles: whether it compiles; None if it does so where it traces.
    """

    def add(make):
        CASES[make.__name__] = make, again, again if compiles is None else compiles
        return make

    return add


class Holder:
    def __init__(self, scale=2.0):
        self.scale = scale

    def step(self, x):
        return x * self.scale


def scaled(x):
    return x * SCALE


@case(again=True)
def a_global(strategy, monkeypatch, tmp_path):
    yield scaled, ONE
    monkeypatch.setitem(globals(), "SCALE", 3.0)


@case(again=True)
def a_function_that_is_a_global(strategy, monkeypatch, tmp_path):
    body = lambda x: scaled(x)  # noqa: E731
    yield body, ONE
    monkeypatch.setitem(globals(), "scaled", lambda x: x + 5.0)


@case(again=True)
def a_cell(strategy, monkeypatch, tmp_path):
    scale = 2.0
    body = lambda x: x * scale  # noqa: E731
    yield body, ONE
    scale = 3.0


@case(again=True)
def a_cell_of_a_function_that_it_calls(strategy, monkeypatch, tmp_path):
    scale = 2.0
    inner = lambda x: x * scale  # noqa: E731
    body = lambda x: inner(x) + 1.0  # noqa: E731
    yield body, ONE
    scale = 3.0


@case(again=True)
def an_item_of_a_list(strategy, monkeypatch, tmp_path):
    scales = [2.0]
    body = lambda x: x * scales[0]  # noqa: E731
    yield body, ONE
    scales[0] = 3.0


@case(again=True)
def a_default_argument(strategy, monkeypatch, tmp_path):
    def body(x, scale=2.0):
        return x * scale

    yield body, ONE
    body.__defaults__ = (3.0,)


@case(again=True)
def a_keyword_default(strategy, monkeypatch, tmp_path):
    def body(x, *, scale=2.0):
        return x * scale

    yield body, ONE
    body.__kwdefaults__["scale"] = 3.0


@case(again=True)
def an_attribute_of_the_function(strategy, monkeypatch, tmp_path):
    body = lambda x: x * body.scale  # noqa: E731
    body.scale = 2.0
    yield body, ONE
    body.scale = 3.0


@case(again=True)
def the_code(strategy, monkeypatch, tmp_path):
    def body(x):
        return x * 2.0

    yield body, ONE
    body.__code__ = (lambda x: x * 3.0).__code__


@case(again=False)
def an_attribute_of_an_object(strategy, monkeypatch, tmp_path):
    holder = Holder()
    body = lambda x: x * holder.scale  # noqa: E731
    yield body, ONE
    holder.scale = 3.0


@case(again=False)
def an_attribute_of_the_object_of_a_method(strategy, monkeypatch, tmp_path):
    holder = Holder()
    yield holder.step, ONE
    holder.scale = 3.0


@case(again=True)
def an_object_at_the_same_address(strategy, monkeypatch, tmp_path):
    holder = Holder()
    body = lambda x: x * holder.scale  # noqa: E731
    yield body, ONE
    address = id(holder)
    holder = None
    gc.collect()
    others = []
    while id(made := Holder(3.0)) != address and len(others) < 100_000:  # usually the first
        others.append(made)
    holder = made


@case(again=True, compiles=False)
def another_variable(strategy, monkeypatch, tmp_path):
    with strategy.scope():
        weight = tf.Variable(1.0)
    body = lambda x: x * weight  # noqa: E731
    yield body, ONE
    with strategy.scope():
        weight = tf.Variable(2.0)


@case(again=False)
def the_value_of_a_variable(strategy, monkeypatch, tmp_path):
    with strategy.scope():
        weight = tf.Variable(1.0)
    body = lambda x: x * weight  # noqa: E731
    yield body, ONE
    weight.assign(2.0)


def layer_of(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(2)
        layer.build([1, 2])
    return layer, lambda: strategy.run(lambda: layer(TWO[None]))


@case(again=False)
def whether_a_layer_is_trainable(strategy, monkeypatch, tmp_path):
    layer, call = layer_of(strategy)
    yield call
    layer.trainable = False


@case(again=False)
def the_dtype_policy(strategy, monkeypatch, tmp_path):
    _, call = layer_of(strategy)
    before = keras.config.dtype_policy()
    yield call
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        yield call
    finally:
        keras.config.set_dtype_policy(before)


@case(again=False)
def the_seed(strategy, monkeypatch, tmp_path):
    tf.random.set_seed(1)
    body = lambda: tf.random.uniform([2])  # noqa: E731
    yield lambda: strategy.run(body)
    tf.random.set_seed(2)


@case(again=False)
def the_scope(strategy, monkeypatch, tmp_path):
    yield scaled, ONE
    with strategy.scope():
        yield scaled, ONE


@case(again=False)
def a_tape(strategy, monkeypatch, tmp_path):
    yield scaled, ONE
    with tf.GradientTape():
        yield scaled, ONE


@case(again=True)
def a_summary_writer(strategy, monkeypatch, tmp_path):
    yield scaled, ONE
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1):
        yield scaled, ONE


def summarized(x):
    tf.summary.scalar("x", x)
    return x * 2.0


@case(again=False)
def another_writer_and_step(strategy, monkeypatch, tmp_path):
    with tf.summary.create_file_writer(str(tmp_path / "one")).as_default(step=1):
        yield summarized, ONE
    with tf.summary.create_file_writer(str(tmp_path / "other")).as_default(step=2):
        yield summarized, ONE


@case(again=True)
def whether_summaries_are_recorded(strategy, monkeypatch, tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1):
        yield summarized, ONE
        with tf.summary.record_if(False):
            yield summarized, ONE


@case(again=True, compiles=False)
def soft_placement(strategy, monkeypatch, tmp_path):
    yield scaled, ONE
    tf.config.set_soft_device_placement(False)
    try:
        yield scaled, ONE
    finally:
        tf.config.set_soft_device_placement(True)


@case(again=False)
def the_rewrites_for_cpu(strategy, monkeypatch, tmp_path):
    yield scaled, ONE
    xla.set_cpu_rewrites(False)


@case(again=False)
def values_of_each_replica(strategy, monkeypatch, tmp_path):
    yield scaled, ONE
    each = strategy.experimental_distribute_values_from_function(lambda _: ONE + 1.0)
    yield scaled, each


@case(again=True)
def what_only_a_reduced_trace_serves(strategy, monkeypatch, tmp_path):
    body = tf.function(lambda x: x * 2.0, reduce_retracing=True)
    yield body, tf.ones([2])
    yield body, tf.ones([3])


@case(again=False)
def what_only_a_host_function_uses(strategy, monkeypatch, tmp_path):
    added, seen = 1.0, []

    @xla.returns(None)
    def note(x):
        nonlocal added
        added = float(x)
        seen.append(added)

    def body(x):
        xla.outside_compilation(note, x)
        return x + 1.0

    yield body, ONE
    added = 5.0
    yield body, ONE
    assert seen == [1.0] * 8  # two replicas, four calls


def model_of(strategy):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    replicated = replicate_model(model, strategy=strategy)
    return replicated, lambda: replicated.train_on_batch(x, y)


@case(again=False)
def the_rate_of_a_model(strategy, monkeypatch, tmp_path):
    model, call = model_of(strategy)
    yield call
    model.optimizer.learning_rate = 0.5


@case(again=True)
def a_model_that_is_compiled_again(strategy, monkeypatch, tmp_path):
    model, call = model_of(strategy)
    yield call
    model.layers[0].trainable = False
    model.compile("sgd", "mae")


def made(call):
    """Whether a call traced, and whether it compiled."""
    before = xla.counts()
    call()
    used = xla.counts() - before
    return [used.traces > 0, used.compiles > 0]


@pytest.mark.parametrize("name", CASES)
def test_a_change_between_two_calls(two, name, monkeypatch, tmp_path):
    make, *expected = CASES[name]
    with contextlib.closing(make(two, monkeypatch, tmp_path)) as calls:
        given = None
        for first in ([True, True], expected):
            given = next(calls, given)
            call = functools.partial(two.run, given[0], given[1:]) if isinstance(given, tuple) else given
            assert made(call) == first
            assert made(call) == [False, False]
        assert next(calls, None) is None
