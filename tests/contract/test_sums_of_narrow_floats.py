"""Sums of float16 and bfloat16 over replicas are added in float32 and rounded once: in any order, on any backend.

Added one after the other, 2048 + 1 + 1 + 1 stays 2048 in float16, and 1 + 1 + 1 + 2048 is 2052.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import context

LARGE = {"float16": 2048.0, "bfloat16": 256.0}
ORDERS = [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1, 0)]  # 0 stands for the large number


def own(dtype, order, like=(3,)):
    """This replica's number of an order, in a tensor of some shape."""
    numbers = tf.constant([each or LARGE[dtype] for each in order], dtype)
    return tf.fill(like, numbers[context().replica_id_in_sync_group])


def rounded(dtype, order, op, count):
    """The right value: the sum or mean in float64, rounded once."""
    numbers = [each or LARGE[dtype] for each in order][:count]
    return float(tf.cast(tf.constant(sum(numbers) / (count if op == "MEAN" else 1), tf.float64), dtype))


def check(strategy, result, expected):
    found = [tf.cast(each, tf.float32).numpy().ravel() for each in strategy.experimental_local_results(result)]
    for each in found:
        np.testing.assert_array_equal(each, np.full_like(each, expected))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", LARGE)
def test_all_reduces(strategy, n, run, dtype, op):
    shapes = [(), (3,), (2, 40_000)]

    results = run(lambda: [context().all_reduce(op, own(dtype, order, like)) for order in ORDERS for like in shapes])
    count = n
    for index, result in enumerate(results):
        check(strategy, result, rounded(dtype, ORDERS[index // len(shapes)], op, count))


@pytest.mark.parametrize("dtype", LARGE)
def test_many_values_at_once_as_of_gradients(strategy, n, run, dtype):
    """Small tensors of a graph travel in packs."""
    count = n
    results = run(lambda: context().all_reduce("MEAN", [own(dtype, ORDERS[0])] * 20))
    for result in results:
        check(strategy, result, rounded(dtype, ORDERS[0], "MEAN", count))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", LARGE)
def test_reductions_outside_replicas(strategy, n, run, dtype, op):
    expected = rounded(dtype, ORDERS[0], op, n)
    values = run(lambda: own(dtype, ORDERS[0]))
    kind = tf.distribute.ReduceOp[op]
    check(strategy, strategy.reduce(kind, values, axis=None), expected)
    check(strategy, strategy.extended.reduce_to(kind, values, "CPU:0"), expected)
    for each in strategy.extended.batch_reduce_to(kind, [(values, "CPU:0"), (values, "CPU:0")]):
        check(strategy, each, expected)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", LARGE)
def test_variables_with_aggregation(strategy, n, run, dtype, op):
    """Those that are written together, and those that are read as a sum."""
    expected = rounded(dtype, ORDERS[0], op, n)
    aggregation = tf.VariableAggregation[op]
    with strategy.scope():
        together = tf.Variable(tf.zeros([3], dtype), aggregation=aggregation)
        apart = tf.Variable(
            tf.zeros([3], dtype), synchronization=tf.VariableSynchronization.ON_READ, aggregation=aggregation
        )

    def fn():
        together.assign(own(dtype, ORDERS[0]))
        apart.assign(own(dtype, ORDERS[0]))

    run(fn)
    check(strategy, together, expected)
    np.testing.assert_array_equal(tf.cast(apart.read_value(), tf.float32), [expected] * 3)


@pytest.mark.parametrize("dtype", LARGE)
def test_a_mean_does_not_overflow_and_has_a_gradient(strategy, run, dtype):
    largest = {"float16": 60000.0, "bfloat16": 2.0**125}[dtype]  # bfloat16 has the range of float32

    def fn():
        x = tf.fill([2], tf.constant(largest, dtype))
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = context().all_reduce("MEAN", x)
        return mean, tape.gradient(mean, x)

    mean, gradient = run(fn)
    check(strategy, mean, largest)
    check(strategy, gradient, 1.0)


def test_the_gradients_of_a_keras_optimizer(strategy, n, run):
    """A weight of float16 and a loss whose gradient is another number on each replica."""
    with strategy.scope():
        weight = keras.Variable(np.zeros(3), dtype="float16")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def fn():
        gradient = own("float16", ORDERS[0])
        optimizer.apply([gradient], [weight])
        return weight.value.read_value() if hasattr(weight.value, "read_value") else tf.identity(weight.value)

    check(strategy, run(fn), -rounded("float16", ORDERS[0], "SUM", n))
