"""Optimizers see the gradient of the whole batch, so that all they do with it is what they do on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import compiled, dense
from keras import layers, optimizers

from replica_engine.keras import replicate_model

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(27, 4)).astype("float32")
Y = (3.0 * RANDOM.normal(size=(27, 2))).astype("float32")
DECAY = optimizers.schedules.ExponentialDecay

MAKERS = {
    # Shares clipped each for itself would train on, with other numbers.
    "a rate that decays, norms clipped": lambda: optimizers.SGD(
        DECAY(0.1, 3, 0.5), momentum=0.9, nesterov=True, clipnorm=0.2
    ),
    "AdamW, averaged": lambda: optimizers.AdamW(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3, global_clipnorm=0.3
    ),
    "accumulated, values clipped": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2, clipvalue=0.1),
}


@pytest.fixture
def trains(trains_alike):
    """In 6 steps of 9 samples, 5 and 4 for each replica, so that what happens every second or third step does."""

    def trains(name):
        alone, model, _ = trains_alike(lambda: dense(4, 2, MAKERS[name](), "mse"), 2, X, Y, batch_size=9, epochs=2)
        assert int(model.optimizer.iterations.numpy()) == int(alone.optimizer.iterations.numpy())

    return trains


@pytest.mark.on("mirrored")  # compiled: test_rows_of_an_embedding_are_accumulated in test_whole_batches.py
@pytest.mark.parametrize("name", ["a rate that decays, norms clipped", "accumulated, values clipped"])
def test_a_schedule_and_accumulated_gradients_on_threads(trains, name):
    trains(name)


@pytest.mark.on("tpu")
def test_averaged_weights_and_a_clipped_global_norm(trains):
    trains("AdamW, averaged")


def test_clipping_matters_in_these_tests(alike):
    """Without it the model would be another, so the tests above do test it."""
    weights = []
    for clip in ({}, {"clipnorm": 0.2}):
        keras.utils.set_random_seed(1)
        model = dense(4, 2, optimizers.SGD(0.1, **clip), "mse")
        model.run_eagerly = True
        model.train_on_batch(X[:9], Y[:9])
        weights.append(model.get_weights()[0])
    assert np.abs(weights[0] - weights[1]).max() > 0.05


class Spare(layers.Layer):
    """Has a weight that is not used, and so has no gradient."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(2,), initializer="ones")

    def call(self, x):
        return x


@pytest.mark.on("tpu")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_an_embedding_is_updated_where_the_batch_has_its_words(trains_alike):
    """Its gradients are rows of the table, of which shares have different numbers, and some rows twice.

    Another weight has no gradient, and stays.
    """

    def make():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(12, 3), layers.Flatten()])
        model.add(Spare())
        model.add(layers.Dense(2))
        model.compile(optimizers.Adam(0.05), "mse")
        return model

    words = RANDOM.integers(0, 9, size=(27, 3))
    alone, model, _ = trains_alike(make, 2, words, Y, batch_size=9)
    assert np.array_equal(model.get_weights()[0][9:], alone.get_weights()[0][9:])
    assert model.get_weights()[1].tolist() == [1.0, 1.0]


class Centered(layers.Layer):
    """Subtracts the mean of the batch, over replicas."""

    def call(self, x):
        return x - tf.distribute.get_replica_context().all_reduce("MEAN", tf.reduce_mean(x, 0))


@pytest.mark.on("tpu")
def test_rows_of_a_table_before_a_reduction(trains_alike):
    """Two samples on three replicas: each computes them all, and has a part of the gradient of each row.

    Adam squares and clipnorm measures the rows that are there, of which some are there several times.
    """

    def make():
        words, x = keras.Input((3,), dtype="int32"), keras.Input((4,))
        table = layers.GlobalAveragePooling1D()(layers.Embedding(4, 3)(words))
        hidden = Centered()(layers.Concatenate()([x, table]))
        model = keras.Model([words, x], layers.Dense(2)(hidden))
        model.compile(optimizers.Adam(0.01, clipnorm=0.1), "mse")
        return model

    trains_alike(make, 3, [np.array([[0, 1, 0], [2, 0, 2]]), X[:2]], Y[:2], epochs=2)


class Neighbours(layers.Layer):
    """The sum of a row of a table and the next one, which on two replicas is that of the row of each."""

    def build(self, shape):
        self.table = layers.Embedding(4, 3)

    def call(self, words):
        if not tf.distribute.has_strategy():
            return self.table(words) + self.table(words + 1)
        context = tf.distribute.get_replica_context()
        rows = self.table(words + tf.cast(context.replica_id_in_sync_group, words.dtype))
        return context.all_reduce("SUM", rows)


@pytest.mark.on("mirrored", rest="tpu")
def test_replicas_that_look_up_different_rows_of_the_same_batch(trains_alike):
    def make():
        model = keras.Sequential([keras.Input((2,), dtype="int32"), Neighbours(), layers.Flatten(), layers.Dense(2)])
        model.compile(optimizers.SGD(0.1), "mse")
        return model

    trains_alike(make, 2, np.array([[0, 2]]), Y[:1], epochs=2)


@pytest.mark.on("tpu")
def test_a_learning_rate_that_is_set_counts_from_the_next_step(both):
    keras.utils.set_random_seed(1)
    model = dense(4, 2, optimizers.SGD(0.1), "mse")
    replicated = replicate_model(model, strategy=both(2))
    replicated.train_on_batch(X[:9], Y[:9])
    before = model.get_weights()
    replicated.optimizer.learning_rate = 0.0
    replicated.train_on_batch(X[:9], Y[:9])
    assert np.array_equal(model.get_weights()[0], before[0])
    model.optimizer.learning_rate = 0.1
    replicated.train_on_batch(X[:9], Y[:9])
    assert not np.array_equal(model.get_weights()[0], before[0])


class Stepwise(keras.Sequential):
    """With a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return {"loss": loss}


class Largest(keras.layers.Layer):
    """Keeps the largest absolute value that it has seen, as the gradient of a variable; another is a constant."""

    def build(self, shape):
        options = {"shape": (), "initializer": "zeros", "overwrite_with_gradient": True}
        self.seen, self.constant = self.add_weight(**options), self.add_weight(**options)

    def call(self, x):
        @tf.custom_gradient
        def kept(x, seen, constant):
            new = tf.maximum(seen, tf.reduce_max(tf.abs(x)))
            return tf.identity(x), lambda upstream: (upstream, new, constant - 1.5)

        return kept(x, self.seen.value, self.constant.value)


def float8(kind=keras.Sequential, **options):
    model = kind([keras.Input((4,)), keras.layers.Dense(2)])
    model.quantize("float8")
    model.compile(keras.optimizers.SGD(0.01, **options), "mse")
    return model


def of_a_layer():
    return compiled([keras.Input((4,)), Largest(), keras.layers.Dense(2)], keras.optimizers.Adam(0.01), "mse")


OVERWRITTEN = {
    "float8": (float8, 9),
    "accumulated": (lambda: float8(gradient_accumulation_steps=2), 6),
    "a step of one's own": (lambda: float8(Stepwise), 6),
    "fewer than replicas": (float8, 1),
    "a layer of one's own": (of_a_layer, 7),
}


@pytest.mark.on("mirrored", "tpu")
@pytest.mark.parametrize("kind", OVERWRITTEN)
def test_what_a_gradient_overwrites_is_as_on_one_device(both, batched, alike, kind, agree):
    """It is no sum over replicas: the scales of float8 grew with each step, and with the number of replicas."""
    make, batch_size = OVERWRITTEN[kind]
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        models.append(make())
    alone, replicated = models[0], replicate_model(models[1], strategy=both(2))  # Keras has no eager float8
    x, y = X[: 2 * batch_size], Y[: 2 * batch_size]
    agree(
        (alone, replicated),
        lambda model: model.fit(batched(batch_size, x, y), epochs=2, shuffle=False, verbose=0).history,
        rtol=1e-3,
        atol=1e-4,
    )
    alike(replicated.get_weights(), alone.get_weights(), rtol=1e-3, atol=1e-4)
    scales = [variable for variable in replicated.variables if variable.overwrite_with_gradient]
    alike([each.numpy() for each in scales], [v.numpy() for v in alone.variables if v.overwrite_with_gradient])
    assert scales
