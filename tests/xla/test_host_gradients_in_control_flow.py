"""Gradients through host work in loops, branches and functions, and between replicas that meet."""

import pytest
import tensorflow as tf
from helpers.host_work import cubes, example, first_order, gradients, same_without, second_order

from replica_engine import xla


@first_order
def a_loop_over_a_range(call, x):
    y = x
    for i in tf.range(3):
        y = call(lambda y, i: tf.sin(y) * x + tf.cast(i, x.dtype), y, i)
    return y


@first_order
def a_loop_that_ends_early(call, x):
    more = lambda y: tf.reduce_sum(y) < 20.0  # noqa: E731
    return tf.while_loop(more, lambda y: (call(lambda y: y * 1.5 + x, y),), (x,), maximum_iterations=10)[0]


@first_order
def nested_loops(call, x):
    y = x
    for _ in tf.range(2):
        for _ in tf.range(2):
            y = call(lambda y: tf.sin(y) * x, y)
        y = call(lambda y: y**2, y)
    return y


@second_order
def second_order_in_a_loop(call, x):
    y = x
    for _ in tf.range(2):
        y = call(lambda x, y: tf.sin(y) * x, x, y)
    return y


def a_gradient_in_a_loop(call, x):
    for _ in tf.range(3):
        x = x - 0.1 * gradients(lambda x: call(cubes, x), x)[0]
    return x


@second_order
def second_order_in_a_branch(call, x):
    """Replicas take different ones."""
    first = tf.equal(xla.replica_id(), 0)
    return tf.cond(first, lambda: call(cubes, x) * x, lambda: call(lambda x: 5.0 * x, x) ** 2)


def a_gradient_in_a_branch(call, x):
    return tf.cond(x[0] > 0.0, lambda: gradients(lambda x: call(cubes, x), x)[0], lambda: x)


@first_order
def a_branch_in_a_loop(call, x):
    y = x
    for i in tf.range(4):
        if tf.equal(i % 2, xla.replica_id()):
            y = call(lambda y: tf.sin(y) * x, y)
    return y


@second_order
def nested_functions(call, x):
    inner = tf.function(lambda x: call(cubes, x) * x)
    return tf.function(lambda x: inner(x) + inner(2.0 * x))(x)


def a_gradient_in_a_function(call, x):
    first = tf.function(lambda x: gradients(lambda x: call(cubes, x), x)[0])
    return gradients(lambda x: first(x) * first(2.0 * x), x)


@second_order
def second_order_of_a_sum_over_replicas(call, x):
    return call(tf.sin, xla.cross_replica_sum(call(cubes, x))) * x


@first_order
def sums_over_replicas_in_a_loop(call, x):
    y = x
    for _ in tf.range(3):
        y = xla.all_reduce(call(lambda y: tf.sin(y) * x, y), "MEAN")
    return y


def computed_again(call, x):
    return gradients(tf.recompute_grad(lambda x: call(cubes, x) * x), x)


def gradients_of_the_graph(call, x):
    y = call(cubes, x) * x
    return tf.gradients(tf.gradients(y, x)[0], x)


OF_ONE_REPLICA = [
    *(a_loop_over_a_range, a_loop_that_ends_early, nested_loops, second_order_in_a_loop, a_gradient_in_a_loop),
    *(a_gradient_in_a_branch, nested_functions, a_gradient_in_a_function, computed_again),
]
OF_REPLICAS = [second_order_in_a_branch, a_branch_in_a_loop, sums_over_replicas_in_a_loop, gradients_of_the_graph]


@pytest.mark.parametrize("body", OF_ONE_REPLICA)
def test_gradients_are_those_without_it(body):
    same_without(body)


@pytest.mark.parametrize("body", OF_REPLICAS)
def test_gradients_are_those_of_the_same_program_without_it(body):
    same_without(body, eager=False)


def test_they_are_so_on_four_replicas_that_meet():
    same_without(second_order_of_a_sum_over_replicas, example(4), eager=False)
