"""Optimizers that update rows of a table by an op for which XLA has no kernel: those of TensorFlow 1 and of Keras 2."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import spread

from replica_engine import TPUStrategy

WORDS = tf.constant([[1, 1, 2], [3, 1, 0]])
v1 = tf.compat.v1.train

OPTIMIZERS = {
    "Momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "Nesterov": lambda: v1.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adagrad": lambda: v1.AdagradOptimizer(0.1),
    "RMSProp": lambda: v1.RMSPropOptimizer(0.1, momentum=0.5),
    "centered RMSProp": lambda: v1.RMSPropOptimizer(0.1, centered=True),
    "Ftrl": lambda: v1.FtrlOptimizer(0.1, l1_regularization_strength=0.1),
    "Ftrl with shrinkage": lambda: v1.FtrlOptimizer(0.1, l2_shrinkage_regularization_strength=0.1),
    "Adadelta": lambda: v1.AdadeltaOptimizer(0.1),
    "ProximalAdagrad": lambda: v1.ProximalAdagradOptimizer(0.1),
    "ProximalGradientDescent": lambda: v1.ProximalGradientDescentOptimizer(0.1),
}


def table():
    return tf.Variable(tf.reshape(tf.range(10.0), [5, 2]) / 10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_updated_as_on_one_device(name):
    """The last row is never looked up, and one row is looked up in the second step only."""

    def trained(strategy, shares):
        with strategy.scope() if strategy else contextlib.nullcontext():
            words, optimizer = table(), OPTIMIZERS[name]()

        def step(found):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(words, found) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, words), words)])

        for found in (shares % 3, shares):
            if strategy:
                own = spread(strategy, lambda i, found=found: found[i])
                strategy.run(step, args=(own,))
            else:
                tf.function(step)(tf.reshape(found, [-1]))
        return words.numpy()

    np.testing.assert_allclose(trained(TPUStrategy(num_cores=2), WORDS), trained(None, WORDS), rtol=1e-5)


@pytest.mark.parametrize("place", ["in the body", "in a function", "in a branch"])
@pytest.mark.parametrize("kind", ["AdagradV2", "KerasMomentum"])
def test_ops_of_keras_2(kind, place):
    options = {"AdagradV2": {"epsilon": 1e-7}, "KerasMomentum": {"momentum": 0.9}}[kind]

    def updated(run):
        words, slot = table(), tf.Variable(tf.ones([5, 2]))

        def update():
            rows, indices = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([3, 1])
            op = getattr(tf.raw_ops, f"ResourceSparseApply{kind}")
            op(var=words.handle, accum=slot.handle, lr=0.5, grad=rows, indices=indices, **options)
            return tf.constant(0)

        def body():
            if place == "in a branch":
                return tf.cond(slot[0, 0] > 0, update, lambda: tf.constant(1))
            return tf.function(update)() if place == "in a function" else update()

        run(body)
        return words.numpy(), slot.numpy()

    found, expected = updated(TPUStrategy(num_cores=1).run), updated(lambda body: body())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
