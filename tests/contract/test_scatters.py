"""Scattered updates of a variable that takes the first replica's: every method, the same under both strategies."""

import pytest
import tensorflow as tf

pytestmark = pytest.mark.replicas(2)

METHODS = ("update", "add", "sub", "mul", "div", "min", "max")


@pytest.fixture
def first(strategy):
    """A variable of which replicas' updates are those of replica 0."""
    with strategy.scope():
        return tf.Variable([8.0, 8.0, 8.0], aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


def _alone(method, rows, indices):
    plain = tf.Variable([8.0, 8.0, 8.0])
    getattr(plain, f"scatter_{method}")(tf.IndexedSlices(tf.constant(rows), tf.constant(indices)))
    return plain.numpy().tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_rows_of_the_first_replica_are_scattered(run, first, per_replica, method):
    def step(rows, indices):
        getattr(first, f"scatter_{method}")(tf.IndexedSlices(rows, indices))

    run(step, (per_replica(lambda i: [4.0 + i, 16.0 + i]), per_replica(lambda i: [0 + i, 1 + i])))
    assert first.numpy().tolist() == _alone(method, [4.0, 16.0], [0, 1])


@pytest.mark.parametrize("method", ["add", "max"])
def test_rows_that_all_replicas_share(run, first, method):
    rows = tf.IndexedSlices(tf.constant([9.0]), tf.constant([2]), tf.constant([3]))
    run(lambda: getattr(first, f"scatter_{method}")(rows) is None)
    assert first.numpy().tolist() == _alone(method, [9.0], [2])


def test_the_rows_of_each_replica_in_a_merge_call(strategy, run, local, per_replica):
    def merged(strategy, rows):
        return sum(tf.convert_to_tensor(each) for each in strategy.experimental_local_results(rows))

    def step(x, indices):
        rows = tf.IndexedSlices(x, indices, tf.constant([3]))
        return tf.distribute.get_replica_context().merge_call(merged, (rows,))

    assert local(run(step, (per_replica(lambda i: [1.0 + i]), per_replica(lambda i: [2 * i])))) == [[1.0, 0.0, 2.0]] * 2
