"""Optimizers see the gradient of the whole batch, so that all they do with it is what they do on one device."""

import keras
import numpy as np
import pytest
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


def regression(optimizer):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


@pytest.fixture
def trains(trains_alike):
    """In 6 steps of 9 samples, 5 and 4 for each replica, so that what happens every second or third step does."""
    return lambda name: _trains(trains_alike, name)


def _trains(trains_alike, name):
    alone, model, _ = trains_alike(lambda: regression(MAKERS[name]()), 2, X, Y, batch_size=9, epochs=2)
    assert int(model.optimizer.iterations.numpy()) == int(alone.optimizer.iterations.numpy())


@pytest.mark.on("mirrored")
def test_a_schedule_momentum_and_clipped_norms(trains):
    trains("a rate that decays, norms clipped")


@pytest.mark.on("tpu")
def test_averaged_weights_and_a_clipped_global_norm(trains):
    trains("AdamW, averaged")


def test_gradients_that_are_accumulated_and_clipped(trains):
    trains("accumulated, values clipped")


def test_clipping_matters_in_these_tests(alike):
    """Without it the model would be another, so the tests above do test it."""
    weights = []
    for clip in ({}, {"clipnorm": 0.2}):
        keras.utils.set_random_seed(1)
        model = regression(optimizers.SGD(0.1, **clip))
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


@pytest.mark.on("tpu")
def test_a_learning_rate_that_is_set_counts_from_the_next_step(both):
    keras.utils.set_random_seed(1)
    model = regression(optimizers.SGD(0.1))
    replicated = replicate_model(model, strategy=both(2))
    replicated.train_on_batch(X[:9], Y[:9])
    before = model.get_weights()
    replicated.optimizer.learning_rate = 0.0
    replicated.train_on_batch(X[:9], Y[:9])
    assert np.array_equal(model.get_weights()[0], before[0])
    model.optimizer.learning_rate = 0.1
    replicated.train_on_batch(X[:9], Y[:9])
    assert not np.array_equal(model.get_weights()[0], before[0])
