"""What is written another way for TPUs: the gradient of a softmax in attention stays one value."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import gradient_of

from replica_engine import xla
from replica_engine.pjrt import rewrites
from replica_engine.pjrt.stablehlo.markers import expand_markers

MULTIPLY, BARRIER = "stablehlo.multiply", "stablehlo.optimization_barrier"


def rewritten(body, *shape, dtype=np.float32, platform="tpu"):
    """How many operations of a body were rewritten, by kind, and the text of the program."""
    lowered = xla.lower(body, [[tf.zeros(shape, dtype)]])
    module = expand_markers(lowered.as_text(), platform)
    count = rewrites.rewrite(module, platform)
    assert module.operation.verify()
    return count, str(module)


def gradient_of_squares(function):
    return gradient_of(lambda x: tf.reduce_sum(tf.square(function(x))))


def attention(x):
    scores = tf.matmul(x, x, transpose_b=True)
    return tf.matmul(tf.nn.softmax(scores), x)


@pytest.mark.parametrize("dtype", [np.float32, tf.bfloat16.as_numpy_dtype])
def test_attention(dtype):
    count, text = rewritten(gradient_of_squares(attention), 2, 5, 4, dtype=dtype)
    assert count == {MULTIPLY: 1}
    assert text.count(BARRIER) == 1


def test_attention_of_keras():
    """With a mask, and several heads."""
    layer = keras.layers.MultiHeadAttention(2, 4, flash_attention=False)
    layer.build((2, 5, 8), (2, 5, 8))
    count, _ = rewritten(gradient_of_squares(lambda x: layer(x, x, use_causal_mask=True)), 2, 5, 8)
    assert count == {MULTIPLY: 1}


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (tf.nn.softmax, (5, 4)),  # over classes: its products are small
        (lambda x: (x - tf.reduce_mean(x * x, -1, keepdims=True)) * (x + 1), (2, 5, 4)),  # looks alike
    ],
)
def test_others_stay_as_they_are(function, shape):
    count, text = rewritten(gradient_of_squares(function), *shape)
    assert not count
    assert BARRIER not in text


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_other_platforms_are_left_alone(platform):
    count, text = rewritten(gradient_of_squares(attention), 2, 5, 4, platform=platform)
    assert MULTIPLY not in count
    assert BARRIER not in text
