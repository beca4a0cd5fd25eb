"""An exception of the user's own ends the call, with its own type, and leaves model and variables as they were."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import OneLayer, built, compiled, dense
from keras import layers

from replica_engine.keras import replicate_model
from replica_engine.keras.lent_variables import _Shared
from replica_engine.keras.shard_hooks import Hooks

pytestmark = pytest.mark.on("mirrored")  # where nothing else is said

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 4)).astype("float32")
Y = RANDOM.normal(size=(24, 2)).astype("float32")
ALL = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


class Mine(Exception):
    """An exception that nobody else knows."""


def regression():
    return dense(4, 2, keras.optimizers.SGD(0.1, momentum=0.9), "mse")


@pytest.fixture(scope="module")
def two(make_pair):
    return make_pair(regression, 2)


@pytest.fixture
def is_usable(alike):
    """`is_usable(pair)`: both go on alike, and outside of the methods the variables are plain."""

    def is_usable(pair):
        alike(pair.replicated.get_weights(), pair.alone.get_weights())
        assert all(type(variable.value) is type(pair.alone.weights[0].value) for variable in pair.original.weights)
        assert int(pair.original.optimizer.iterations.numpy()) == int(pair.alone.optimizer.iterations.numpy())
        for model in (pair.alone, pair.replicated, pair.original):
            model.reset_metrics()
        expected = pair.alone.fit(ALL, shuffle=False, verbose=0).history
        alike(pair.replicated.fit(ALL, shuffle=False, verbose=0).history, expected)
        expected = pair.alone.fit(ALL, shuffle=False, verbose=0).history
        alike(pair.original.fit(ALL, shuffle=False, verbose=0).history, expected)

    return is_usable


@pytest.mark.parametrize("error", [Mine, KeyboardInterrupt])
def test_an_exception_of_a_callback(pair, is_usable, error):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise error("from a callback")

    for model in pair.both:
        with pytest.raises(error, match="from a callback"):
            model.fit(ALL, shuffle=False, verbose=0, callbacks=[Fails()])
    assert int(pair.original.optimizer.iterations.numpy()) == 2
    is_usable(pair)


class Batches(keras.utils.PyDataset):
    """Two batches, and then an exception."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise Mine("from the data")
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


def generated():
    yield from (Batches()[index] for index in range(3))


@pytest.mark.parametrize("make", [Batches, generated])
def test_an_exception_of_the_data(pair, is_usable, make):
    """Keras has TensorFlow call them, which makes an error of its own of it, with the text in it."""
    types = []
    for model in pair.both:
        with pytest.raises(Exception, match="from the data") as raised:
            model.fit(make(), steps_per_epoch=3, shuffle=False, verbose=0)
        types.append(type(raised.value))
    assert types[1] is types[0]
    assert int(pair.original.optimizer.iterations.numpy()) == 2
    is_usable(pair)


def test_a_batch_of_a_wrong_shape(pair, is_usable):
    for model in pair.both:
        model.train_on_batch(X[:8], Y[:8])
        for wrong in (X[:8, :3], X[:7, :3]):
            # Keras itself raises the one or the other, by what the graph knew when it was traced.
            with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="incompatible"):
                model.train_on_batch(wrong, Y[: len(wrong)])
        model.optimizer.iterations.assign(1)  # Keras may count a step of which another op failed, on one device too
    is_usable(pair)


FAILS = set()


class Failing(OneLayer):
    """Its steps fail while "fails" is in `FAILS`, which is when they are traced; the training step after its update."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self._fail("a step")
        return {"loss": loss}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self._fail("a prediction")
        return self(x)

    def _fail(self, where):
        if "fails" in FAILS:
            raise Mine(f"from {where}")


@pytest.fixture
def failing(both):
    """A model of which steps fail, replicated, and a way to have them fail or not."""
    keras.utils.set_random_seed(1)
    model = built(Failing(), X[:2], keras.optimizers.SGD(0.1))
    FAILS.add("fails")
    yield model, replicate_model(model, strategy=both(2))
    FAILS.clear()


@pytest.mark.on("mirrored", "tpu")
def test_an_exception_of_a_step(failing):
    model, replicated = failing
    before = model.get_weights()
    with pytest.raises(Mine, match="from a step"):
        replicated.fit(ALL, verbose=0)
    with pytest.raises(Mine, match="from a step"):
        replicated.train_on_batch(X[:8], Y[:8])
    with pytest.raises(Mine, match="from a prediction"):
        replicated.predict(X, verbose=0)
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))
    FAILS.clear()
    replicated.fit(ALL, epochs=2, shuffle=False, verbose=0)
    loss = np.mean((np.asarray(model(X)) - Y) ** 2)
    assert loss < np.mean((X @ before[0] + before[1] - Y) ** 2)
    assert int(model.optimizer.iterations.numpy()) == 6
    np.testing.assert_allclose(replicated.predict_on_batch(X[:8]), model(X[:8]), rtol=1e-4, atol=1e-5)


@pytest.mark.on("tpu")
def test_an_exception_of_a_step_that_runs_eagerly(both, alike):
    keras.utils.set_random_seed(1)
    model = built(Failing(), X[:2], keras.optimizers.SGD(0.1), run_eagerly=True)
    replicated = replicate_model(model, strategy=both(2))
    before = model.get_weights()
    replicated.train_on_batch(X[:8], Y[:8])
    assert not np.array_equal(model.get_weights()[0], before[0])
    FAILS.add("fails")
    try:
        with pytest.raises(Mine, match="from a step"):
            replicated.train_on_batch(X[8:17], Y[8:17])  # 9 samples: for XLA a program of its own
    finally:
        FAILS.clear()
    replicated.train_on_batch(X[:8], Y[:8])
    alike(replicated.predict_on_batch(X[:8]), model(X[:8]).numpy())


@pytest.mark.on("mirrored", "tpu")
def test_an_op_that_fails_in_a_step(both, is_tpu):
    """Checks are ops of graphs, and of no compiled program."""
    check = (lambda x: x) if is_tpu else (lambda x: tf.debugging.check_numerics(x, "from an op"))
    keras.utils.set_random_seed(1)
    model = compiled([keras.Input((4,)), layers.Lambda(check), layers.Dense(2)], "sgd", "mse")
    replicated = replicate_model(model, strategy=both(2))
    replicated.train_on_batch(X[:8], Y[:8])
    before = model.get_weights()
    x = X[:8].copy()
    x[7] = np.nan
    if is_tpu:
        assert np.isnan(replicated.train_on_batch(x, Y[:8]))
        model.set_weights(before)
        model.reset_metrics()
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="from an op"):
            replicated.train_on_batch(x, Y[:8])
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))
    replicated.reset_metrics()
    assert np.isfinite(replicated.train_on_batch(X[:8], Y[:8]))
    assert np.isfinite(model.train_on_batch(X[:8], Y[:8]))


def out_of_memory():
    return tf.errors.ResourceExhaustedError(None, None, "out of memory")


@pytest.mark.on("mirrored", "tpu")
@pytest.mark.parametrize(
    ("what", "make"),
    [("spread", KeyboardInterrupt), ("spread", out_of_memory), ("__init__", out_of_memory), ("gather", Mine)],
)
def test_a_failure_while_the_model_is_given_to_the_replicas_or_back(both, alike, monkeypatch, what, make):
    """At the first variable, at the second, and so on: the original works afterwards, and so does the other one."""

    def variables(model):
        return [variable.value for variable in (*model.variables, *model.optimizer.variables)]

    original, other = regression(), regression()
    other.set_weights(original.get_weights())
    for model in (original, other):
        model.fit(ALL, shuffle=False, verbose=0)
    own, function = getattr(_Shared, what), original.train_function
    strategy = both(2)
    for failing in range(len(variables(original))):
        replicated = replicate_model(original, strategy=strategy)
        calls = itertools.count()

        def fails(self, *args, failing=failing, calls=calls):
            if next(calls) == failing:
                raise make()
            return own(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(_Shared, what, fails)
            with pytest.raises(type(make())):
                replicated.predict_on_batch(X[:2])
        assert not any(isinstance(each, tf.distribute.DistributedValues) for each in variables(original))
        assert original.train_function is function
        assert original.optimizer._distribution_strategy is other.optimizer._distribution_strategy
    for model in (original, replicated):
        alike(model.fit(ALL, shuffle=False, verbose=0).history, other.fit(ALL, shuffle=False, verbose=0).history)


def test_a_failure_when_an_outer_model_is_given_back_to_its_replicas(pair, is_usable, both, monkeypatch):
    """In a callback of one replicated model, another one of the same original has run."""
    inner, own, calls = replicate_model(pair.original, strategy=both(2)), Hooks.put, []

    class UsesInner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            monkeypatch.setattr(Hooks, "put", fails)
            inner.predict_on_batch(X[:2])

    def fails(self):
        calls.append(self)
        if self is not calls[0]:
            raise Mine("no room")
        own(self)

    pair.alone.fit(ALL, shuffle=False, verbose=0)
    with pytest.raises(Mine, match="no room"):
        pair.replicated.fit(ALL, shuffle=False, verbose=0, callbacks=[UsesInner()])
    monkeypatch.undo()
    is_usable(pair)


@pytest.fixture
def checks():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def test_a_check_of_all_ops_that_finds_nan(both, checks):
    """What the step has written by then is data, which the check of all ops does not look at while it goes back."""

    def logarithm(x):
        return tf.math.log(x * 0.0 - 1.0)

    model = compiled([keras.Input((4,)), layers.Lambda(logarithm), layers.Dense(2)], "sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="in logarithm"):
        replicate_model(model, strategy=both(2)).fit(X[:8], Y[:8], verbose=0)


@pytest.mark.on("mirrored", "tpu")
def test_values_that_are_nan_go_to_the_replicas_and_back_under_a_check_of_all_ops(both, checks):
    model = regression()
    model.fit(ALL, verbose=0)
    total = model.metrics[0].variables[0]
    total.assign(np.nan)
    replicated = replicate_model(model, strategy=both(2))
    for _ in range(10):  # also when it is done by a graph
        assert np.isfinite(replicated.predict_on_batch(X[:8])).all()
    replicated.reset_metrics()
    assert np.isfinite(replicated.train_on_batch(X[:8], Y[:8]))


def test_what_fails_while_the_model_is_left_does_not_hide_the_exception(both, monkeypatch):
    own, raised = _Shared.gather, []

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raised.append(Mine("from a callback"))
            raise raised[0]

    def gather(self):
        if raised:
            raise OSError("no room")
        own(self)

    monkeypatch.setattr(_Shared, "gather", gather)
    with pytest.raises(Mine, match="from a callback") as found:
        replicate_model(regression(), strategy=both(2)).fit(ALL, verbose=0, callbacks=[Fails()])
    assert found.value.__notes__ == ["also failed, while giving the model back: OSError: no room"]
