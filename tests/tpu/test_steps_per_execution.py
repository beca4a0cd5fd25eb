"""Keras' `steps_per_execution` under TPUStrategy: the same steps, in fewer launches."""

import gc
import math
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_steps import OwnStep, dense

from replica_engine import TPUStrategy, xla

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 4)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")).astype("float32")

# As in test_keras_fit.py: gradients are summed in another order than on one device.
LOSS = {"rtol": 2e-5}
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def build(steps, *more, rate=0.05, **options):
    model = keras.Sequential([keras.Input((4,)), *more, dense(1, 1)])
    model.compile(keras.optimizers.SGD(rate), "mse", steps_per_execution=steps, **options)
    return model


def on_one_device(steps=1, **options):
    """The same model under no strategy; eager, which saves the time to trace it."""
    return build(steps, run_eagerly=True, **options)


def scheduled(steps, **options):
    """A model whose learning rate depends on how many steps its optimizer has counted."""
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([2, 7], [0.02, 0.1, 0.05])
    return build(steps, rate=rates, **options)


def batches(*data, size=8):
    """Of arrays Keras would make a pipeline for each call, which takes long."""
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def fit(model, data=None, **options):
    return model.fit(batches(X, Y) if data is None else data, verbose=0, shuffle=False, **options).history


def count_steps(model):
    return int(model.optimizer.iterations.numpy())


def same(found, expected):
    """Whether two models came to the same, of their histories and themselves."""
    (history, model), (expected_history, other) = found, expected
    assert set(history) == set(expected_history)
    for key, values in expected_history.items():
        np.testing.assert_allclose(history[key], values, err_msg=key, **LOSS)
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, **CLOSE)


@pytest.fixture(scope="module")
def models(replicas):
    """Models by steps per execution and whether they are on two replicas, and the weights that they had first."""
    return {}, replicas(2).strategy


@pytest.fixture
def shared(models):
    """`shared(steps)`: `build(steps)` under two replicas as it was first, for tests to share: compiling it takes long.

    `shared(steps, alone=True)` is `on_one_device(steps)`.
    """

    def shared(steps, alone=False):
        made, strategy = models
        if (steps, alone) not in made:
            if alone:
                model = on_one_device(steps)
            else:
                with strategy.scope():
                    model = build(steps)
            made[steps, alone] = model, model.get_weights()
        model, weights = made[steps, alone]
        model.set_weights(weights)
        model.optimizer.iterations.assign(0)
        model.stop_training = False
        return model

    return shared


@pytest.fixture(scope="module")
def alone():
    """The history of two epochs on one device, and the model."""
    model = scheduled(1, run_eagerly=True)
    return fit(model, epochs=2), model


@pytest.fixture(scope="module")
def plain():
    """The history of one epoch of the plain model on one device, and the model."""
    model = on_one_device()
    return fit(model), model


@pytest.fixture(scope="module")
def one_by_one():
    """The history and weights of two epochs on two replicas, with one step per execution, and the launches.

    The learning rate depends on the steps that the devices have counted, there too.
    """
    with TPUStrategy(num_cores=2).scope():
        model = scheduled(1)
    before = xla.counts()
    history = fit(model, epochs=2)
    return history, model.get_weights(), (xla.counts() - before).launches


# The same steps.


@pytest.mark.parametrize(("size", "steps", "jit_compile"), [(1, 100, False), (2, 4, True)])
def test_training_comes_to_the_same_in_fewer_launches(replicas, alone, one_by_one, launched, size, steps, jit_compile):
    with replicas(size).strategy.scope():
        model = scheduled(steps, jit_compile=jit_compile)
    history = fit(model, epochs=2)
    assert launched() == 2 * math.ceil(6 / steps)
    assert one_by_one[2] == 2 * 6
    assert count_steps(model) == 12
    same((history, model), alone)
    np.testing.assert_allclose(history["loss"], one_by_one[0]["loss"], **LOSS)
    for found, expected in zip(model.get_weights(), one_by_one[1], strict=True):
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_text_that_a_layer_splits_and_looks_up(scoped):
    texts = tf.constant(["a b c", "b a", "c c a b a b a", "d", "", "a", "c b", "b b"])

    def make(steps, **options):
        vectorize = keras.layers.TextVectorization(output_sequence_length=6, vocabulary=["a", "b", "c"])
        embed = keras.layers.Embedding(5, 1, keras.initializers.GlorotUniform(1))
        model = keras.Sequential([keras.Input((), dtype="string"), vectorize, embed, keras.layers.Flatten()])
        model.compile("sgd", "mse", steps_per_execution=steps, **options)
        return model

    models = make(1, run_eagerly=True), scoped(make, 2)
    alone, two = (fit(model, batches(texts, tf.zeros([8, 6]), size=4))["loss"] for model in models)
    np.testing.assert_allclose(two, alone, **LOSS)


def test_what_is_random_is_what_it_is_step_by_step(scoped):
    histories, weights = [], []
    for steps in (1, 3):
        keras.utils.set_random_seed(1)
        model = scoped(build, steps, keras.layers.Dropout(0.5))
        histories.append(fit(model)["loss"])
        weights.append(model.get_weights())
    np.testing.assert_allclose(*histories, rtol=1e-6)
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_custom_training_step_may_have_collectives_and_logs_of_any_structure(scoped, launched):
    def make(steps, **options):
        model = OwnStep()
        model.compile(steps_per_execution=steps, **options)
        return model

    ends = [[], []]
    models = scoped(make, 3), make(3, run_eagerly=True)
    for model, seen in zip(models, ends, strict=True):
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, seen=seen: seen.append(logs))
        seen.append(fit(model, callbacks=[callback]))
    assert launched() == 2
    same((ends[0].pop(), models[0]), (ends[1].pop(), models[1]))
    assert [logs["number"] for logs in ends[0]] == [3] * 2  # Keras flattens them
    for logs, expected in zip(*ends, strict=True):
        for name in ("own", "loss"):
            np.testing.assert_allclose(logs[name], expected[name], **LOSS)


def test_a_model_of_several_inputs_and_outputs_in_dictionaries(scoped, launched):
    def make():
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        outputs = {"p": dense(1, 1)(keras.layers.Concatenate()([a, b])), "q": dense(1, 2)(a)}
        model = keras.Model({"a": a, "b": b}, outputs)
        model.compile(keras.optimizers.SGD(0.05), {"p": "mse", "q": "mae"}, steps_per_execution=4)
        return model

    model, other = scoped(make), make()
    other.run_eagerly = True
    data = batches({"a": X, "b": X[::-1]}, {"p": Y, "q": Y[::-1]})
    same((fit(model, data), model), (fit(other, data), other))
    assert launched() == 2


# Data.


def dataset(*parts):
    """The samples, in batches of these sizes."""
    ends = np.cumsum(parts)
    batches = [(X[end - size : end], Y[end - size : end]) for end, size in zip(ends, parts, strict=True)]
    signature = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def test_a_data_set_may_end_inside_an_execution(shared, launched):
    model, other = shared(3), shared(3, alone=True)
    data = dataset(*[8] * 5)  # whose length Keras does not know
    same((fit(model, data, epochs=2), model), (fit(other, data, epochs=2), other))
    assert count_steps(model) == 10
    assert launched() == 4


def test_batches_of_several_shapes_are_run_shape_by_shape(shared, launched):
    """The last one too, if it splits evenly."""
    model, other = shared(4), shared(1, alone=True)
    data = dataset(8, 8, 4, 4, 8, 4)
    same((fit(model, data), model), (fit(other, data), other))
    assert count_steps(model) == 6
    assert launched() == 2 + 2  # (8, 8) and (4, 4), then 8 and 4


def test_a_data_set_goes_on_from_epoch_to_epoch(shared, launched):
    """With three steps an epoch, which Keras rounds up to executions of two."""
    model, other = shared(2), shared(2, alone=True)
    data = dataset(*[8] * 6).repeat()
    options = {"epochs": 3, "steps_per_epoch": 3}
    same((fit(model, data, **options), model), (fit(other, data, **options), other))
    assert count_steps(model) == 12
    assert launched() == 6


def test_samples_have_weights(scoped, plain, launched):
    model, other = scoped(build, 3, weighted_metrics=["mae"]), on_one_device(weighted_metrics=["mae"])
    data = batches(X, Y, np.linspace(0.0, 2.0, 48))
    found, expected = fit(model, data), fit(other, data)
    same((found, model), (expected, other))
    assert launched() == 2
    assert found["loss"] != pytest.approx(plain[0]["loss"], rel=1e-2)


def test_a_last_batch_that_does_not_split_evenly_is_a_launch_of_its_own(shared, launched):
    """43 = 5 * 8 + 3."""
    model = shared(4)
    fit(model, batches(X[:43], Y[:43]).filter(lambda *_: True))  # nobody knows before that the rest comes
    assert count_steps(model) == 6
    assert launched() == 3


def test_an_error_of_the_data_is_raised_after_the_steps_before_it(shared):
    def batches():
        yield from [(X[:8], Y[:8])] * 4
        raise KeyError("mine")

    signature = (tf.TensorSpec([8, 4]), tf.TensorSpec([8, 1]))
    model = shared(3)
    with pytest.raises(tf.errors.UnknownError, match="KeyError: 'mine'"):
        fit(model, tf.data.Dataset.from_generator(batches, output_signature=signature))
    assert count_steps(model) == 4
    fit(model)
    assert count_steps(model) == 10


# Evaluation and prediction.


def test_evaluation_takes_partial_batches(scoped, launched):
    """Of 41 = 5 * 8 + 1 the last batch splits unevenly, and is run by itself; that of 44 has another shape."""
    model = scoped(build, 3, metrics=["mae"])
    expected, launches = on_one_device()(X).numpy(), 0
    for count, more in ((44, 3), (41, 3)):
        found = model.evaluate(batches(X[:count], Y[:count]), verbose=0, return_dict=True)
        assert found["loss"] == pytest.approx(np.mean((expected - Y)[:count] ** 2), rel=1e-5)
        assert found["mae"] == pytest.approx(np.mean(np.abs(expected - Y)[:count]), rel=1e-5)
        launches += more
        assert launched() == launches


def test_prediction_takes_all_samples(shared):
    model, other = shared(3), shared(1, alone=True)
    np.testing.assert_allclose(model.predict(X[:21], 8, verbose=0), other(X[:21]), **CLOSE)


def test_a_batch_by_itself_is_one_step(shared, launched):
    model, other = shared(3), shared(3, alone=True)
    for one, two in ((model.train_on_batch, other.train_on_batch), (model.test_on_batch, other.test_on_batch)):
        np.testing.assert_allclose(one(X[:8], Y[:8]), two(X[:8], Y[:8]), **LOSS)
    assert count_steps(model) == 1
    assert launched() == 2


# Callbacks.


class Notes(keras.callbacks.Callback):
    """Notes batches, and what there is at their ends."""

    def __init__(self):
        super().__init__()
        self.batches, self.losses, self.kernels = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(("train begins", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(("train ends", batch, count_steps(self.model)))
        self.losses.append(logs["loss"])
        self.kernels.append(self.model.layers[0].kernel.numpy())

    def on_test_batch_begin(self, batch, logs=None):
        self.batches.append(("test begins", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.batches.append(("test ends", batch))
        self.losses.append(logs["loss"])


def test_callbacks_are_called_once_an_execution_and_validation_is_too(shared):
    """As Keras does on one device with as many steps per execution; 20 = 2 * 8 + 4 samples validate."""
    model, other = shared(4), shared(4, alone=True)
    notes, expected = Notes(), Notes()
    options = {"epochs": 2, "validation_data": batches(X[:20], Y[:20])}
    found = fit(model, callbacks=[notes], **options)
    same((found, model), (fit(other, callbacks=[expected], **options), other))
    assert notes.batches[:4] == [("train begins", 0), ("train ends", 3, 4), ("train begins", 4), ("train ends", 7, 6)]
    assert notes.batches == expected.batches
    np.testing.assert_allclose(notes.losses, expected.losses, **LOSS)
    np.testing.assert_allclose(notes.kernels, expected.kernels, **CLOSE)


def test_a_callback_stops_training_after_an_execution_and_the_next_one_starts_again(shared):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    model, other = shared(2), shared(2, alone=True)
    for each in (model, other):
        fit(each, callbacks=[Stops()])
        assert count_steps(each) == 2
    same((fit(model), model), (fit(other), other))


# Where nothing changes.


def test_a_model_that_runs_eagerly_is_compiled_all_the_same(scoped, plain, launched):
    model = scoped(build, 3, run_eagerly=True)
    same((fit(model), model), plain)
    assert launched() == 2


@pytest.mark.parametrize("kind", [None, tf.distribute.MirroredStrategy])
def test_models_of_no_strategy_and_of_others_have_the_function_of_keras(two, kind):
    with two.strategy.scope():
        pass
    devices = [device.name for device in tf.config.list_logical_devices("CPU")[:2]]
    with kind(devices).scope() if kind else tf.device(devices[0]):
        model = build(3)
    model.make_train_function()
    model.make_test_function()
    for function in (model.train_function, model.test_function):
        assert function.__module__.startswith("keras.")
        assert "replica_engine" not in repr(function.__closure__)


def test_a_fit_that_is_over_frees_its_iterator_and_then_the_model(two, scoped):
    """The iterator with the model alive, the model before its strategy, as with one step per execution.

    An old iterator takes long to delete.
    """
    model = scoped(build, 2)
    fit(model, batches(X[:16], Y[:16]))
    gc.collect()
    assert not [one for one in gc.get_objects() if tf.distribute.DistributedIterator in type(one).__mro__]
    assert count_steps(model) == 2
    freed = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert freed() is None
