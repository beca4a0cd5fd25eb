"""A model whose weights, slots and batches are divided over the devices of one replica: Keras' `fit`."""

import keras
import numpy as np
import pytest

import replica_engine

X = np.random.default_rng(0).normal(size=(50, 20)).astype("f")
Y = np.random.default_rng(1).integers(0, 3, 50)


def fitted(**how):
    """The strategy, the model after three epochs, and its losses."""
    strategy = replica_engine.TPUStrategy(**how)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([20]),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    history = model.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)  # the last batch has 2 samples
    return strategy, model, history.history


@pytest.fixture(scope="module")
def one():
    return fitted(num_cores=1)


@pytest.mark.parametrize("rule", ["fsdp", "zero1"])
def test_numbers_are_those_of_one_device(one, rule):
    strategy, model, history = fitted(num_cores=4, distribution=rule)
    _, reference, expected = one
    assert strategy.num_replicas_in_sync == 1
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)
    for weight, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, atol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), reference.predict(X, verbose=0), atol=3e-5)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), reference.evaluate(X, Y, verbose=0), rtol=2e-6)


def test_each_device_has_its_part(one):
    (whole,) = one[0].memory().variables
    weights = sum(each.numpy().nbytes for each in one[1].trainable_variables)
    fsdp = fitted(num_cores=4, distribution="fsdp")[0].memory().variables
    zero1 = fitted(num_cores=4, distribution="zero1")[0].memory().variables
    assert len(set(fsdp)) == len(set(zero1)) == 1
    assert len(fsdp) == 4
    assert fsdp[0] < 0.32 * whole  # small variables, such as biases, are whole
    assert weights < zero1[0] < weights + 0.32 * (whole - weights)
