"""Nested `tf.function`s with merge calls: inlined in a graph, lifted around all replicas in eager mode."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index, locally, numbered, run, stepping, total


def together(x):
    return total(x)


@pytest.fixture
def check(mirrored, form):
    """`check(body, expected)`: each replica runs `body` on its number, 1.0 and 2.0."""

    def check(body, expected):
        assert run(mirrored, body, numbered(mirrored), form=form) == expected

    return check


def test_an_input_signature_converts_what_it_is_called_with(check):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float64)])
    def inner(rows, scale):
        assert rows.shape.as_list() == [None] or rows.shape.rank == 1
        return total(rows) * tf.cast(scale, tf.float32)

    check(lambda x: inner([x, 2.0], 3), [[9.0, 12.0]] * 2)


def test_what_the_input_signature_does_not_take_is_refused_as_by_tensorflow(mirrored, form):
    inner = tf.function(together, input_signature=[tf.TensorSpec([2], tf.float32)])
    with pytest.raises((TypeError, ValueError)):
        run(mirrored, lambda x: inner(tf.stack([x, x, x])), numbered(mirrored), form=form)
    assert run(mirrored, lambda x: inner(tf.stack([x, x])), numbered(mirrored), form=form) == [[3.0, 3.0]] * 2


def test_autograph_as_the_function_says(check):
    def converts(fn):
        return hasattr(fn, "ag_module")

    @tf.function
    def converted(x):
        if tf.reduce_sum(total(x)) > 2.5:
            x = total(x)
        return x

    @tf.function(autograph=False)
    def plain(x):
        assert converts(total) == converts(plain.python_function)
        return tf.cond(total(x) > 5.0, lambda: total(x), lambda: x)

    check(lambda x: plain(converted(x)), [6.0, 6.0])


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = None

    @tf.function
    def step(self, x, *, times=2.0):
        """Creates its variable on the first call."""
        if self.weight is None:
            self.weight = tf.Variable(times, name="weight")
        self.weight.assign_add(total(x))
        return {"x": self.weight * total(x), "none": None, "all": [x, (total(x, "MEAN"),)]}


def test_a_method_with_a_variable_of_its_first_call(mirrored, form):
    model = Model()
    step = stepping(mirrored, lambda x: model.step(x, times=4.0), form)
    for weight in (7.0, 10.0, 13.0):
        results = locally(mirrored, step(numbered(mirrored)))
        assert results == [{"x": 3 * weight, "none": None, "all": [x, (1.5,)]} for x in (1.0, 2.0)]
    assert len(model.weight.values) == 2


def test_functions_made_for_each_call(check):
    check(lambda x: tf.function(lambda y: total(y) + x)(2.0 * x), [7.0, 8.0])


def test_closures_and_partials(check):
    def body(x):
        offset = x * 10.0
        inner = tf.function(lambda y, factor: total(y) * factor + offset)
        return functools.partial(inner, factor=2.0)(x)

    check(body, [16.0, 26.0])


def test_several_levels(check):
    innermost = tf.function(together)

    @tf.function
    def outer(x):
        if total(x) > 0.0:
            x = tf.function(lambda x: innermost(x) + innermost(2.0 * x))(x) + innermost(x)
        return x

    check(lambda x: outer(x) + innermost(x), [15.0, 15.0])


def test_a_function_that_calls_itself(check):
    @tf.function
    def down(x, depth):
        return total(x) if depth == 0 else down(total(x), depth - 1)

    check(lambda x: down(x, 2), [12.0, 12.0])


def test_other_signatures(check):
    inner = tf.function(lambda x: total(tf.reduce_sum(x, keepdims=True)))
    check(lambda x: inner(x) + inner(tf.stack([x, x])) + tf.cast(inner(tf.cast(x, tf.int32)), tf.float32), [[12.0]] * 2)


def test_functions_without_merges_stay_functions(mirrored, form):
    calls = []

    @tf.function
    def alone(x):
        calls.append(index())
        return x * 2.0

    merged = tf.function(lambda x: total(alone(x)))
    step = stepping(mirrored, lambda x: alone(merged(x)), form)
    for _ in range(3):
        assert locally(mirrored, step(numbered(mirrored))) == [12.0, 12.0]
    assert len(calls) <= 4


def test_in_eager_mode_later_calls_run_no_python(mirrored):
    calls = []

    @tf.function
    def inner(x):
        calls.append(index())
        return total(x)

    for _ in range(4):
        assert run(mirrored, lambda x: inner(inner(x)), numbered(mirrored), form="eager") == [6.0, 6.0]
    assert sorted(calls[-2:]) == [0, 1]
    assert len(calls) == 3  # replica 0 attempts it


def test_functions_in_loops_and_conditions(mirrored):
    inner = tf.function(together)

    def body(x):
        for i in tf.range(3):
            if i > 0:
                x = inner(x)
        return x

    assert run(mirrored, body, numbered(mirrored)) == [6.0, 6.0]


def test_a_train_step_of_keras(mirrored, form):
    """A nested train step trains as on one device."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def trained(strategy, run):
        with strategy.scope():
            layer = keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(1))
            model = keras.Sequential([keras.Input((3,)), layer])
            optimizer = keras.optimizers.Adam(0.1)

        @tf.function
        def train(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2) / 8.0
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        for _ in range(3):
            run(train)
        return model.get_weights()

    def on_replicas(train):
        parts = mirrored.experimental_distribute_values_from_function(
            lambda context: tf.constant(np.split(x, 2)[context.replica_id_in_sync_group])
        )
        stepping(mirrored, lambda x: train(x), form)(parts)

    weights = trained(mirrored, on_replicas)
    expected = trained(tf.distribute.get_strategy(), lambda train: train.python_function(tf.constant(x)))
    for got, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)


def test_run_functions_eagerly(mirrored):
    inner = tf.function(together)
    tf.config.run_functions_eagerly(True)
    try:
        assert run(mirrored, lambda x: inner(x), numbered(mirrored), form="eager") == [3.0, 3.0]
    finally:
        tf.config.run_functions_eagerly(False)


def test_results_of_every_kind(check):
    @tf.function
    def inner(x):
        return total(x), 7, None, [tf.IndexedSlices(total(x[tf.newaxis]), tf.constant([0]))]

    def body(x):
        reduced, number, nothing, (slices,) = inner(x)
        assert nothing is None
        return reduced + tf.cast(number, tf.float32) + slices.values[0]

    check(body, [13.0, 13.0])


def test_the_context_taken_outside(check):
    def body(x):
        outer = context()
        inner = tf.function(lambda x: outer.all_reduce("SUM", x) + tf.cast(outer.replica_id_in_sync_group, tf.float32))
        return inner(x)

    check(body, [3.0, 4.0])


def test_second_order_in_eager_mode(mirrored):
    def value(x):
        return tf.sin(x) * total(x)

    def body(x, fn):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = fn(x)
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    expected, found = (
        run(mirrored, lambda x, fn=fn: body(x, fn), numbered(mirrored), form="eager")
        for fn in (value, tf.function(value))
    )
    np.testing.assert_allclose(found, expected, 1e-5)
