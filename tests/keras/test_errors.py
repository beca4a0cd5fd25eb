"""What cannot be replicated is refused, in words that say what to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import OneLayer, built, compiled, dense
from keras import layers

import replica_engine
from replica_engine import logical_devices
from replica_engine.errors import BatchError, DeviceError, ReplicaEngineError, ReplicateError
from replica_engine.keras import replicate_model


def small():
    return dense(4, 1, "sgd", "mse", name="small")


@pytest.mark.parametrize("make", [lambda: keras.Sequential([layers.Dense(1)]), OneLayer], ids=["late", "own"])
def test_a_model_without_variables_has_to_be_built_first(both, make):
    model = make()
    text = rf"'{model.name}' is not built.*keras\.Input.*call it on a batch"
    with pytest.raises(ReplicateError, match=text) as raised:
        replicate_model(model, strategy=both(2))
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, ReplicaEngineError)


@pytest.mark.on("mirrored")
def test_a_model_that_was_called_is_replicated(both):
    model = OneLayer(1)
    model(np.zeros((1, 4)))
    assert replicate_model(model, strategy=both(2)).predict_on_batch(np.zeros((3, 4))).tolist() == [[0.0]] * 3


@pytest.mark.parametrize("given", [None, 3, "model", keras.layers.Dense(1), small, keras.Sequential, tf.Module()])
def test_only_keras_models_are_replicated(given):
    with pytest.raises(ReplicateError, match=r"takes a Keras 3 model \(keras\.Model\); got "):
        replicate_model(given)


@pytest.mark.parametrize("replicas", [0, -1, True, "2", 2.0])
def test_replicas_are_a_positive_int(replicas):
    with pytest.raises(ReplicateError, match=f"replicas must be a positive int.*got {replicas!r}"):
        replicate_model(small(), replicas)


def test_a_strategy_in_the_place_of_the_number_of_replicas(both):
    said = r"second argument .* got \w+Strategy.*\. Write replicate_model\(model, strategy=strategy\)\."
    with pytest.raises(ReplicateError, match=said):
        replicate_model(small(), both(2))


def test_there_are_as_many_replicas_as_asked_for_where_no_strategy_is_given():
    for count in (1, np.int64(2), 3):
        assert replicate_model(small(), count).strategy.num_replicas_in_sync == count
        assert replicate_model(small(), replicas=count).predict_on_batch(np.zeros((2, 4))).shape == (2, 1)


@pytest.mark.parametrize("layer", ["Dense", "Conv1D"])
def test_more_replicas_than_devices_say_how_to_get_more(layer):
    """Whichever strategy is chosen: dense models run on XLA, convolutions on threads."""
    part = layers.Dense(1) if layer == "Dense" else layers.Conv1D(1, 1)
    model = keras.Sequential([keras.Input((4, 1)), part])
    with pytest.raises((ReplicateError, DeviceError), match="5000") as raised:
        replicate_model(model, 5000)
    assert "devices" in str(raised.value)


def test_a_strategy_of_another_size_is_refused(both):
    strategy = both(2)
    with pytest.raises(ReplicateError, match=rf"4 replicas.*{type(strategy).__name__} that was given has 2"):
        replicate_model(small(), 4, strategy)
    assert replicate_model(small(), 2, strategy).strategy is strategy


@pytest.mark.parametrize(
    "make",
    [
        lambda: "mirrored",
        lambda: replica_engine.MirroredStrategy,
        lambda: tf.distribute.MirroredStrategy(logical_devices(2)),
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        tf.distribute.get_strategy,
        lambda: 2,
    ],
)
def test_only_strategies_of_this_library_are_taken(make):
    with pytest.raises(ReplicateError, match=r"MirroredStrategy or TPUStrategy of replica_engine.*got "):
        replicate_model(small(), strategy=make())


def test_a_model_of_a_strategy_is_refused(both):
    with both(2).scope():
        model = small()
    with pytest.raises(ReplicateError, match=r"'small' was built under strategy\.scope\(\).*outside of the scope"):
        replicate_model(model, strategy=both(2))


def test_a_replicated_model_is_not_replicated_again(both):
    replicated = replicate_model(small(), strategy=both(2))
    with pytest.raises(ReplicateError, match=r"'small' is replicated already\. Replicate the original"):
        replicate_model(replicated, strategy=both(2))


@pytest.mark.on("tpu")
def test_a_batch_size_that_is_part_of_the_model_is_refused_for_more_than_one_replica(both):
    def fixed():
        return compiled([keras.Input(batch_shape=(6, 4), name="pixels"), layers.Dense(1)], "sgd", "mse")

    with pytest.raises(
        ReplicateError,
        match=r"'pixels' has a fixed batch size of 6.*4 replicas would get 2 samples.*keras\.Input\(shape",
    ):
        replicate_model(fixed(), strategy=both(4))
    one = replicate_model(fixed(), strategy=both(1))
    assert one.predict(np.zeros((6, 4)), 6, verbose=0).shape == (6, 1)
    assert np.isfinite(one.train_on_batch(np.zeros((6, 4)), np.zeros((6, 1))))


def called():
    model = keras.Sequential([layers.Dense(1)])
    model(np.zeros((2, 4)))
    return model


def by_build():
    model = keras.Sequential([layers.Dense(1)])
    model.build((2, 4))
    return model


def by_fit():
    model = compiled([layers.Dense(1)], "sgd", "mse")
    model.fit(np.zeros((6, 4)), np.zeros((6, 1)), batch_size=3, verbose=0)
    return model


def longer():
    model = called()
    model.add(keras.Sequential([layers.Dense(1)]))
    model(np.zeros((2, 4)))
    return model


def loaded(path):
    called().save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


OF_DATA = {
    "called": lambda _: called(),
    "built": lambda _: by_build(),
    "fit": lambda _: by_fit(),
    "with a layer added": lambda _: longer(),
    "in another one": lambda _: keras.Sequential([called(), layers.Dense(1)]),
    "loaded": loaded,
    "cloned": lambda _: keras.models.clone_model(called()),
}


@pytest.mark.on("mirrored")
@pytest.mark.parametrize("kind", OF_DATA)
def test_the_size_of_the_first_data_is_no_batch_size_of_the_model(both, kind, tmp_path):
    model = OF_DATA[kind](tmp_path)
    model(np.zeros((2, 4)))
    replicated = replicate_model(model, strategy=both(2))
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    for size in (1, 3, 7):
        found = replicated.predict(x, batch_size=size, verbose=0)
        np.testing.assert_allclose(found, model(x).numpy(), rtol=1e-5, atol=1e-6)


def in_the_middle():
    inputs = keras.Input((4,), batch_size=6)
    model = keras.Sequential([keras.Model(inputs, layers.Dense(1)(inputs)), layers.Dense(1)])
    model.build((6, 4))
    return model


def stateful():
    model = keras.Sequential([layers.LSTM(1, stateful=True)])
    model(np.zeros((6, 2, 4)))
    return model


GIVEN = {
    "batch_shape": lambda: keras.Sequential([keras.Input(batch_shape=(6, 4)), layers.Dense(1)]),
    "batch_size": lambda: keras.Sequential([keras.Input((4,), batch_size=6, dtype="float32"), layers.Dense(1)]),
    "a layer": lambda: keras.Sequential([layers.InputLayer(batch_shape=(6, 4)), layers.Dense(1)]),
    "of the first part": in_the_middle,
    "of states": stateful,
}


@pytest.mark.on("mirrored")
@pytest.mark.parametrize("kind", GIVEN)
def test_a_batch_size_that_somebody_gave_is_one_of_the_model(both, kind):
    with pytest.raises(ReplicateError, match=r"has a fixed batch size of 6.*2 replicas would get 3 samples"):
        replicate_model(GIVEN[kind](), strategy=both(2))


@pytest.mark.on("mirrored")
def test_arrays_of_different_lengths_are_named_with_their_lengths(both):
    replicated = replicate_model(small(), strategy=both(2))
    x, y = np.zeros((6, 4), "float32"), np.zeros((5, 1), "float32")
    with pytest.raises(BatchError, match=r"same number of samples: x has 6, y has 5"):
        replicated.train_on_batch(x, y)
    with pytest.raises(BatchError, match=r"x has 6, y has 6, sample_weight has 2"):
        replicated.test_on_batch(x, np.zeros((6, 1), "float32"), sample_weight=np.ones(2))
    with pytest.raises(ValueError, match="5"):
        replicated.fit(x, y, verbose=0)
    assert np.isfinite(replicated.train_on_batch(x[:5], y))


@pytest.mark.on("mirrored")
def test_inputs_of_a_wrong_shape_raise_what_keras_raises(both):
    model = small()
    replicated = replicate_model(model, strategy=both(2))
    texts = []
    for given in (model, replicated):
        with pytest.raises(ValueError, match="expected") as raised:
            given.predict(np.zeros((6, 5), "float32"), verbose=0)
        texts.append(type(raised.value))
    assert texts[0] is texts[1]
    assert replicated.predict(np.zeros((6, 4), "float32"), verbose=0).shape == (6, 1)


def test_more_gradients_than_weights_are_the_error_of_one_device(both):
    class Surplus(OneLayer):
        def train_step(self, data):
            weights = self.trainable_variables
            self.optimizer.apply([tf.zeros_like(each.value) for each in [*weights, weights[0]]])
            return {}

    model = built(Surplus(1), np.zeros((1, 4)), "sgd")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="a list of 3 gradients"):
        replicate_model(model, strategy=both(2)).train_on_batch(np.zeros((4, 4)), np.zeros((4, 1)))
