"""What libraries ask a strategy to find out whether it is one of TPUs, and what they then do (docs/libraries.md)."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy
from replica_engine.errors import DeviceError

embedding = tf.tpu.experimental.embedding


def test_it_is_tensorflows_current_class_and_not_the_deprecated_ones(two):
    assert isinstance(two.strategy, tf.distribute.TPUStrategy)
    assert not isinstance(two.strategy, tf.distribute.experimental.TPUStrategy)
    assert not isinstance(two.strategy, tf.compat.v1.distribute.experimental.TPUStrategy)
    assert not isinstance(two.strategy, tf.distribute.MirroredStrategy)


def test_its_name_says_so():
    """Keras 2 and TensorFlow look for it in the class and its bases."""

    class Own(TPUStrategy):
        pass

    assert any(kind.__name__.startswith("TPUStrategy") for kind in Own.__bases__)


def test_extended_answers_what_is_asked_of_tpus():
    strategy = TPUStrategy(steps_per_run=3, num_cores=2)
    extended = strategy.extended
    assert extended.steps_per_run == 3
    assert (extended.num_hosts, extended.num_replicas_per_host) == (1, 2)
    feature = extended.tpu_hardware_feature
    assert isinstance(feature, tf.tpu.experimental.HardwareFeature)
    assert feature.embedding_feature == tf.tpu.experimental.HardwareFeature.EmbeddingFeature.UNSUPPORTED


class TheirReplicator(tf.distribute.TPUStrategy):
    """As Sonnet's TpuReplicator: a scope in which variables belong to each replica."""

    @contextlib.contextmanager
    def scope(self):
        def creator(next_creator, **kwargs):
            if kwargs["synchronization"] == tf.VariableSynchronization.AUTO:
                kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
                kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
            return next_creator(**kwargs)

        with super().scope(), tf.variable_creator_scope(creator):
            yield


class OursFirst(TPUStrategy, TheirReplicator):
    pass


class TheirsFirst(TheirReplicator, TPUStrategy):
    pass


@pytest.mark.parametrize("kind", [OursFirst, TheirsFirst])
def test_a_librarys_subclass_can_be_the_second_base(kind):
    strategy = kind(num_cores=2)
    with strategy.scope():
        weight = tf.Variable(1.0)
    assert weight.synchronization == tf.VariableSynchronization.ON_READ

    def step():
        context = tf.distribute.get_replica_context()
        own = tf.cast(context.replica_id_in_sync_group, tf.float32)
        weight.assign_add(context.all_reduce("SUM", own + 1.0))
        weight.assign_add(own)

    strategy.run(step)
    tf.function(lambda: strategy.run(step))()
    assert [float(each) for each in strategy.experimental_local_results(weight)] == [7.0, 9.0]
    assert isinstance(strategy, TheirReplicator)


def test_an_embedding_for_tpus_trains_without_an_accelerator(two):
    """The layer of TensorFlow Recommenders takes TPUEmbeddingV0 for hardware without one."""
    with two.strategy.scope():
        table = embedding.TableConfig(vocabulary_size=4, dim=2, initializer=tf.constant_initializer(1.0))
        layer = embedding.TPUEmbeddingV0(embedding.FeatureConfig(table=table), None)
        layer.build()
    (weights,) = layer.embedding_tables.values()

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        gradient = tf.convert_to_tensor(tape.gradient(loss, weights))
        weights.assign_sub(0.25 * tf.distribute.get_replica_context().all_reduce("SUM", gradient))
        return loss

    losses = two.strategy.run(step, args=(two.spread(lambda i: [i, 3]),))
    assert two.each(losses) == [4.0, 4.0]
    assert weights.numpy()[:, 0].tolist() == [0.75, 0.75, 1.0, 0.5]


def test_what_keras_logs_is_the_mean_over_replicas(two):
    """Under tf.distribute.TPUStrategy Keras takes what replica 0 logged."""

    class Own(keras.Model):
        def train_step(self, data):
            return {"number": tf.reduce_mean(data[0])}

    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(logs["number"]))

    seen = []
    with two.strategy.scope():
        inputs = keras.Input((1,))
        model = Own(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    x = np.arange(8.0, dtype="float32")[:, np.newaxis]
    history = model.fit(x, x, 4, verbose=0, shuffle=False, callbacks=[Batches()])
    assert seen == [1.5, 5.5]
    assert history.history["number"] == [5.5]


class TestLogicalDevices:
    def test_the_one_of_a_replica_may_be_named(self, two):
        def step(x):
            x = two.strategy.experimental_assign_to_logical_device(x, 0)
            x = two.strategy.experimental_split_to_logical_devices(x, [1, 1])
            with tf.distribute.get_replica_context().experimental_logical_device(0):
                x = x * 2.0
            return two.strategy.experimental_replicate_to_logical_devices(x) + 1.0

        assert two.each(two.strategy.run(step, args=(tf.ones([1, 2]),))) == [[[3.0, 3.0]]] * 2
        with two.strategy.scope(), two.strategy.extended.experimental_logical_device(0):
            assert len(two.strategy.experimental_local_results(tf.Variable(1.0))) == 2

    @pytest.mark.parametrize("device", [1, -1, None])
    def test_there_is_no_other(self, two, device):
        with pytest.raises(DeviceError, match="each replica has one device"):
            two.strategy.experimental_assign_to_logical_device(tf.ones([2]), device)
        with pytest.raises(DeviceError, match="experimental_logical_device was called with logical_device_id"):
            two.strategy.extended.experimental_logical_device(device)

    @pytest.mark.parametrize("parts", [[2, 1], [1], [1, 1, 1]])
    def test_a_tensor_has_one_part(self, two, parts):
        with pytest.raises(DeviceError, match="each replica has one device"):
            two.strategy.experimental_split_to_logical_devices(tf.ones([2, 2]), parts)
