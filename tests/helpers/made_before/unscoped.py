"""What is used by replicas before the program has entered a strategy's scope, or where it never does."""

import os
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.made_before import BOTH, MIRRORED, made_before, shares
from helpers.made_before.control_flow import ONE, total
from helpers.on_mirrored import locally, numbered, run


@made_before(MIRRORED)
def losses_that_a_layer_adds():
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(x)
            return x

    layer = Penalty()

    def step(x):
        layer(x)
        total(x)  # replicas meet, and another one calls the layer
        return tf.add_n(layer.losses)

    assert step(ONE) == 1.0

    def use(strategy):
        assert run(strategy, step, numbered(strategy), form="eager") == [1.0, 2.0]

    return use


@made_before(*BOTH)
def a_synchronized_normalization_with_a_mask():
    layer = keras.layers.BatchNormalization(synchronized=True)
    x = np.arange(16, dtype="float32").reshape(4, 2, 2) ** 2
    mask = np.array([[1, 0], [1, 1], [1, 1], [0, 1]], bool)
    expected = layer(x, training=True, mask=mask).numpy()

    def use(strategy):
        def step(x, mask):
            return layer(x, training=True, mask=mask)

        each = shares(strategy, np.split(x, 2)), shares(strategy, np.split(mask, 2))
        found = locally(strategy, strategy.run(step, args=each))
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-5)

    return use


@made_before(*BOTH)
def an_optimizer_and_a_weight_of_no_strategy():
    weight, optimizer = keras.Variable([1.0, 2.0], name="kernel"), keras.optimizers.Adam(name="adam")
    optimizer.apply([tf.ones([2])], [weight])

    def use(strategy):
        from replica_engine.errors import ScopeError

        with pytest.raises(ScopeError, match="and the optimizer 'adam'"):
            strategy.run(lambda: optimizer.apply([tf.ones([2])], [weight]))

    return use


@made_before(MIRRORED)
def a_checkpoint_of_what_a_replica_makes():
    folder = tempfile.TemporaryDirectory()
    module = tf.Module()
    checkpoint = tf.train.Checkpoint(module=module)
    asynchronous = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    beside, path = (os.path.join(folder.name, name) for name in ("lr1", "lr[1]"))
    for each in (beside, path):
        checkpoint.write(os.path.join(each, "ckpt"))

    def use(strategy):
        def make():
            if getattr(module, "weight", None) is None:
                module.weight = tf.Variable(2.0)
            return module.weight.read_value()

        assert run(strategy, make, form="eager") == [2.0, 2.0]
        saved = checkpoint.save(os.path.join(path, "ckpt"), asynchronous)
        module.weight.assign(0.0)
        checkpoint.sync()
        checkpoint.restore(saved)
        assert float(module.weight) == 2.0

    return use
