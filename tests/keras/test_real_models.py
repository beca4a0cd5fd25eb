"""Real data and real models: digits that are learned, and a network as people use it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from examples.demo.data import load_digits
from replica_engine import MirroredStrategy, logical_devices
from replica_engine.keras import replicate_model


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def compiled(*parts, rate=0.01):
    model = keras.Sequential([keras.Input((64,)), *parts, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def dense():
    return compiled(layers.Dense(48, "relu"))


def convolutional():
    parts = [layers.Conv2D(12, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
    return compiled(layers.Reshape((8, 8, 1)), *parts)


def recurrent():
    return compiled(layers.Reshape((8, 8)), layers.LSTM(24), rate=0.03)


def fit(model, digits, epochs):
    """In batches of 127: 10 steps an epoch."""
    data = tf.data.Dataset.from_tensor_slices((digits.train_images[:1270], digits.train_labels[:1270])).batch(127)
    return model.fit(data, epochs=epochs, shuffle=False, verbose=0).history["loss"]


@pytest.fixture
def trained(both, digits):
    """`trained(make, epochs)`: a model that was trained on one device, and the same on 2 replicas.

    Shares have 64 and 63 digits. Over 80 steps the order of sums grows to a difference in the third digit, and of a
    digit or two of 450.
    """

    def trained(make, epochs):
        keras.utils.set_random_seed(1)
        alone = make()
        keras.utils.set_random_seed(1)
        replicated = replicate_model(make(), strategy=both(2))
        expected, losses = fit(alone, digits, epochs), fit(replicated, digits, epochs)
        np.testing.assert_allclose(losses, expected, rtol=2e-2)
        assert losses[-1] < 0.6 * losses[0]
        return alone, replicated

    return trained


@pytest.fixture
def learns(trained, digits):
    """`learns(make)`: trains both, and returns the score."""

    def learns(make):
        alone, replicated = trained(make, 8)
        found = replicated.evaluate(digits.test_images, digits.test_labels, 150, verbose=0)[1]
        outputs = alone(digits.test_images).numpy(), replicated.predict(digits.test_images, 150, verbose=0)
        expected, predicted = (np.mean(each.argmax(1) == digits.test_labels) for each in outputs)
        assert found == pytest.approx(expected, abs=0.01)
        assert found == pytest.approx(predicted, abs=1e-6)
        return found

    return learns


@pytest.mark.on("tpu")
@pytest.mark.full("as on threads below; the numbers of compiled steps are compared everywhere")
def test_a_dense_model_learns_digits(learns):
    assert learns(dense) > 0.9


@pytest.mark.on("mirrored")
def test_a_convolutional_model_learns_digits(learns):
    assert learns(convolutional) > 0.9


@pytest.mark.on("mirrored")
@pytest.mark.full("test_recurrence_with_a_mask trains one on less data")
def test_a_recurrent_model_trains_on_digits(trained):
    trained(recurrent, 3)


@pytest.mark.full("its layers train as on one device in test_layers.py")
def test_a_mobile_net_takes_a_step():
    """Of Keras' applications, cut as people cut it to use it: its first blocks, with 9 batch normalizations.

    XLA takes long to compile it on CPU devices.
    """
    keras.utils.set_random_seed(1)
    whole = keras.applications.MobileNet((32, 32, 3), alpha=0.25, weights=None, include_top=False)
    features = layers.GlobalAveragePooling2D()(whole.get_layer("conv_pw_4_relu").output)
    model = keras.Model(whole.inputs, layers.Dense(4, "softmax")(features))
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    replicated = replicate_model(model, strategy=MirroredStrategy(logical_devices(2)))
    random = np.random.default_rng(0)
    x, y = random.random((4, 32, 32, 3)).astype("float32"), random.integers(0, 4, 4)
    before = model.get_weights()
    assert np.isfinite(replicated.train_on_batch(x, y))
    after = model.get_weights()
    assert all(np.isfinite(weight).all() for weight in after)
    assert sum(not np.array_equal(one, other) for one, other in zip(after, before, strict=True)) > 40
