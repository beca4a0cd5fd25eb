"""Names, values and variables that are unlike the usual ones, and mistakes of those who begin."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import model_parallel
from helpers.on_two import spread

import replica_engine
from replica_engine import xla
from replica_engine.errors import DistributionError, LoweringError

SUM = tf.VariableAggregation.SUM


@pytest.mark.parametrize("name", ["größe", "data:0", 'da"ta', "replica", "2d"])
def test_names_that_programs_cannot_have_are_refused(name):
    with pytest.raises(DistributionError, match="letters, digits and underscores"):
        replica_engine.TPUStrategy(distribution=model_parallel({}, names=(name, "model"), batch=name))


def test_a_batch_axis_that_the_mesh_lacks_is_refused():
    with pytest.raises(DistributionError, match=r"batch_dim_name='data'.*'batch', 'model'"):
        replica_engine.TPUStrategy(distribution=model_parallel({}, batch="data"))


@pytest.mark.parametrize(
    ("given", "advice"), [("FSDP", "'fsdp'"), ("zero-1", "'zero1'"), ("map", "ModelParallel"), ("mesh", "DataParallel")]
)
def test_what_is_nearly_a_distribution_gets_advice(given, advice):
    mesh = keras.distribution.DeviceMesh((2,), ["batch"], ["cpu:0", "cpu:1"])
    value = {"map": keras.distribution.LayoutMap(mesh), "mesh": mesh}.get(given, given)
    with pytest.raises(DistributionError, match=advice):
        replica_engine.TPUStrategy(num_cores=2, distribution=value)


def test_functions_that_make_large_values_run_once_on_the_host():
    strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")
    size = 1 << 21
    chunks = iter(np.full([2, size], number, np.float32) for number in range(4))

    class Own(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            return next(chunks) + tf.zeros(shape).numpy()

    with strategy.scope():
        first = tf.Variable(lambda: next(chunks) + tf.zeros([1]), shape=(2, size), dtype=tf.float32)
        second = keras.Variable(Own(), shape=(2, size))
    assert (float(first[0, 0]), float(second.numpy()[0, 0])) == (0.0, 1.0)


def test_adafactor_keeps_its_factors_whole():
    strategy = replica_engine.TPUStrategy(distribution=model_parallel({".*kernel": ("batch", "model")}))
    with strategy.scope():
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8)])
        model.compile("adafactor", "mse")
    model.fit(np.ones([4, 8]), np.ones([4, 8]), verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()


def test_keras_distribution_in_a_step_is_the_strategys():
    strategy = replica_engine.TPUStrategy(distribution=model_parallel({".*kernel": (None, "model")}))
    with strategy.scope():
        dense = keras.layers.Dense(4)
        dense.build([None, 4])
    rows = strategy.run(
        lambda x: dense(x) * 0.0 + keras.distribution.distribution().device_mesh.shape[0], (tf.ones([4, 4]),)
    )
    assert float(rows[0, 0]) == 2.0


@pytest.mark.parametrize("sizes", [(4, 1), (5, 4), (2, 0)])
def test_shares_of_different_sizes(sizes):
    """XLA divides the convolution so that all devices exchange values, which a branch of one replica must not do."""
    strategy = replica_engine.TPUStrategy(num_cores=4, cores_per_replica=2, distribution="fsdp")
    with strategy.scope():
        total = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=SUM, trainable=False)
        dense = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.Flatten(), keras.layers.Dense(4)])
        convolution = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.Conv2D(4, 3, padding="same")])
    x = np.random.default_rng(0).normal(size=(sum(sizes), 8, 8, 2)).astype(np.float32)
    shares = spread(strategy, lambda i: tf.split(x, sizes)[i])

    def step(x):
        total.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        length = tf.strings.length(tf.strings.as_string(tf.abs(x[:, 0, 0, 0]) * 0.0))
        return dense(x), convolution(x), x[::-1] - x[:1], length

    found = [tf.concat(strategy.experimental_local_results(each), 0) for each in strategy.run(step, (shares,))]
    reversed_ = np.concatenate([each[::-1] - each[:1] for each in np.split(x, sizes[:1])])
    for one, wanted in zip(found, (dense(x), convolution(x), reversed_, [8] * len(x)), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-4)
    assert float(total.read_value()) == sum(sizes)


def test_a_host_call_gives_complex_numbers_to_all_devices_of_each_replica():
    strategy = replica_engine.TPUStrategy(num_cores=4, cores_per_replica=2, distribution="fsdp")
    x = tf.complex(tf.ones([4, 2]), tf.fill([4, 2], 2.0))
    found = strategy.run(lambda x: tf.reduce_sum(xla.outside_compilation(lambda y: y, x)), args=(x,))
    assert [complex(each) for each in strategy.experimental_local_results(found)] == [8 + 16j] * 2


def test_complex_numbers_are_taken_out_of_a_table_of_unequal_parts():
    strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
    with strategy.scope():
        table = tf.Variable(tf.complex(tf.ones([1023, 127]), tf.fill([1023, 127], 2.0)))

    def step(rows):
        table.assign_add(table)
        return tf.reduce_sum(tf.gather_nd(table, tf.stack([rows, rows % 7], 1)))

    assert complex(strategy.run(step, args=(100 * tf.range(9),))) == 18 + 36j


def test_a_variable_of_no_scope_is_told_of(caplog):
    strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")
    forgotten = tf.Variable(tf.ones([8, 8]))
    for _ in range(2):
        strategy.run(lambda: forgotten.assign_add(forgotten))
    assert caplog.text.count("made outside of the strategy's scope") == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_what_an_embedding_exchanges_grows_with_the_batch_and_not_with_the_table(optimizer):
    strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")

    def moved(rows, batch):
        with strategy.scope():
            words = keras.Input([10], dtype="int32")
            model = keras.Model(words, keras.layers.Dense(2)(keras.layers.Embedding(rows, 16)(words)[:, 0]))
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.optimizer.build(model.trainable_variables)
        specs = tf.TensorSpec([batch, 10], tf.int32), tf.TensorSpec([batch], tf.int32)
        plan = strategy.plan(lambda x, y: model.train_step((x, y))["loss"], args=specs)
        return sum(each.bytes for each in plan.cost.collectives)

    small = moved(1 << 12, 16)
    assert moved(1 << 15, 16) == small < 16 * (1 << 12)
    assert moved(1 << 12, 64) > 2 * small


def test_a_value_of_a_size_that_depends_on_data_is_refused():
    strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")

    def mean(x):
        return tf.reduce_mean(tf.boolean_mask(x, x > 0))

    with pytest.raises(LoweringError, match=r"`mean` has a value .* data at .*test_edges.py:\d+ .*tf.where\(mask, x"):
        strategy.run(mean, args=(tf.range(4.0),))
