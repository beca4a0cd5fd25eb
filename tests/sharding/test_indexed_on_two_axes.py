"""Gathers and scatters of replicas on meshes with two axes, where XLA's partitioner ends the process at times."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine

# Each takes values (16, 12, 8), whose last dimension is divided, and indices (16, 12).
KINDS = {
    "the largest": lambda x, i: tf.math.top_k(x, 2)[0],
    "an inner axis": lambda x, i: tf.gather(x, [3, 1, 1], axis=2),
    "single numbers": lambda x, i: tf.gather_nd(x, tf.stack([tf.range(16), i[:, 0], i[:, 1] % 8], 1)),
    "rows of a sample": lambda x, i: tf.gather(x, i, batch_dims=1),
    "a number of each row": lambda x, i: tf.gather(x, i % 8, batch_dims=2),
    "scattered": lambda x, i: tf.scatter_nd(tf.reshape(i, [-1, 1]), tf.reshape(x, [-1, 8]), [12, 8]),
}


def on_two_axes():
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [f"cpu:{index}" for index in range(4)])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["kernel"] = (None, "model")
    distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    return replica_engine.TPUStrategy(num_cores=8, distribution=distribution)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_gradients_are_those_of_one_device(kind):
    random = np.random.default_rng(0)
    x, initial = (random.normal(size=shape).astype("float32") for shape in ((16, 12, 32), (32, 8)))
    indices = random.integers(0, 12, (16, 12), dtype=np.int32)

    def run(strategy):
        with strategy.scope():
            kernel = tf.Variable(initial, name="kernel")

        def step(x, i):
            with tf.GradientTape() as tape:
                taken = KINDS[kind](tf.einsum("btd,de->bte", x, kernel), i)
                loss = tf.reduce_sum(taken**2)
            return taken, tape.gradient(loss, kernel)

        found = strategy.run(step, (tf.constant(x), tf.constant(indices)))
        return list(zip(*map(strategy.experimental_local_results, found), strict=True))

    (expected,) = run(replica_engine.TPUStrategy(num_cores=1))
    found = run(on_two_axes())
    assert len(found) == 2
    for replica in found:
        for value, of_one in zip(replica, expected, strict=True):
            np.testing.assert_allclose(value, of_one, rtol=1e-5, atol=1e-5 * np.abs(of_one).max())
