"""Saving a model whose variables are divided: files are those of one device, and load into any other layout."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import model_parallel

import replica_engine
from replica_engine.keras import replicate_model

X = np.random.default_rng(0).normal(size=(32, 13)).astype("f")  # 13 rows over 2 devices: 7 and 6
Y = np.random.default_rng(1).integers(0, 3, 32)


def tensor_parallel():
    return model_parallel({".*up/kernel": ("model", None), ".*out/kernel": (None, "model")})


MAKE = {
    "plain": lambda: None,
    "one": lambda: replica_engine.TPUStrategy(num_cores=1),
    "fsdp": lambda: replica_engine.TPUStrategy(num_cores=4, distribution="fsdp"),
    "zero1": lambda: replica_engine.TPUStrategy(num_cores=2, distribution="zero1"),
    "tensor": lambda: replica_engine.TPUStrategy(distribution=tensor_parallel()),
}


def scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def made(strategy, seed):
    keras.utils.set_random_seed(seed)
    with scope(strategy):
        up = keras.layers.Dense(64, activation="relu", name="up")
        model = keras.Sequential([keras.Input([13]), up, keras.layers.Dense(3, name="out")], name="net")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.003, name="adam"), loss)
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs=1, callbacks=()):
    return model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)).history


def values(model):
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of each source, the folder with its files, its variables, its predictions, and the loss of the next epoch."""
    found = {}
    for name in ("one", "fsdp", "tensor"):
        folder = tmp_path_factory.mktemp(name)
        model = made(MAKE[name](), 0)
        fit(model)
        model.save(folder / "model.keras")
        model.save_weights(folder / "model.weights.h5")
        model.export(folder / "exported", verbose=0)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "checkpoint"))
        found[name] = folder, values(model), model.predict(X, verbose=0), fit(model)["loss"]
    return found


@pytest.mark.parametrize("name", ["fsdp", "tensor"])
def test_files_are_those_of_one_device(saved, name):
    folder, _, predicted, _ = saved[name]
    loaded = tf.saved_model.load(str(folder / "exported"))  # its functions do not keep its variables
    np.testing.assert_allclose(loaded.serve(X), predicted, atol=1e-5)
    one, other = (tf.train.load_checkpoint(str(saved[each][0] / "checkpoint")) for each in ("one", name))
    assert one.get_variable_to_shape_map() == other.get_variable_to_shape_map()
    sizes = [(saved[each][0] / "checkpoint.data-00000-of-00001").stat().st_size for each in ("one", name)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("source", "target"), [("fsdp", "plain"), ("fsdp", "tensor"), ("tensor", "zero1"), ("one", "fsdp")]
)
def test_files_load_into_any_other_layout(saved, source, target):
    folder, expected, _, following = saved[source]
    strategy = MAKE[target]()
    with scope(strategy):
        model = keras.models.load_model(folder / "model.keras")
    assert_equal(values(model), expected)
    np.testing.assert_allclose(fit(model)["loss"], following, rtol=2e-6)

    other = made(strategy, 1)
    other.load_weights(folder / "model.weights.h5")
    assert_equal(values(other), expected)

    another = made(strategy, 2)
    tf.train.Checkpoint(model=another, optimizer=another.optimizer).read(str(folder / "checkpoint")).assert_consumed()
    assert_equal(values(another), expected)


class Interrupted(keras.callbacks.Callback):
    """Ends `fit` before its third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def test_a_training_goes_on_in_another_layout(tmp_path):
    expected = fit(made(MAKE["one"](), 0), 4)["loss"]
    with pytest.raises(KeyboardInterrupt):
        fit(made(MAKE["fsdp"](), 0), 4, [keras.callbacks.BackupAndRestore(tmp_path), Interrupted()])
    resumed = fit(made(MAKE["tensor"](), 1), 4, [keras.callbacks.BackupAndRestore(tmp_path)])["loss"]
    np.testing.assert_allclose(resumed, expected[2:], rtol=2e-6)


def test_replicated_models_save_and_load(saved, tmp_path):
    _, _, _, following = saved["one"]
    replicated = replicate_model(made(None, 0), strategy=MAKE["tensor"]())
    fit(replicated)
    replicated.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(values(loaded), values(replicated))
    np.testing.assert_allclose(fit(replicate_model(loaded, strategy=MAKE["fsdp"]()))["loss"], following, rtol=2e-6)
