"""`replicate_model` on replicas of several devices: the variables of a plain model are divided while it runs there."""

import keras
import numpy as np
import pytest
from helpers.divided import model_parallel

import replica_engine
from replica_engine.keras import replicate_model

X = np.random.default_rng(0).normal(size=(45, 20)).astype("f")
Y = np.random.default_rng(1).integers(0, 3, 45)


def tensor_parallel():
    return model_parallel({".*up/kernel": (None, "model"), ".*up/bias": ("model",)})


def trained(**how):
    """The strategy's bytes on each device while the model trains, and the weights and losses."""
    keras.utils.set_random_seed(0)
    up = keras.layers.Dense(64, activation="relu", name="up")
    layers = [keras.Input([20]), up, keras.layers.LayerNormalization(), keras.layers.Dense(3, name="out")]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    model.optimizer.build(model.trainable_variables)  # before any strategy is known
    strategy = replica_engine.TPUStrategy(**how)
    seen = []
    see = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.append(strategy.memory().variables))
    replicated = replicate_model(model, strategy=strategy)
    losses = replicated.fit(
        X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[see], validation_data=(X, Y)
    ).history
    return seen[0], losses, model.get_weights()


@pytest.fixture(scope="module")
def references():
    return {count: trained(num_cores=count) for count in (1, 2)}


@pytest.mark.parametrize(
    ("distribution", "per_replica", "replicas"),
    [("fsdp", 4, 1), ("fsdp", 2, 2), ("zero1", 4, 1), (tensor_parallel, 4, 1)],
)
def test_numbers_are_those_of_whole_variables(references, distribution, per_replica, replicas):
    how = distribution() if callable(distribution) else distribution
    sizes, losses, weights = trained(num_cores=4, cores_per_replica=per_replica, distribution=how)
    (whole, *_), expected, wanted = references[replicas]
    for name, values in expected.items():
        np.testing.assert_allclose(losses[name], values, rtol=2e-6)
    for weight, other in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(weight, other, atol=1e-5)
    # The kernel, and each of its two slots, has 5,120 bytes; "zero1" leaves the kernel whole.
    divided = (2 if distribution == "zero1" else 3) * 5120
    parts = 2 if callable(distribution) else per_replica
    biases = 3 * 256 * (1 - 1 / parts) if callable(distribution) else 0
    assert sizes == [whole - divided * (1 - 1 / parts) - biases] * 4
