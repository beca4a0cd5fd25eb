"""Constants of truth values: of all sizes and patterns, wherever they are in a body."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import gradient_of, spread

from replica_engine import TPUStrategy, xla

SHAPES = [(), (1,), (0,), (8,), (100,), (101,), (104,), (7, 0, 30), (1, 103), (11, 11), (3, 5, 7, 2), (2, 2, 33, 1)]
PATTERNS = {
    "true": np.ones,
    "false": np.zeros,
    "one": lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape) == 0,
    "last": lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape) == np.prod(shape) - 1,
    "thirds": lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 == 1,
    "random": lambda shape: np.random.default_rng(0).random(shape) < 0.5,
}


@pytest.fixture
def folder(tmp_path):
    xla.set_cache_dir(tmp_path)
    yield
    xla.set_cache_dir(None)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_of_all_sizes(pattern):
    masks = [np.asarray(pattern(shape), bool) for shape in SHAPES]
    results = xla.replicate(lambda x: [tf.math.logical_xor(tf.constant(mask), x) for mask in masks], [[False], [True]])
    for mask, one, other in zip(masks, *results, strict=True):
        np.testing.assert_array_equal(one, mask)
        np.testing.assert_array_equal(other, ~mask)


@pytest.mark.parametrize("where", ["in a branch", "in a loop", "in a function", "in a gradient"])
def test_inside(where):
    mask = np.random.default_rng(1).random((13, 17)) < 0.5

    def fn(x):
        masked = lambda x: tf.where(tf.constant(mask), x, 0.0)  # noqa: E731
        if where == "in a branch":
            return tf.cond(x[0, 0] > 0, lambda: masked(x), lambda: x)
        if where == "in a loop":
            return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, 2.0 * masked(x)), [0, x])[1] / 4.0
        if where == "in a gradient":
            return gradient_of(masked)(x)
        return tf.function(masked)(x)

    for result in xla.replicate(fn, [[tf.ones(mask.shape)]] * 2):
        np.testing.assert_array_equal(result, mask)


def test_in_programs_that_are_kept(folder):
    mask = np.random.default_rng(2).random((30, 30)) < 0.5
    masked = lambda x: tf.where(tf.constant(mask), x, 0.0)  # noqa: E731
    before = xla.counts()
    for _ in range(2):
        for result in xla.replicate(lambda x: masked(x), [[tf.ones(mask.shape)]] * 2):
            np.testing.assert_array_equal(result, mask)
        assert "tensor<30x30xi1>" in xla.lower(lambda x: masked(x), [[tf.ones(mask.shape)]] * 2).as_text()
    assert (xla.counts() - before).lowerings == 1  # the others read the text from the folder


def test_replicas_with_different_shapes(two):
    mask = np.random.default_rng(3).random(150) < 0.5
    shares = spread(two, lambda i: tf.ones([i + 1, 150]))
    result = two.run(lambda x: tf.reduce_sum(tf.where(tf.constant(mask), x, 0.0), 0), args=(shares,))
    for factor, each in enumerate(two.experimental_local_results(result), start=1):
        np.testing.assert_array_equal(each, factor * mask)


@pytest.mark.full("masks of all sizes, and in gradients, are tested above")
def test_a_transformer_with_a_causal_mask():
    def fitted(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs = keras.Input([40], dtype="int32")
            x = keras.layers.Embedding(20, 8)(inputs)
            x = keras.layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
            model = keras.Model(inputs, keras.layers.Dense(20)(x))
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        tokens = np.random.default_rng(0).integers(0, 20, (16, 40))
        history = model.fit(tokens, np.roll(tokens, -1, 1), 8, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"], model.predict(tokens[:3], verbose=0)

    losses, outputs = fitted(TPUStrategy(num_cores=2))
    expected_losses, expected = fitted(tf.distribute.get_strategy())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
