"""Grouped convolutions on a mesh with several axes, where XLA's partitioner adds up kernels' gradients wrongly."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import model_parallel

import replica_engine

KINDS = {
    "grouped": ((3, 3, 2, 8), lambda x, kernel: tf.nn.conv2d(x, kernel, 1, "SAME")),
    "depthwise": ((3, 3, 8, 2), lambda x, kernel: tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")),
    "with strides": ((3, 3, 8, 2), lambda x, kernel: tf.nn.depthwise_conv2d(x, kernel, [1, 2, 2, 1], "SAME")),
}


def divided(shape, axis, replicas):
    axes = tuple("model" if index == axis else None for index in range(4))
    distribution = model_parallel({"kernel": axes}, shape, ["batch", "model", "more"][: len(shape)])
    return replica_engine.TPUStrategy(num_cores=replicas * int(np.prod(shape)), distribution=distribution)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mesh", "axis", "replicas", "samples"),
    [((2, 2), 3, 1, 16), ((2, 2), 2, 2, 16), ((2, 2, 2), 3, 1, 16), ((2, 2), 3, 1, 6)],
    ids=["two axes", "two replicas", "three axes", "samples that do not divide"],
)
def test_gradients_are_those_of_one_device(kind, mesh, axis, replicas, samples):
    shape, convolve = KINDS[kind]
    random = np.random.default_rng(0)
    x, initial = (random.normal(size=each).astype("float32") for each in ((samples, 8, 8, 8), shape))

    def gradients(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            loss = tf.reduce_sum(convolve(x, kernel) ** 2)
        return tape.gradient(loss, [x, kernel])

    def run(strategy):
        with strategy.scope():
            kernel = tf.Variable(initial, name="kernel")
        found = strategy.run(lambda: gradients(tf.constant(x), kernel))
        return list(zip(*map(strategy.experimental_local_results, found), strict=True))

    (expected,) = run(replica_engine.TPUStrategy(num_cores=1))
    found = run(divided(mesh, axis, replicas))
    assert len(found) == replicas
    for gradient, *others in zip(expected, *found, strict=True):
        for each in others:
            np.testing.assert_allclose(each, gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max())
