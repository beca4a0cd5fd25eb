"""A `tf.function` over the model that was traced before `fit` and is called in a callback: the weights of that moment.

It has captured the plain variables. While a method runs on replicas, values live elsewhere: on devices, or one a
replica. What such a function writes reaches the training.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.versions import HAS_XLA

import replica_engine
from replica_engine.keras import replicate_model

X, Y = np.ones([8, 1], "float32"), -np.ones([8, 1], "float32")
X[4:] = 3.0  # the replicas of a batch see other samples
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat(2)

STRATEGIES = {
    "threads": lambda: replica_engine.MirroredStrategy(DEVICES[:2]),
    "threads, other devices": lambda: replica_engine.MirroredStrategy(DEVICES[1:3]),
}
if HAS_XLA:
    STRATEGIES["compiled"] = lambda: replica_engine.TPUStrategy(num_cores=2)
    STRATEGIES["fsdp"] = lambda: replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")


@pytest.fixture(params=STRATEGIES, scope="module")
def on(request):
    strategy = STRATEGIES[request.param]()
    strategy.run(lambda: None)  # so that its threads are there before a test that looks for new ones
    return strategy


def make(strategy=None, norm=False):
    layers = [keras.layers.Dense(1, kernel_initializer="ones" if norm else "zeros", use_bias=False)]
    # Synchronized: the moving statistics are those of one device.
    layers = [keras.layers.BatchNormalization(momentum=0.5, synchronized=True), *layers] if norm else layers
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model, model if strategy is None else replicate_model(model, strategy=strategy)


def in_callbacks(call, strategy, use, norm=False):
    """What a function gives before and after a method, and in each callback of it; `use(model)` makes the function."""
    model, used = make(strategy, norm)
    see = use(model)
    seen = [see()]

    def note(*_, **__):
        seen.append(see())

    class Others(keras.callbacks.Callback):
        on_test_batch_end = on_predict_batch_end = on_train_end = note

    of_batches = keras.callbacks.LambdaCallback(on_train_batch_end=note, on_epoch_end=note)
    call(used, [of_batches, Others()])
    return [*seen, see()], model.get_weights()


def fit(model, callbacks):
    model.fit(DATA, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)


def evaluate(model, callbacks):
    fit(model, [])
    model.evaluate(DATA, verbose=0, callbacks=callbacks)


def predict(model, callbacks):
    fit(model, [])
    model.predict(DATA.map(lambda x, y: x), verbose=0, callbacks=callbacks)


def output(**options):
    def use(model):
        generate = tf.function(lambda x: model(x), **options)
        generate(X[:2])
        return lambda: generate(X[:2]).numpy()

    return use


def concrete(model):
    generate = tf.function(lambda x: model(x)).get_concrete_function(tf.TensorSpec([2, 1]))
    return lambda: generate(tf.constant(X[:2])).numpy()


def nested(model):
    inner = tf.function(lambda x: model(x))
    outer = tf.function(lambda x: tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y + inner(x)), (0, 0.0 * x)))
    outer(X[:2])
    return lambda: outer(X[:2])[1].numpy()


def gradient(model):
    loss = tf.function(lambda x: tf.reduce_sum(model(x) ** 2))
    loss(X[:2])

    def see():
        with tf.GradientTape() as tape:
            x = tf.constant(X[:2])
            tape.watch(x)
            value = loss(x)
        return tape.gradient(value, x).numpy()

    return see


def of_optimizer(model):
    read = tf.function(lambda: [tf.cast(tf.convert_to_tensor(each), "float32") for each in model.optimizer.variables])
    read()
    return lambda: np.concatenate([np.ravel(each) for each in read()])


def of_metrics(model):
    read = tf.function(lambda: model.metrics[0].result())
    read()
    return lambda: read().numpy()


def assigns(model):
    shrink = tf.function(lambda: model.layers[-1].kernel.assign(model.layers[-1].kernel * 0.5))
    shrink()
    return lambda: np.array(shrink())


def assigns_through_jit(model):
    kernel = model.layers[-1].kernel

    @tf.function(jit_compile=True)
    def shrink(by):
        kernel.assign_add(by)
        return tf.convert_to_tensor(kernel)

    shrink(0.0)
    return lambda: shrink(0.25).numpy()


def sets_weights(model):
    generate = tf.function(lambda x: model(x))
    generate(X[:2])

    def see():
        model.set_weights([weight * 0.5 for weight in model.get_weights()])
        model.layers[-1].kernel.assign_add([[0.125]])
        return generate(X[:2]).numpy()

    return see


READ = {
    "called": output(),
    "jit_compile": output(jit_compile=True),
    "concrete": concrete,
    "nested": nested,
    "gradient": gradient,
    "optimizer": of_optimizer,
    "metrics": of_metrics,
    "eager": lambda model: lambda: model(X[:2]).numpy(),
    "predict": lambda model: lambda: model.predict(X[:2], verbose=0),
}
WRITE = {"assigns": assigns, "assigns, jit_compile": assigns_through_jit, "set_weights": sets_weights}


def all_of(kinds):
    """One after the other, each of which sees what those before it have written."""

    def use(model):
        uses = {name: kind(model) for name, kind in kinds.items()}
        return lambda: {name: see() for name, see in uses.items()}

    return use


reads, writes = all_of(READ), all_of(WRITE)


def called(model):
    see = READ["called"](model)
    return lambda: {"called": see()}


EXPECTED = {}


def alike(call, strategy, use, norm=False):
    key = call, use, norm
    if key not in EXPECTED:
        EXPECTED[key] = in_callbacks(call, None, use, norm)
    (found, weights), (right, of_one) = in_callbacks(call, strategy, use, norm), EXPECTED[key]
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        one, other = ({"": each} if not isinstance(each, dict) else each for each in (one, other))
        for name in other:  # sums over replicas have another order
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for one, other in zip(weights, of_one, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_reads_in_a_callback_of_fit_sees_the_values_of_that_moment(on):
    """Weights, the optimizer's variables, and metrics of all replicas, which keep counting."""
    alike(fit, on, reads)


def test_what_writes_in_a_callback_of_fit_reaches_the_training(on):
    alike(fit, on, writes)


@pytest.mark.parametrize("call", [evaluate, predict])
def test_so_it_does_in_callbacks_of_evaluate_and_predict(on, call):
    alike(call, on, called)


def test_moving_statistics_are_those_of_one_device(on):
    alike(fit, on, called, norm=True)


# On threads on other devices the function captures a copy, and is of those replicas only.
FROM_TO = {"threads": ("compiled", "threads, other devices"), "compiled": ("fsdp", "threads"), "fsdp": ("compiled",)}


@pytest.mark.parametrize(
    ("first", "second"),
    [(first, second) for first, others in FROM_TO.items() for second in others if {first, second} <= {*STRATEGIES}],
)
def test_a_function_traced_in_a_callback_serves_other_replicas_later(first, second):
    """It was traced with the variables of one strategy, and is called in a callback of another one."""
    model, used = make(STRATEGIES[first]())
    generate = tf.function(lambda x: model(x))
    seen = []

    def see(*_, **__):
        seen.append((generate(X[:2]).numpy(), X[:2] @ model.get_weights()[0]))

    for trained, epochs in ((used, 1), (replicate_model(model, strategy=STRATEGIES[second]()), 2)):
        trained.fit(DATA, epochs=epochs, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=see)])
    assert len(seen) == 3
    for found, right in seen:
        np.testing.assert_allclose(found, right, rtol=1e-5)
