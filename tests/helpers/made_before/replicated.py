"""Models with weights, slots and metrics, which have been trained, and are replicated then."""

import signal
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.losses import MeanSquaredError
from tensorflow import GradientTape, gradients
from tensorflow.nn import compute_average_loss, scale_regularization_loss

from helpers.made_before import EACH, MIRRORED, REPLICATE, made_before

X, Y = (np.random.default_rng(0).normal(size=(14, size)).astype("float32") for size in (4, 2))
X[:3] *= 3.0  # so that the gradients of shards are of different sizes


def replicated(model, strategy):
    from replica_engine.keras import replicate_model

    return replicate_model(model, replicas=2, strategy=strategy)


def fit(model, **options):
    options = {"batch_size": 7, "shuffle": False, "verbose": 0} | options
    return model.fit(X, Y, **options).history


def alike(found, expected):
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def trains_alike(make):
    """Two models that have been trained equally; replicated, one of them goes on as the other does."""
    alone, model = make(), make()
    model.set_weights(alone.get_weights())
    fit(alone)
    fit(model)
    own = model.fit

    def use(strategy):
        alike(fit(replicated(model, strategy)), fit(alone))
        alike([variable.numpy() for variable in model.variables], [variable.numpy() for variable in alone.variables])
        alike(own(X, Y, batch_size=7, shuffle=False, verbose=0).history, fit(alone))  # the functions of then

    return use


def dense(*parts):
    return keras.Sequential([keras.Input((4,)), *parts, layers.Dense(2)])


@made_before(*EACH)
def a_model_with_slots_metrics_and_a_sum():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="seen")
            self.total = self.add_variable(shape=(), initializer="zeros")

        def update_state(self, y, outputs, sample_weight=None):
            self.total.assign_add(tf.reduce_sum(tf.abs(y - outputs)))

        def result(self):
            return self.total

    loss = MeanSquaredError(reduction="sum")

    def make():
        model = dense(layers.Dense(3, "tanh", activity_regularizer="l2"))
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae", Largest()])
        return model

    return trains_alike(make)


@made_before(*EACH)
def a_model_that_normalizes_and_accumulates():
    def make():
        inputs = keras.Input((4,))
        x = layers.Masking()(layers.Reshape((2, 2))(inputs))
        x = layers.Flatten()(layers.BatchNormalization(synchronized=True)(x))
        model = keras.Model(inputs, layers.Dense(2)(x))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2), "mse")
        return model

    return trains_alike(make)


class Own(keras.Model):
    """A model whose step takes its gradients and its losses by names of a program."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def ready(self):
        self.build((None, 4))
        self.compile(keras.optimizers.SGD(0.05))
        return self

    def updated(self, loss, found):
        self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
        return {"loss": loss}


@made_before(*EACH)
def a_step_with_a_tape_and_averages():
    class Averaging(Own):
        def train_step(self, data):
            x, y = data
            with GradientTape() as tape:
                loss = compute_average_loss(tf.reduce_mean((self(x) - y) ** 2, 1), global_batch_size=7)
                loss += scale_regularization_loss(tf.reduce_sum(self.dense.kernel**2))
            found = [tf.clip_by_norm(each, 0.5) for each in tape.gradient(loss, self.trainable_variables)]
            return self.updated(loss, found)

    return trains_alike(lambda: Averaging().ready())


@made_before(*EACH)
def a_step_with_gradients_of_a_graph():
    class Clipping(Own):
        def train_step(self, data):
            x, y = data
            loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = [variable.value for variable in self.trainable_variables]
            return self.updated(loss, [tf.clip_by_norm(each, 0.5) for each in gradients(loss, weights)])

    return trains_alike(lambda: Clipping().ready())


@made_before(*EACH)
def functions_of_weights_in_a_callback():
    model = dense()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    fit(model)
    kernel = model.layers[-1].kernel
    traced = tf.function(lambda: tf.reduce_sum(kernel) * 1.0)
    ways = [traced, traced.get_concrete_function(), kernel.numpy, kernel.value.numpy, kernel.value.read_value]
    ways = [*ways, lambda: model(X[:1]), lambda: model.predict(X[:1], verbose=0)]
    for way in ways:
        way()

    def use(strategy):
        seen = []

        class See(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append([np.sum(way()) for way in ways])

        alone = keras.models.clone_model(model)
        alone.compile(keras.optimizers.SGD(0.05), "mse")
        alone.set_weights(model.get_weights())
        expected = []

        class Expect(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                total = np.sum(alone.get_weights()[0])
                expected.append([total] * 5 + [np.sum(alone(X[:1]))] * 2)

        fit(alone, callbacks=[Expect()])
        fit(replicated(model, strategy), callbacks=[See()])
        alike(seen, expected)

    return use


@made_before(MIRRORED, REPLICATE)
def a_backup_of_a_fit_by_a_name():
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("fails")

    model = dense()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    by_name = model.fit
    by_name(X, Y, verbose=0)

    def use(strategy):
        from replica_engine.keras import BackupAndRestore

        before, folder = signal.getsignal(signal.SIGTERM), tempfile.TemporaryDirectory()
        with pytest.raises(RuntimeError, match="fails"):
            by_name(X, Y, epochs=3, verbose=0, callbacks=[Fails(), BackupAndRestore(folder.name)])
        assert signal.getsignal(signal.SIGTERM) is before
        assert by_name(X, Y, epochs=3, verbose=0, callbacks=[BackupAndRestore(folder.name)]).epoch == [0, 1, 2]
        assert by_name(X, Y, epochs=2, verbose=0).epoch == [0, 1]

    return use
