"""The commonest mistakes: what was made outside the scope, or used in the wrong place."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import (
    InputsError,
    NoValueError,
    ScopeError,
)


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


@shows(ScopeError)
def test_a_model_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    strategy.run(step, args=(tf.ones([4, 3]),))


@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Ftrl])
@pytest.mark.parametrize("traced", [False, True])
def test_an_optimizer_outside_the_scope_is_refused_each_time(make, traced):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
    optimizer = make(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def train():
        strategy.run(step, args=(tf.ones([4, 3]),))

    for _ in range(3):
        with pytest.raises(ScopeError, match=f"The optimizer '{optimizer.name}' was made outside"):
            (tf.function(train) if traced else train)()


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch", "predict_on_batch"])
@pytest.mark.parametrize("make", [lambda: MirroredStrategy(["CPU:0", "CPU:1"]), lambda: TPUStrategy(num_cores=2)])
def test_methods_of_a_model_that_run_replicas(make, method):
    strategy = make()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    arrays = [np.ones((4, 3)), np.ones((4, 2))][: 1 if "predict" in method else 2]

    def step():
        getattr(model, method)(*arrays)

    with pytest.raises(
        (ScopeError, InputsError),
        match=r"test_scopes\.py:\d+ in step(?s:.)* of a Keras model run the replicas themselves",
    ):
        strategy.run(step)


@shows(NoValueError)
def test_numpy_in_a_compiled_body():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        print("loss:", x.numpy())
        return x

    strategy.run(step, args=(tf.constant(1.0),))
