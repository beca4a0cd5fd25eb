"""An update that is equal on all replicas needs no collective, though it is the first replica's by its aggregation."""

import keras
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla


@pytest.fixture
def tpu():
    return replica_engine.TPUStrategy(num_cores=2)


def counter(tpu, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA):
    with tpu.scope():
        return tf.Variable(1.0, aggregation=aggregation)


def collectives(tpu, step):
    return [each.kind for each in tpu.plan(step).cost.collectives]


@pytest.mark.parametrize(
    "update",
    [lambda v: v.assign_add(1.0), lambda v: v.assign(2.0 * v - 1.0), lambda v: v.assign(tf.constant(3.0))],
    ids=["adds", "computes", "constant"],
)
def test_an_update_of_constants_and_of_the_variable_itself(tpu, update):
    v = counter(tpu)
    assert collectives(tpu, lambda: update(v)) == []
    tpu.run(lambda: update(v))
    assert v.numpy() in (2.0, 1.0, 3.0)


def test_what_differs_is_the_first_replicas(tpu):
    v, of_each = counter(tpu), counter(tpu, tf.VariableAggregation.NONE)
    replica = lambda: tf.cast(xla.replica_id(), tf.float32)  # noqa: E731
    tpu.run(lambda: of_each.assign(5.0 + replica()))
    for value in (replica, lambda: of_each + 0.0, lambda: tf.random.uniform([])):
        assert "all-gather" in collectives(tpu, lambda value=value: v.assign(v + value()))
    tpu.run(lambda: v.assign_add(replica()))
    assert v.numpy() == 1.0
    tpu.run(lambda: v.assign(of_each + 0.0))
    assert tpu.run(lambda: v.read_value()).values[1].numpy() == 5.0


def test_the_step_of_keras_has_the_collectives_of_its_gradients_alone(tpu):
    with tpu.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        model.compile("adam", "mse")
    batch = tf.TensorSpec([8, 4]), tf.TensorSpec([8, 3])
    assert {each.kind for each in tpu.plan(model.train_step, (batch,)).cost.collectives} == {"all-reduce"}
