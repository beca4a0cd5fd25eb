"""The replicated model and the original are one model: what is done to either is done to both."""

import copy
import gc
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import crossentropy, dense
from keras import layers

from replica_engine.errors import OptimizerError
from replica_engine.keras import replicate_model

pytestmark = pytest.mark.on("mirrored")  # where nothing else is said

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=16)


def classifier():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, "tanh", name="first"), layers.Dense(3, name="last")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), crossentropy())
    return model


@pytest.fixture(scope="module")
def two(make_pair):
    return make_pair(classifier, 2)


BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def fit(model, data=BATCHES):
    return model.fit(data, shuffle=False, verbose=0).history


def test_they_are_one_model_of_one_class(pair):
    original, replicated = pair.original, pair.replicated
    assert replicated is not original
    assert isinstance(replicated, keras.Sequential)
    assert isinstance(replicated, type(original))
    assert type(replicated).__name__ == type(original).__name__
    assert all(one is other for one, other in zip(replicated.layers, original.layers, strict=True))
    assert all(one is other for one, other in zip(replicated.weights, original.weights, strict=True))
    assert replicated.optimizer is original.optimizer
    assert replicated.name == original.name
    assert replicated.count_params() == original.count_params() == 35
    assert replicated.input_shape == (None, 4)


@pytest.mark.on("mirrored", "tpu")
def test_training_goes_on_from_either_to_the_other(pair, alike):
    """Alternately, several times, with the state of the optimizer: as one model that was trained all along."""
    for model in (pair.replicated, pair.original, pair.replicated):
        alike(fit(model), fit(pair.alone))
        for each in (pair.original, pair.replicated):
            alike(each.get_weights(), pair.alone.get_weights())
        alike(pair.replicated.predict_on_batch(X[:8]), pair.alone(X[:8]).numpy())
        alike(pair.replicated.evaluate(BATCHES, verbose=0), pair.alone.evaluate(BATCHES, verbose=0))
    assert int(pair.original.optimizer.iterations.numpy()) == 6


@pytest.mark.on("mirrored", "tpu")
def test_weights_that_are_set_on_either_count_for_the_other(pair, tmp_path, alike):
    zeros = [np.zeros_like(weight) for weight in pair.original.get_weights()]
    ones = [np.ones_like(weight) for weight in zeros]
    for writer, reader in ((pair.original, pair.replicated), (pair.replicated, pair.original)):
        for weights in (zeros, ones):
            writer.set_weights(weights)
            alike(reader.get_weights(), weights)
            alike(reader.predict_on_batch(X[:8]), np.asarray(writer(X[:8])))
        writer.save_weights(tmp_path / "one.weights.h5")
        writer.set_weights(zeros)
        reader.load_weights(tmp_path / "one.weights.h5")
        alike(writer.predict_on_batch(X[:8]), np.asarray(reader(X[:8])))
        assert np.array_equal(writer.get_weights()[0], ones[0])
        writer.layers[-1].bias.assign([1.0, 2.0, 3.0])
        writer.layers[-1].kernel.assign(zeros[2])
        assert np.array_equal(reader.predict_on_batch(X[:8]), [[1.0, 2.0, 3.0]] * 8)


def test_the_model_can_be_called_and_its_gradient_taken_outside_of_steps(pair, alike):
    fit(pair.replicated)
    fit(pair.alone)
    gradients = []
    for model in pair.both:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X) ** 2)
        gradients.append([gradient.numpy() for gradient in tape.gradient(loss, model.trainable_variables)])
    alike(gradients[1], gradients[0])


def test_it_may_be_a_layer_of_another_model(pair):
    outer = keras.Sequential([keras.Input((4,)), pair.replicated, layers.Softmax()])
    fit(pair.replicated)
    assert np.allclose(outer(X[:3]), keras.ops.softmax(pair.original(X[:3])), atol=1e-6)


def test_copies_are_plain_models(pair, alike):
    fit(pair.replicated)
    for made in (
        copy.deepcopy(pair.replicated),
        pickle.loads(pickle.dumps(pair.replicated)),
        keras.models.clone_model(pair.replicated),
    ):
        assert type(made) is keras.Sequential
        assert made.layers[0] is not pair.original.layers[0]
        made.set_weights(pair.original.get_weights())
        alike(made(X[:8]).numpy(), pair.replicated.predict_on_batch(X[:8]))


def test_a_copy_keeps_the_weights_and_goes_its_own_way(pair):
    fit(pair.replicated)
    before = pair.original.get_weights()
    made = copy.deepcopy(pair.replicated)
    assert all(np.array_equal(one, other) for one, other in zip(made.get_weights(), before, strict=True))
    made.set_weights([weight * 0 for weight in before])
    assert all(np.array_equal(one, other) for one, other in zip(pair.original.get_weights(), before, strict=True))


@pytest.fixture
def fresh(both):
    """The original and the replicated one, for tests that compile."""
    keras.utils.set_random_seed(1)
    original = classifier()
    return original, replicate_model(original, strategy=both(2))


@pytest.mark.on("mirrored", rest="tpu")
def test_compiling_either_compiles_both(fresh, batched):
    original, replicated = fresh
    fit(replicated)
    rows = np.eye(3, dtype="float32")[Y]
    data = batched(8, X, rows)
    for compiled, metric in ((original, "mae"), (replicated, "mape")):
        optimizer = keras.optimizers.SGD(0.0)
        compiled.compile(optimizer, "mse", metrics=[metric])
        before = original.get_weights()
        history = fit(replicated, data)
        assert set(history) == {"loss", metric}
        assert original.optimizer is replicated.optimizer is optimizer
        assert int(optimizer.iterations.numpy()) == 2
        assert np.array_equal(original.get_weights()[0], before[0])
        found = original.test_on_batch(X, rows, return_dict=True)
        assert found[metric] == pytest.approx(history[metric][0], rel=1e-4)


def test_a_model_may_be_compiled_after_it_is_replicated(both):
    model = dense(4, 3)
    replicated = replicate_model(model, strategy=both(2))
    assert np.allclose(replicated.predict_on_batch(X), model(X), atol=1e-5)
    with pytest.raises(ValueError, match="compile"):
        fit(replicated)
    model.compile("sgd", crossentropy())
    assert fit(replicated)["loss"][0] < 10.0


@pytest.mark.on("mirrored", rest="tpu")
def test_a_frozen_layer_stays_from_the_next_call_on(fresh):
    original, replicated = fresh
    first, last = original.layers
    fit(replicated)
    first.trainable = False
    before = first.get_weights()[0], last.get_weights()[0]
    fit(replicated)
    assert np.array_equal(first.get_weights()[0], before[0])
    assert not np.array_equal(last.get_weights()[0], before[1])
    first.trainable = True
    replicated.train_on_batch(X[:8], Y[:8])
    assert not np.array_equal(first.get_weights()[0], before[0])


def test_a_layer_that_the_optimizer_does_not_know_is_named(fresh):
    original, replicated = fresh
    first = original.layers[0]
    first.trainable = False
    fit(replicated)
    before = original.get_weights()
    first.trainable = True
    with pytest.raises(OptimizerError, match=r"weights of first became trainable.*Call compile\(\) again"):
        fit(replicated)
    assert all(np.array_equal(one, other) for one, other in zip(original.get_weights(), before, strict=True))
    original.compile(keras.optimizers.SGD(0.1), crossentropy())
    fit(replicated)
    assert not np.array_equal(first.get_weights()[0], before[0])


@pytest.mark.on("mirrored", "tpu")
def test_a_replicated_model_that_nobody_has_takes_its_threads_with_it(both, alike):
    """The original stays, trained; that threads go is looked at after every test."""
    original = classifier()
    replicated = replicate_model(original, strategy=both(2))
    fit(replicated)
    outputs = replicated.predict_on_batch(X[:8])
    strategy = weakref.ref(replicated.strategy)
    del replicated
    gc.collect()
    assert strategy() is None
    alike(np.asarray(original(X[:8])), outputs)
    assert np.isfinite(original.train_on_batch(X, Y)).all()
