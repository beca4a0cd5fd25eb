"""`accumulate`: a replica computes its batch in several parts, and reduces once."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import BatchError, ReplicaValueError

ROWS = np.random.default_rng(0).normal(size=(52, 3)).astype("float32")
SUMS = ROWS.sum(axis=1, keepdims=True)


def model_of(*layers):
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])


def gradients_of(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables), {"loss": loss, "none": None}


@pytest.mark.replicas(2)
def test_the_gradient_of_the_parts_is_that_of_the_batch(strategy, run, per_replica):
    """Thirteen rows on each replica, in 4 parts of 4, 4, 4 and 1 rows. One all-reduce for all."""
    check_gradient(strategy, run, per_replica, 4, {4, 1})


@pytest.mark.replicas(2)
@pytest.mark.parametrize(("steps", "parts"), [(1, {13}), (3, {5, 3})])
def test_any_number_of_parts(strategy, per_replica, steps, parts):
    check_gradient(strategy, strategy.run, per_replica, steps, parts)


def check_gradient(strategy, run, per_replica, steps, parts):
    n = strategy.num_replicas_in_sync
    sizes = []
    with strategy.scope():
        model, seen = model_of(keras.layers.Dense(4, activation="tanh")), keras.metrics.Sum()

    def part(x, y):
        sizes.append(x.shape[0])
        seen.update_state(tf.ones([len(x)]))
        return gradients_of(model, x, y)

    def step(x, y):
        grads, logs = replica_engine.accumulate(part, (x, y), steps=steps)
        assert logs["none"] is None
        grads, loss = tf.distribute.get_replica_context().all_reduce("MEAN", (grads, logs["loss"]))
        for weight, grad in zip(model.trainable_variables, grads, strict=True):
            weight.assign_sub(0.1 * grad)
        return loss

    x, y = (per_replica(lambda replica, rows=rows: rows[13 * replica :][:13]) for rows in (ROWS, SUMS))
    alone = model_of(keras.layers.Dense(4, activation="tanh"))
    alone.set_weights(model.get_weights())
    losses = strategy.experimental_local_results(run(step, args=(x, y)))
    grads, logs = gradients_of(alone, ROWS[: 13 * n], SUMS[: 13 * n])
    for loss in losses:
        np.testing.assert_allclose(loss.numpy(), logs["loss"].numpy(), rtol=1e-5)
    for weight, other, grad in zip(model.trainable_variables, alone.trainable_variables, grads, strict=True):
        first, *others = [each.numpy() for each in strategy.experimental_local_results(weight.value)]
        np.testing.assert_allclose(first, other.numpy() - 0.1 * grad.numpy(), rtol=1e-5, atol=1e-6)
        assert all(one.tobytes() == first.tobytes() for one in others)
    assert set(sizes) == parts
    assert seen.result().numpy() == 13 * n


@pytest.mark.graphs
@pytest.mark.parametrize(("rows", "expected"), [(12, [4, 4, 4]), (13, [5, 5, 3]), (2, [1, 1])])
def test_a_graph_for_any_number_of_rows(strategy, rows, expected):
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        return strategy.run(lambda x: replica_engine.accumulate(mean_and_size, (x,), 3), args=(x,))

    def mean_and_size(x):
        return tf.reduce_mean(x, 0), tf.cast(tf.shape(x)[0], tf.float32)

    for mean, size in zip(*map(strategy.experimental_local_results, step(ROWS[:rows])), strict=True):
        np.testing.assert_allclose(mean.numpy(), ROWS[:rows].mean(0), rtol=1e-5, atol=1e-6)
        assert size.numpy() == pytest.approx(sum(each**2 for each in expected) / rows)


@pytest.mark.replicas(2)
def test_sums_of_rows_with_weights(strategy, local):
    """What `split_batch` makes of 5 rows: two replicas with 3, of which one is a copy that counts 0."""
    (x, y), weights = replica_engine.split_batch(strategy, (ROWS[:5], SUMS[:5]))
    with strategy.scope():
        weight = tf.Variable([[0.1], [0.2], [0.3]])

    def part(x, y, weights):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ weight - y)[:, 0] ** 2 * weights)
        return tape.gradient(loss, weight), tf.shape(x)[0]

    def step(x, y, weights):
        grad, rows = replica_engine.accumulate(part, (x, y, weights), 2, reduction="sum")
        return tf.distribute.get_replica_context().all_reduce("SUM", grad), rows

    grads, rows = strategy.run(step, args=(x, y, weights))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((ROWS[:5] @ weight - SUMS[:5]) ** 2)
    expected = tape.gradient(loss, weight)
    for grad in strategy.experimental_local_results(grads):
        np.testing.assert_allclose(grad.numpy(), expected.numpy(), rtol=1e-5)
    assert local(rows) == [3, 3]


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_layers_with_state_and_rows_of_a_table(strategy, local):
    """Dropout draws other numbers for each part; moving statistics move once a part; rows of a table become dense."""
    with strategy.scope():
        table = tf.Variable(tf.ones([4, 2]))
        normal, dropout = keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.5, seed=1)
        normal.build((None, 2))

    def part(words):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, words)
            loss = tf.reduce_sum(normal(rows, training=True) + rows) / 2
        return tape.gradient(loss, table), dropout(tf.ones([64]), training=True)

    @tf.function
    def step(words):
        return strategy.run(lambda words: replica_engine.accumulate(part, (words,), 2), args=(words,))

    grads, dropped = step(tf.constant([0, 1, 1, 3]))
    for grad, values in zip(local(grads), local(dropped), strict=True):
        np.testing.assert_allclose(np.array(grad)[:, 0], [0.25, 0.5, 0.0, 0.25], atol=1e-5)
        assert set(values) == {0.0, 1.0, 2.0}  # dropped in both parts, in one, in none
    for moving in strategy.experimental_local_results(normal.moving_mean.value):
        np.testing.assert_allclose(moving.numpy(), [0.75, 0.75], rtol=1e-5)


def test_without_a_strategy():
    found = replica_engine.accumulate(lambda x, rate: tf.reduce_mean(x) * rate, (tf.range(5.0), 2.0), steps=3)
    assert float(found) == pytest.approx(4.0)


@pytest.mark.parametrize("unused", [{0}, {1}, {2}, {0, 1}, {1, 2}])
@pytest.mark.parametrize(("reduction", "counts"), [("sum", 1.0), ("mean", 0.4)])
def test_a_gradient_that_some_parts_do_not_have(unused, reduction, counts):
    """Five rows in parts of 2, 2 and 1. A part without the gradient counts as zero."""
    weight, calls = tf.Variable(2.0), itertools.count()

    def gradient(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x) if next(calls) in unused else tf.reduce_sum(x * weight)
        return tape.gradient(loss, weight), None

    x = tf.constant([1.0, 2.0, 4.0, 8.0, 16.0])
    found, nothing = replica_engine.accumulate(gradient, (x,), 3, reduction)
    weights = [counts, counts, counts / 2 if reduction == "mean" else counts]
    of_parts = [part * each for part, each in zip((3, 12, 16), weights, strict=True)]
    expected = sum(each for index, each in enumerate(of_parts) if index not in unused)
    assert float(found) == pytest.approx(expected)
    assert nothing is None


@pytest.mark.parametrize("signature", [[5], [None]])
def test_a_gradient_that_later_parts_of_a_graph_do_not_have(signature):
    weight, parts = tf.Variable(2.0), []

    def gradient(x):
        parts.append(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * weight) if len(parts) == 1 else tf.reduce_sum(x)
        return tape.gradient(loss, weight)

    @tf.function(input_signature=[tf.TensorSpec(signature)])
    def step(x):
        parts.clear()
        return replica_engine.accumulate(gradient, (x,), 3, "sum")

    assert float(step(tf.constant([1.0, 2.0, 4.0, 8.0, 16.0]))) == 3.0


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, None, "2"])
def test_a_number_of_parts_that_is_none(steps):
    with pytest.raises(ReplicaValueError, match="steps, the number of parts"):
        replica_engine.accumulate(tf.reduce_mean, (tf.ones([4]),), steps)


def test_misuse_is_an_error():
    with pytest.raises(ReplicaValueError, match='"mean" or "sum"'):
        replica_engine.accumulate(tf.reduce_mean, (tf.ones([4]),), 2, reduction="max")
    with pytest.raises(ReplicaValueError, match="only floating numbers are averaged"):
        replica_engine.accumulate(tf.size, (tf.ones([4]),), 2)
    with pytest.raises(ReplicaValueError, match="must be a list or tuple"):
        replica_engine.accumulate(tf.reduce_mean, tf.ones([4]), 2)
    with pytest.raises(ReplicaValueError, match="takes a function"):
        replica_engine.accumulate(None, (tf.ones([4]),), 2)
    for form in (lambda call: call, tf.function):
        with pytest.raises(BatchError, match="same number of samples"):
            form(lambda: replica_engine.accumulate(lambda x, y: x, (tf.ones([4]), tf.ones([3])), 2))()
        with pytest.raises(BatchError, match="no array with samples"):
            form(lambda: replica_engine.accumulate(tf.reduce_mean, (1.0,), 2))()
