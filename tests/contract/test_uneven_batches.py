"""`split_batch` and `join_outputs`: batches of any size in a loop of one's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import BatchError

X = np.random.default_rng(0).normal(size=(13, 3)).astype("float32")


@pytest.mark.parametrize("count", [1, 3, 8, 13])
def test_the_sum_of_weighted_losses_is_the_mean_over_the_samples(strategy, count):
    x = X[:count]
    shares, weights = replica_engine.split_batch(strategy, {"x": x, "none": None})

    def loss(batch, weights):
        assert batch["none"] is None
        return tf.reduce_sum(tf.reduce_sum(batch["x"] ** 2, axis=1) * weights)

    total = strategy.reduce("SUM", strategy.run(loss, args=(shares, weights)), axis=None)
    assert float(total) == pytest.approx(np.mean(np.sum(x**2, axis=1)), rel=1e-5)


def test_weights_count_each_sample_once_and_padding_never(strategy, n, local):
    _, weights = replica_engine.split_batch(strategy, X[:3], batch_size=3 * n)
    assert [len(each) for each in local(weights)] == [3] * n
    np.testing.assert_allclose(np.concatenate(local(weights)), [1 / 3] * 3 + [0] * (3 * n - 3), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 5, 13])
def test_outputs_come_back_whole_and_in_order(strategy, count):
    shares, _ = replica_engine.split_batch(strategy, X[:count], batch_size=13)
    outputs = strategy.run(lambda x: {"twice": 2 * x, "sums": tf.reduce_sum(x, 1)}, args=(shares,))
    joined = replica_engine.join_outputs(strategy, outputs, count)
    np.testing.assert_array_equal(joined["twice"], 2 * X[:count])
    np.testing.assert_allclose(joined["sums"], X[:count].sum(1), rtol=1e-5)


def test_an_empty_batch_has_no_loss_and_no_gradient(strategy):
    shares, weights = replica_engine.split_batch(strategy, X[:0])
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0, 3.0])

    def step(x, weights):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_sum(weight * x, 1) * weights)
        return loss, tape.gradient(loss, weight)

    loss, gradient = strategy.run(step, args=(shares, weights))
    assert float(strategy.reduce("SUM", loss, axis=None)) == 0
    assert strategy.reduce("SUM", gradient, axis=None).numpy().tolist() == [0, 0, 0]
    assert replica_engine.join_outputs(strategy, strategy.run(lambda x: x, args=(shares,)), 0).shape == (0, 3)


@pytest.mark.replicas(2)
def test_a_loop_over_uneven_batches_trains_as_one_device_does(strategy):
    """Three batches of 8 and 5 samples, Adam: a few units in the last place (6e-8) a step."""

    def train(scope, run):
        with scope:
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
            optimizer = replica_engine.keras.CrossReplicaOptimizer(keras.optimizers.Adam(0.05, clipnorm=0.1), "sum")

        def step(x, weights):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x)[:, 0] - tf.reduce_sum(x, 1)) ** 2 * weights)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        for start in (0, 8) * 3:
            run(step, X[start : start + 8])
        return model.get_weights()

    expected = train(
        tf.distribute.get_strategy().scope(), lambda step, x: step(x, tf.fill([len(x)], tf.constant(1 / len(x))))
    )
    found = train(
        strategy.scope(), lambda step, x: strategy.run(step, replica_engine.split_batch(strategy, x, batch_size=8))
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.threads("no device has strings, ragged or sparse rows of other shapes")
def test_ragged_and_sparse_batches_keep_their_rows(strategy):
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], []])
    sparse = tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    shares, _ = replica_engine.split_batch(strategy, (ragged, sparse, tf.constant(["a", "b", "c"])))

    def look(ragged, sparse, text):
        return tf.reduce_sum(ragged, axis=1), tf.sparse.to_dense(sparse), text

    sums, dense, text = replica_engine.join_outputs(strategy, strategy.run(look, args=shares), 3)
    assert sums.numpy().tolist() == [1, 5, 0]
    assert dense.numpy().tolist() == [[0, 1], [2, 0], [0, 3]]
    assert text.numpy().tolist() == [b"a", b"b", b"c"]


@pytest.mark.replicas(2)
def test_what_cannot_be_split_is_an_error(strategy):
    with pytest.raises(BatchError, match=r"x has 4, y has 3"):
        replica_engine.split_batch(strategy, (X[:4], X[:3]))
    with pytest.raises(BatchError, match="no array with samples"):
        replica_engine.split_batch(strategy, {"a": None, "b": 1.0})
    with pytest.raises(BatchError, match="9 samples, more than the batch_size=8"):
        replica_engine.split_batch(strategy, X[:9], batch_size=8)
