"""Gathers and scatters of replicas on meshes with two axes, where XLA's partitioner ends the process at times."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import model_parallel

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


# Each takes values (16, 32), rows of a sample, a table (64, 32), a kernel (32, 32) and indices (16, 12) below 16.
OF_TABLES = {
    "the table": lambda x, table, kernel, i: tf.gather(table, i) @ kernel,
    "what was computed from it": lambda x, table, kernel, i: tf.gather(table @ kernel, i),
    "samples": lambda x, table, kernel, i: tf.gather(x, i[:, 0]) @ kernel,
    "what was computed from samples": lambda x, table, kernel, i: tf.gather(tf.gather(x @ kernel, i[:, 0]), i),
}


def on_two_axes(**more):
    distribution = model_parallel({"kernel": (None, "model"), **more})
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

    agree(run, on_two_axes())


@pytest.mark.parametrize("axes", [("model", None), ("batch", None), ("model", "batch"), ("batch", "model")])
@pytest.mark.parametrize("kind", OF_TABLES)
def test_tables_in_each_layout_give_the_numbers_and_gradients_of_one_device(kind, axes):
    random = np.random.default_rng(0)
    x, table, kernel = (random.normal(size=shape).astype("float32") for shape in ((16, 32), (64, 32), (32, 32)))
    indices = random.integers(0, 16, (16, 12), dtype=np.int32)

    def run(strategy):
        with strategy.scope():
            variables = [tf.Variable(table, name="table"), tf.Variable(kernel, name="kernel")]

        def step(x, i):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(OF_TABLES[kind](x, *variables, i) ** 2)
            return loss, *tape.gradient(loss, variables, unconnected_gradients="zero")

        found = strategy.run(step, (tf.constant(x), tf.constant(indices)))
        return list(zip(*map(strategy.experimental_local_results, found), strict=True))

    agree(run, on_two_axes(table=axes))


def agree(run, strategy):
    (expected,) = run(replica_engine.TPUStrategy(num_cores=1))
    found = run(strategy)
    assert len(found) == 2
    for replica in found:
        for value, of_one in zip(replica, expected, strict=True):
            value, of_one = tf.convert_to_tensor(value), tf.convert_to_tensor(of_one)  # a gradient of rows too
            np.testing.assert_allclose(value, of_one, rtol=1e-5, atol=1e-5 * np.abs(of_one).max())
