"""`check_replicas_equal`: whether the copies of variables are bitwise equal."""

import keras
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.testing import check_replicas_equal

MAKERS = {
    "threads": lambda: replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]),
    "compiled": lambda: replica_engine.TPUStrategy(num_cores=2),
}


@pytest.fixture(params=MAKERS)
def two(request):
    return MAKERS[request.param]()


def drift(two, variable):
    """Has each replica write its own value."""

    def step():
        context = tf.distribute.get_replica_context()
        own = tf.cast(context.replica_id_in_sync_group, tf.float32) * 0.5
        if two.extended.backend.compiles:
            variable.assign_add([own, 0.0])
            return
        write = lambda copy, own: copy.assign_add([own, 0.0])  # noqa: E731
        context.merge_call(lambda strategy, own: strategy.extended.update(variable, write, args=(own,)), args=(own,))

    two.run(step)


def test_copies_that_differ(two):
    with two.scope():
        weight, other = tf.Variable([1.0, 2.0], name="weight"), tf.Variable([3.0, 4.0], name="other")
        own = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    two.run(lambda: own.assign(tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)))
    check_replicas_equal(two)
    drift(two, weight)
    check_replicas_equal([other, own, tf.Variable(1.0)])
    for given in (weight, {"a": [other, weight]}, two):
        with pytest.raises(AssertionError, match=r"(?s)not equal:\n  weight: replica 1 differs .* 0 by up to 0\.5$"):
            check_replicas_equal(given)


def test_models_and_optimizers(two):
    with two.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
    check_replicas_equal([model, model.optimizer, model.weights[0]])


def test_other_values():
    with pytest.raises(TypeError, match="takes variables, models and strategies, and not int 1"):
        check_replicas_equal(1)
