"""A variable that is updated outside replicas with a value of several replicas: each replica's gets its own."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.replicas(2)

AGGREGATIONS = [
    tf.VariableAggregation.NONE,
    tf.VariableAggregation.SUM,
    tf.VariableAggregation.MEAN,
    tf.VariableAggregation.ONLY_FIRST_REPLICA,
]


def read(strategy, local, weight):
    return local(strategy.run(lambda: tf.identity(weight)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_an_assignment_gives_each_replica_its_own_value(strategy, per_replica, local, aggregation, method):
    with strategy.scope():
        weight = tf.Variable(1.0, aggregation=aggregation)
    getattr(weight, method)(per_replica(lambda i: 2.0 + i))
    expected = {"assign": [2.0, 3.0], "assign_add": [3.0, 4.0], "assign_sub": [-1.0, -2.0]}[method]
    assert read(strategy, local, weight) == expected
    assert weight.numpy() == expected[0]


def test_the_next_update_begins_with_the_value_of_each(strategy, per_replica, local):
    with strategy.scope():
        weight = tf.Variable([1.0, 1.0])
    weight.assign_add(per_replica(lambda i: [1.0 + i, 0.0]))
    weight.assign_add(per_replica(lambda i: [10.0 * i, 1.0]))
    assert read(strategy, local, weight) == [[2.0, 2.0], [13.0, 2.0]]
    weight.assign([0.0, 0.0])
    assert read(strategy, local, weight) == [[0.0, 0.0]] * 2


def test_an_update_gets_the_arguments_of_each(strategy, per_replica, local):
    with strategy.scope():
        weight = tf.Variable(1.0)

    def scaled(variable, factor, offset):
        return variable.assign(variable * factor + offset)

    strategy.extended.update(weight, scaled, args=(per_replica(lambda i: 2.0 + i),), kwargs={"offset": 1.0})
    assert read(strategy, local, weight) == [3.0, 4.0]


def test_one_value_that_every_replica_computed_is_assigned_in_a_function(strategy, local):
    with strategy.scope():
        weight = tf.Variable(0.0)

    @tf.function
    def step(x):
        mean = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("MEAN", x))
        weight.assign(mean)

    for value in (3.0, np.nan):
        step(tf.constant(value))
        np.testing.assert_equal(read(strategy, local, weight), [value, value])


def test_values_that_differ_are_not_taken_from_replica_0_in_a_function(strategy, per_replica, local):
    with strategy.scope():
        weight = tf.Variable(0.0)
    values = per_replica(float)
    step = tf.function(lambda: weight.assign(values) is None)
    if type(strategy).__name__ == "TPUStrategy":  # in a graph, the host has one variable for all
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"differ between the replicas.*strategy\.reduce"):
            step()
        assert read(strategy, local, weight) == [0.0, 0.0]
    else:
        step()
        assert read(strategy, local, weight) == [0.0, 1.0]


def test_an_update_in_a_merge_call_gets_the_own_value_of_each(strategy, per_replica, local):
    with strategy.scope():
        weight = tf.Variable(0.0)
    values = per_replica(lambda i: 2.0 + i)

    def merged(strategy, one):
        strategy.extended.update(weight, lambda variable, value: variable.assign(value), args=(values,))
        return one

    def step():
        tf.distribute.get_replica_context().merge_call(merged, args=(tf.constant(1.0),))
        return weight.read_value()

    assert local(strategy.run(step)) == [2.0, 3.0]


@pytest.mark.parametrize(("aggregation", "expected"), [("SUM", 5.0), ("MEAN", 2.5), ("ONLY_FIRST_REPLICA", 2.0)])
def test_a_replica_assigns_its_own_value_of_one_from_outside(strategy, per_replica, local, aggregation, expected):
    with strategy.scope():
        weight = tf.Variable(0.0, aggregation=tf.VariableAggregation[aggregation])
    values = per_replica(lambda i: 2.0 + i)
    strategy.run(lambda: weight.assign(values))
    assert read(strategy, local, weight) == [expected] * 2


@pytest.mark.parametrize("wrapped", [lambda fn: fn, tf.function], ids=["eager", "in-function"])
def test_another_variable_that_the_update_changes(strategy, per_replica, local, wrapped):
    """Such as the slot of an optimizer: each replica's slot sees the replica's own values only."""
    with strategy.scope():
        weight, slot = tf.Variable(0.0), tf.Variable(1.0)

    @wrapped
    def next_slot(gradient):
        slot.assign(slot * 0.5 + gradient)
        return slot * 1.0

    def momentum(variable, gradient):
        variable.assign_sub(next_slot(gradient))

    for _ in range(2):
        strategy.extended.update(weight, momentum, args=(per_replica(lambda i: 10.0 * i),))
    slots = [(0.5 + 10.0 * i, 0.25 + 15.0 * i) for i in range(strategy.num_replicas_in_sync)]
    assert local(strategy.run(lambda: slot * 1.0)) == [second for _, second in slots]
    assert local(strategy.run(lambda: weight * 1.0)) == [-first - second for first, second in slots]


def test_an_update_that_fails_changes_no_other_replica(strategy, per_replica, local):
    with strategy.scope():
        weight, slot = tf.Variable(0.0), tf.Variable(0.0)

    def add(variable, value):
        slot.assign_add(value)
        if float(value) == 1.0:
            raise ValueError("not this one")
        variable.assign_add(value)

    with pytest.raises(ValueError, match="not this one"):
        strategy.extended.update(weight, add, args=(per_replica(lambda i: 2.0 - i),))
    others = [0.0] * (strategy.num_replicas_in_sync - 2)
    assert local(strategy.run(lambda: slot * 1.0)) == [2.0, 1.0, *others]
    assert local(strategy.run(lambda: weight * 1.0)) == [2.0, 0.0, *others]
