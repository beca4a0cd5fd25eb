"""Replicas of several devices that take different branches."""

import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import LoweringError


@pytest.fixture(scope="module")
def two():
    return replica_engine.TPUStrategy(num_cores=4, cores_per_replica=2, distribution="fsdp", timeout=300)


def own(true, false):
    """A step in which replica 0 takes one branch, and replica 1 the other."""

    def step(x):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.cond(number == 0, lambda: true(x), lambda: false(x))

    return step


def test_each_takes_its_own(two):
    with two.scope():
        weight = tf.Variable(tf.ones([64, 64]))
    step = own(lambda x: tf.reduce_sum(x @ weight), lambda x: tf.reduce_max(x @ weight))
    found = two.run(step, args=(tf.ones([8, 64]),))
    assert [float(each) for each in two.experimental_local_results(found)] == [64.0 * 64 * 8, 64.0]


def test_branches_in_which_all_devices_would_wait_are_refused(two):
    rolled = own(lambda x: tf.reduce_sum(tf.roll(x, 1, 0) * tf.reverse(x, [0])), tf.reduce_sum)
    with pytest.raises(LoweringError, match=r"different branches.*test_branches\.py"):
        two.run(rolled, args=(tf.ones([8, 64]),))


def test_equal_conditions_are_not(two):
    def step(x):
        total = tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(x))
        return tf.cond(total > 0, lambda: tf.reduce_sum(tf.roll(x, 1, 0) * x), lambda: tf.reduce_sum(x))

    found = two.run(step, args=(tf.ones([8, 64]),))
    assert [float(each) for each in two.experimental_local_results(found)] == [512.0, 512.0]
