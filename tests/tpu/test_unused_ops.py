"""Ops whose results nothing uses do not count, whatever they are: XLA compiles all ops of a branch and of a loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy
from replica_engine.keras import replicate_model

X = tf.constant([1.0, 2.0, 2.0, 5.0])

UNUSED = {
    "random": lambda x: tf.random.stateless_gamma([3], [1, 2], alpha=1.0),
    "strings": tf.strings.as_string,
    "counts": lambda x: tf.math.bincount(tf.cast(x, tf.int32)),
    "of a size from data": lambda x: tf.range(tf.cast(x[0], tf.int32)),
    "no kernel": lambda x: tf.linalg.sqrtm(tf.eye(2) * x[0]),
    "in a branch": lambda x: tf.cond(
        x[1] > 0, lambda: tf.random.stateless_gamma([3], [1, 2], 1.0), lambda: tf.zeros(3)
    ),
}


def around(unused):
    def result(x):
        unused(x)
        return x * 2

    return {
        "cond": lambda x: tf.cond(x[0] > 0, lambda: result(x), lambda: x),
        "switch_case": lambda x: tf.switch_case(tf.cast(x[0], tf.int32), [lambda: x, lambda: result(x)]),
        "while_loop": lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, result(y)), [0, x])[1],
        "map_fn": lambda x: tf.map_fn(lambda each: result(tf.stack([each, each])), x),
        "function": lambda x: tf.function(result)(x),
        "function in cond": lambda x: tf.cond(x[0] > 0, lambda: tf.function(result)(x), lambda: x),
    }


FULL = dict.fromkeys(("counts", "no kernel"), pytest.mark.full("another op that XLA has not"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL.get(name, ())) for name in UNUSED])
def test_they_do_not_count(name):
    strategy = TPUStrategy(num_cores=1)
    for place, body in around(UNUSED[name]).items():
        np.testing.assert_array_equal(strategy.run(body, args=(X,)), body(X), err_msg=place)


class Sampled(keras.layers.Layer):
    """Draws in every call, and uses what it drew in training only, as the layers that augment images do."""

    def call(self, x, training=False):
        weight = tf.random.stateless_gamma([1], [1, 2], alpha=0.2)
        return x * weight if training else x


@pytest.mark.parametrize("layer", [Sampled, keras.layers.MixUp])
def test_shares_of_unlike_sizes(layer):
    images, labels = np.random.default_rng(0).normal(size=(7, 4, 4, 1)).astype("float32"), np.ones((7, 1), "float32")

    def made():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4, 4, 1)), layer(), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    expected = made().evaluate(images, labels, verbose=0)
    replicated = replicate_model(made(), strategy=TPUStrategy(num_cores=2))
    assert replicated.evaluate(images, labels, verbose=0) == pytest.approx(expected, rel=1e-5)
