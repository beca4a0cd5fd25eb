"""Plain variables that several replicas add to, each something of its own: the graph of a step shows it."""

import logging

import pytest
import tensorflow as tf
from helpers.on_mirrored import index


@pytest.fixture
def warnings(caplog):
    """`warnings()`: the warnings that the library has logged."""
    with caplog.at_level(logging.WARNING, "replica_engine"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "replica_engine"]


@pytest.fixture
def total():
    return tf.Variable(0.0, name="total")


@pytest.fixture
def numbers(per_replica):
    return per_replica(lambda index: index + 2.0)


def plainly(total, x):
    total.assign_add(x)


def less(total, x):
    total.assign_sub(x)


def read_by_nobody(total, x):
    total.assign_add(x, read_value=False)
    return total.read_value()


def in_a_branch(total, x):
    return tf.cond(x > 0.0, lambda: total.assign_add(x) * 1.0, lambda: 0.0)


def in_a_loop(total, x):
    for _ in tf.range(2):
        total.assign_add(x)


def in_a_loop_of_all(total, x):
    for _ in tf.range(2):
        x += 0.0 * tf.distribute.get_replica_context().all_reduce("SUM", x)
        total.assign_add(x)


def in_a_function(total, x):
    @tf.function
    def inner():
        total.assign_add(x)

    inner()


@pytest.mark.parametrize(
    "add", [plainly, less, read_by_nobody, in_a_branch, in_a_loop, in_a_loop_of_all, in_a_function]
)
def test_of_each_a_warning_names_the_variable_and_the_line(strategy, warnings, total, numbers, add):
    def step(x):
        add(total, x)

    train = tf.function(lambda x: strategy.run(step, args=(x,)))
    for _ in range(2):
        train(numbers)
    (text,) = warnings()
    assert text.startswith("The plain variable 'total' is written by more than one replica at ")
    assert "test_shared_variables.py" in text


@pytest.mark.threads("a compiled body has no Python index of the replica")
def test_of_the_only_replica_that_adds_none_comes(strategy, warnings, total, numbers):
    def step(x):
        if index() == 1:
            total.assign_add(x)
            total.assign_add(x)

    tf.function(lambda x: strategy.run(step, args=(x,)))(numbers)
    assert warnings() == []
