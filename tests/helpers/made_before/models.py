"""Keras under a strategy's scope: methods, classes and files that a program had before."""

import logging
import os
import sys
import tempfile
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Model, ops
from keras.models import clone_model, load_model
from keras.optimizers import SGD, Adagrad, LossScaleOptimizer

from helpers.made_before import BOTH, TPU, made_before, shares
from helpers.made_before.control_flow import ONE
from helpers.on_mirrored import locally, numbered, run

fit, evaluate, compile_model = Model.fit, Model.evaluate, Model.compile
RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=(16, size)).astype("float32") for size in (4, 1))


def small(*layers):
    parts = [keras.layers.Dense(3, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1))]
    last = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
    return keras.Sequential([keras.Input((4,)), *parts, *layers, last])


def history(model, epochs=2, **options):
    return fit(model, X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options).history


def alike(found, expected):
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@made_before(*BOTH)
def methods_of_models_by_names_of_ones_own():
    alone = small()
    compile_model(alone, "adam", "mse", metrics=["mae"])
    expected = history(alone), evaluate(alone, X, Y, verbose=0)
    fit(alone, X[:15], Y[:15], batch_size=15, verbose=0)

    def use(strategy):
        with strategy.scope():
            model = small()
        compile_model(model, "adam", "mse", metrics=["mae"])
        alike((history(model), evaluate(model, X, Y, verbose=0)), expected)
        fit(model, X[:15], Y[:15], batch_size=15, verbose=0)  # which does not divide by two replicas
        alike(model.get_weights(), alone.get_weights())

    return use


@made_before(*BOTH)
def a_model_in_a_file_and_its_clone():
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "model.keras")
    plain = small()
    plain.compile(SGD(0.05, momentum=0.9), "mse", steps_per_execution=2)
    history(plain, epochs=1)
    plain.save(path)

    def use(strategy):
        alone = load_model(os.path.join(folder.name, "model.keras"))
        with strategy.scope():
            model, clone = load_model(path), clone_model(plain)
        clone.set_weights(plain.get_weights())
        alike(history(model, epochs=1), history(alone, epochs=1))
        alike(model.get_weights(), alone.get_weights())
        alike(strategy.run(clone, args=(ops.convert_to_tensor(X),)).values, [plain(X)] * 2)

    return use


@made_before(*BOTH)
def classes_of_optimizers_that_accumulate():
    def trained():
        model = small()
        model.compile(SGD(0.05, gradient_accumulation_steps=2), "mse")
        return [history(model), model.get_weights()]

    expected = trained()

    def use(strategy):
        with strategy.scope():
            found = trained()
        alike(found, expected)

    return use


@made_before(*BOTH)
def a_loss_scale_that_replicas_agree_about():
    def made():
        weight = keras.Variable(1.0)
        optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0)
        optimizer.build([weight])
        return weight, optimizer

    plain, optimizer = made()
    optimizer.apply([tf.constant(np.inf)], [plain])
    assert float(plain) == 1.0

    def use(strategy):
        with strategy.scope():
            weight, optimizer = made()
        strategy.run(
            lambda x: optimizer.apply([x], [weight]), args=(shares(strategy, [np.float32(1.0), np.float32("inf")]),)
        )
        assert locally(strategy, weight.value) == [1.0, 1.0]

    return use


class Records(logging.Handler):
    """The warnings of the library, while it is entered."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("replica_engine").addHandler(self)
        return self.texts

    def __exit__(self, *_):
        logging.getLogger("replica_engine").removeHandler(self)


@made_before(*BOTH)
def an_optimizer_of_no_strategy_for_weights_of_one():
    """Replica threads are warned; compiled replicas share one optimizer."""
    optimizers = [SGD(0.5, momentum=0.9) for _ in BOTH]

    def use(strategy):
        optimizer = optimizers.pop()
        with strategy.scope():
            weight = keras.Variable(1.0)
        optimizer.build([weight])
        with Records() as said:
            strategy.run(lambda: optimizer.apply([ONE], [weight]))
        assert any("optimizer" in text for text in said) != strategy.extended.backend.compiles, said

    return use


@made_before(*BOTH)
def operations_of_keras():
    from keras.ops import cond, divide, while_loop

    def step(x):
        x = cond(ops.greater(x, 0.0), lambda: divide(_total(x), 2.0), lambda: x)
        return while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, _total(x)), (0, x))[1]

    traced = tf.function(step)
    assert traced(ONE) == 0.5

    def use(strategy):
        assert run(strategy, lambda x: traced(x), numbered(strategy)) == [6.0, 6.0]

    return use


def _total(x):
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


@made_before(*BOTH)
def a_layer_that_fails_under_fit():
    """The traceback has the user's lines, and none of this library."""

    class Fails(keras.layers.Layer):
        fails = False

        def call(self, x):
            if self.fails:
                raise ValueError("my layer")
            return x

    history(_compiled(small(Fails())), epochs=1)

    def use(strategy):
        with strategy.scope():
            layer = Fails()
            model = _compiled(small(layer))
        layer.fails = True
        with pytest.raises(ValueError, match="my layer") as failure:
            history(model, epochs=1)
        frames = [frame.filename for frame in traceback.extract_tb(failure.value.__traceback__)]
        library = os.path.dirname(sys.modules["replica_engine"].__file__)
        assert not any(name.startswith(library) for name in frames), frames

    return use


def _compiled(model):
    model.compile(SGD(0.05), "mse")
    return model


@made_before(TPU)
def a_table_that_is_divided():
    words = RANDOM.integers(0, 8, size=(16, 2))

    def trained(strategy=None):
        def model():
            parts = [keras.layers.Embedding(8, 4, embeddings_initializer=keras.initializers.GlorotUniform(1))]
            last = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
            return keras.Sequential([keras.Input((2,), dtype="int32"), *parts, keras.layers.Flatten(), last])

        if strategy is None:
            made = model()
        else:
            with strategy.scope():
                made = model()
        compile_model(made, Adagrad(0.5) if strategy is None else "adagrad", "mse")
        made.optimizer.learning_rate = 0.5
        found = fit(made, words, Y, batch_size=8, shuffle=False, verbose=0).history
        return [found, made.get_weights()]

    expected = trained()

    def use(strategy):
        import replica_engine

        alike(trained(replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")), expected)

    return use
