"""Sums over replicas of one value that all of them share: an error for tensors and variables, N times a number."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine.errors import ReplicaValueError

SUM = tf.VariableAggregation.SUM
NO_SUM = r"(?s)The sum over replicas of .* is not defined: it is one value for all replicas"


def _done(*_):
    """What a step returns that is run for what it does."""


def _merged(fn):
    return lambda _, x: tf.distribute.get_replica_context().merge_call(lambda strategy, x: fn(strategy, x), (x,))


def _in_a_branch(v, x):
    return tf.cond(x[0] > 0.0, lambda: _done(v.assign_add(x)), _done)


def _in_a_loop(v, x):
    def body(i):
        v.assign_add(x)
        return i + 1

    return tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])


def _in_a_function(v, x):
    @tf.function
    def inner(y):
        v.assign_add(y)

    inner(x)


class Held:
    """What a step uses that is not an argument of it."""

    def __init__(self, strategy):
        self.tensor = tf.constant([1.0, 2.0])
        self.large = tf.ones([300])
        self.plain = tf.Variable([1.0, 2.0])
        with strategy.scope():
            self.mirrored = tf.Variable([1.0, 2.0])
            self.total = tf.Variable([0.0, 0.0], aggregation=SUM)
            self.totals = tf.Variable(tf.zeros([300]), aggregation=SUM)


SHARED = {
    "assign_add": lambda held, x: held.total.assign_add(x),
    "assign_sub": lambda held, x: held.total.assign_sub(x),
    "assign": lambda held, x: held.total.assign(x),
    "of a structure": lambda held, x: held.total.assign_add({"x": [x]}["x"][0]),
    "from outside": lambda held, x: held.total.assign_add(held.tensor),
    "large, from outside": lambda held, x: held.totals.assign_add(held.large),
    "a mirrored variable": lambda held, x: held.total.assign_add(held.mirrored),
    "a plain variable": lambda held, x: held.total.assign_add(held.plain),
    "in a branch": lambda held, x: _in_a_branch(held.total, x),
    "in a loop": lambda held, x: _in_a_loop(held.total, x),
    "in a function": lambda held, x: _in_a_function(held.total, x),
    "reduce": _merged(lambda strategy, x: strategy.reduce("SUM", x, axis=None)),
    "reduce_to": _merged(lambda strategy, x: strategy.extended.reduce_to("SUM", x, x)),
    "batch_reduce_to": _merged(lambda strategy, x: strategy.extended.batch_reduce_to("SUM", [(x, x)])),
}


@pytest.mark.replicas(2)
@pytest.mark.parametrize("name", SHARED)
def test_a_tensor_that_all_replicas_share_has_no_sum(strategy, run, name):
    held = Held(strategy)
    with pytest.raises(ReplicaValueError, match=NO_SUM):
        run(lambda x: SHARED[name](held, x), (tf.constant([1.0, 2.0]),))
    assert held.total.numpy().tolist() == [0.0, 0.0]


OWN = {
    "computed": lambda total, x: total.assign_add(x + 0.0),
    "identity": lambda total, x: total.assign_add(tf.identity(x)),
    "made in the step": lambda total, x: total.assign_add(tf.constant([1.0, 2.0])),
    "computed, in a function": lambda total, x: _in_a_function(total, 1.0 * x),
    "an array": lambda total, x: total.assign_add(np.float32([1.0, 2.0])),
    "numbers": lambda total, x: total.assign_add([1.0, 2.0]),
}


@pytest.mark.replicas(2)
@pytest.mark.parametrize("name", OWN)
def test_what_each_replica_makes_of_it_is_added_up(strategy, run, name):
    with strategy.scope():
        total = tf.Variable([0.0, 0.0], aggregation=SUM)
    run(lambda x: _done(OWN[name](total, x)), (tf.constant([1.0, 2.0]),))
    assert total.numpy().tolist() == [2.0, 4.0]


@pytest.mark.replicas(2)
def test_python_numbers_and_arrays_count_once_for_each_replica(strategy, run):
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=SUM)
        count = tf.Variable(0, aggregation=SUM)
    for number in (1.0, np.float32(2.0), np.float32(0.5)):
        strategy.run(lambda x: _done(total.assign_add(x)), (number,))
    run(lambda x: _done(total.assign_add(x), count.assign_add(3)), (0.25,))
    assert (total.numpy(), count.numpy()) == (7.5, 6)


@pytest.mark.replicas(2)
def test_one_function_with_own_and_then_with_shared_tensors(strategy, per_replica):
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=SUM)

    def step(x, y):
        total.assign_add(x)
        return y

    own = per_replica(lambda i: 1.0 + i)
    for _ in range(3):
        strategy.run(step, (own, tf.constant(1.0)))
    one = tf.constant(1.0)
    for shared in (one, per_replica(lambda i: one)):
        with pytest.raises(ReplicaValueError, match=NO_SUM):
            strategy.run(step, (shared, tf.constant(1.0)))
        with pytest.raises(ReplicaValueError, match=NO_SUM):
            strategy.run(step, (shared, own))
    strategy.run(step, (1.0, own))
    strategy.run(step, (own, own))
    assert total.numpy() == 4 * 3.0 + 2.0


@pytest.mark.replicas(1)
def test_one_replica_shares_nothing(strategy, run):
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=SUM)
    run(lambda x: _done(total.assign_add(x)), (tf.constant(1.0),))
    assert total.numpy() == 1.0


@pytest.mark.replicas(1, 2)
@pytest.mark.parametrize("value", [[], {"a": [], "b": ()}], ids=str)
def test_nothing_is_reduced_to_nothing(run, local, n, value):
    def step():
        context = tf.distribute.get_replica_context()
        return [context.all_gather(value, 0), *(context.all_reduce(name, value) for name in ("SUM", "MEAN", "MAX"))]

    assert local(run(step)) == [[value] * 4] * n
