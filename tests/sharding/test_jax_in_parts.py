"""Functions of JAX in a body whose replicas have several devices: XLA divides them like everything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla

PARTS = {
    "one replica of four": {"num_cores": 4, "distribution": "fsdp"},
    "two replicas of two": {"num_cores": 4, "distribution": "fsdp", "cores_per_replica": 2},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_step_with_functions_of_jax(name):
    """One of them calls a routine, of which XLA knows only that it works on each matrix."""
    strategy = replica_engine.TPUStrategy(**PARTS[name])
    rng = np.random.default_rng(0)
    x, w, a = (rng.standard_normal(shape, np.float32) for shape in ((8, 16), (16, 32), (4, 8, 8)))
    a = a @ a.transpose(0, 2, 1) + np.eye(8, dtype=np.float32)
    layer, root = xla.from_jax(lambda x, w: jax.nn.gelu(x @ w)), xla.from_jax(jnp.linalg.cholesky)
    with strategy.scope():
        weight, matrices = tf.Variable(w), tf.Variable(a)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x, weight)) + tf.reduce_mean(root(matrices))
        return loss, *tape.gradient(loss, [weight, matrices])

    def loss(w, a):
        return jnp.mean(jax.nn.gelu(x @ w)) + jnp.mean(jnp.linalg.cholesky(a))

    expected = [loss(w, a), *jax.grad(loss, (0, 1))(w, a)]
    for found, wanted in zip(strategy.run(step, args=(tf.constant(x),)), expected, strict=True):
        for value in strategy.experimental_local_results(found):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
