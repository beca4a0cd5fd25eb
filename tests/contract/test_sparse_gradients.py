"""Gradients of embeddings, in functions that take batches of any size."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = [pytest.mark.graphs, pytest.mark.replicas(2)]

IDS = tf.reshape(tf.range(48) % 10, [16, 3])
TARGETS = tf.random.stateless_normal([16, 2], [1, 2])


def batches(strategy):
    dataset = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(8)  # of no static size
    return iter(dataset if strategy is None else strategy.experimental_distribute_dataset(dataset))


def trained(strategy, momentum=0.9):
    """The table after two steps in a tf.function, and the last gradient's kind."""
    kinds = []
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        table = tf.Variable(tf.reshape(tf.range(20.0), [10, 2]))
        optimizer = keras.optimizers.SGD(0.1, momentum=momentum)
        optimizer.build([table])

    def step(ids, targets):
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1) - targets
            loss = tf.reduce_sum(error**2) / 8.0
        gradient = tape.gradient(loss, table)
        kinds.append(type(gradient))
        optimizer.apply_gradients([(gradient, table)])

    @tf.function
    def train(iterator):
        if strategy is None:
            step(*next(iterator))
        else:
            strategy.run(step, args=next(iterator))

    iterator = batches(strategy)
    for _ in range(2):
        train(iterator)
    assert set(kinds) == {tf.IndexedSlices}
    return table.numpy()


@pytest.fixture(scope="module")
def on_one_device():
    return trained(None), losses(contextlib.nullcontext())


def test_a_step_of_ones_own(strategy, on_one_device):
    np.testing.assert_allclose(trained(strategy), on_one_device[0], rtol=1e-5)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_their_all_reduce_has_the_rows_of_all_replicas(strategy, n, op):
    size = n

    def step(ids):
        context = tf.distribute.get_replica_context()
        rows = tf.ones([tf.size(ids), 2]) * tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        slices = tf.IndexedSlices(rows, tf.reshape(ids, [-1]), tf.constant([10, 2]))
        return tf.convert_to_tensor(context.all_reduce(op, slices))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def reduced(ids):
        return strategy.run(step, args=(ids,))

    result = strategy.experimental_local_results(reduced(tf.constant([1, 1, 4])))[-1].numpy()
    total = size * (size + 1) / 2 / (size if op == "MEAN" else 1)
    expected = np.zeros([10, 2])
    expected[1], expected[4] = 2 * total, total
    np.testing.assert_allclose(result, expected)


def losses(scope):
    """The loss of each epoch of a Keras model."""
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential([keras.layers.Embedding(10, 2), keras.layers.GlobalAveragePooling1D()])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(8)
    return model.fit(dataset, epochs=2, verbose=0).history["loss"]


def test_a_model_with_an_embedding_fits(strategy, on_one_device):
    np.testing.assert_allclose(losses(strategy.scope()), on_one_device[1], rtol=1e-4)


def test_values_of_a_size_that_is_not_static_are_gathered(strategy, n):
    def step(x):
        context = tf.distribute.get_replica_context()
        own = x * tf.cast(context.replica_id_in_sync_group + 1, x.dtype)
        return context.all_gather(own, axis=0), context.all_gather(tf.cast(own, tf.float64), axis=1)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int32)])
    def gathered(x):
        return strategy.run(step, args=(x,))

    for rows in (1, 3):
        x = np.arange(2 * rows).reshape(rows, 2)
        below, beside = (
            strategy.experimental_local_results(each)[-1].numpy() for each in gathered(tf.constant(x, tf.int32))
        )
        own = [x * (replica + 1) for replica in range(n)]
        np.testing.assert_array_equal(below, np.concatenate(own))
        np.testing.assert_array_equal(beside, np.concatenate(own, axis=1))
