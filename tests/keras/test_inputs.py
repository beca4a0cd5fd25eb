"""All kinds of data that Keras takes: arrays, datasets, generators, dicts; sample weights; validation data."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import classifier, crossentropy
from keras import layers

pytestmark = pytest.mark.on("mirrored")  # where nothing else is said

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(18, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=18)
REAL = RANDOM.normal(size=(18, 2)).astype("float32")
WORDS = RANDOM.integers(0, 20, size=(18, 5))
WEIGHTS = RANDOM.random(18).astype("float32")


@pytest.fixture(scope="module")
def two(make_pair):
    return make_pair(classifier, 2)


@pytest.fixture(scope="module")
def batches(batched):
    """Those of all data here, for the model alone."""
    return batched(9, X, Y)


class Batches(keras.utils.PyDataset):
    """Two batches of 9 samples."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[9 * index : 9 * index + 9], Y[9 * index : 9 * index + 9]


def generated():
    while True:
        yield X[:9], Y[:9]
        yield X[9:], Y[9:]


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 9},
    "tensors": lambda: {"x": tf.constant(X), "y": tf.constant(Y), "batch_size": 9},
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(9)},
    "generator": lambda: {"x": generated(), "steps_per_epoch": 2},
    "pydataset": lambda: {"x": Batches()},
}


@pytest.mark.parametrize("kind", DATA)
def test_data_of_any_kind_train_as_arrays_do(pair, batches, alike, kind):
    expected = pair.alone.fit(batches, epochs=2, shuffle=False, verbose=0).history
    found = pair.replicated.fit(**DATA[kind](), epochs=2, shuffle=False, verbose=0).history
    alike(found, expected)
    alike(pair.replicated.get_weights(), pair.alone.get_weights())


@pytest.mark.parametrize("kind", ["dataset", "pydataset"])
def test_data_of_any_kind_are_evaluated_and_predicted_as_arrays_are(pair, batches, alike, kind):
    data = DATA[kind]()["x"]
    alike(pair.replicated.evaluate(data, verbose=0), pair.alone.evaluate(batches, verbose=0))
    alike(pair.replicated.predict(data, verbose=0), pair.alone(X).numpy())


def test_validation_data_are_evaluated_after_each_epoch(pair, alike):
    options = {"batch_size": 9, "epochs": 2, "shuffle": False, "verbose": 0}
    for more in ({"validation_data": (X[:9], Y[:9])}, {"validation_split": 0.5}):
        expected, found = (model.fit(X, Y, **options, **more).history for model in pair.both)
        assert list(found) == ["accuracy", "loss", "val_accuracy", "val_loss"]
        alike(found, expected)


def test_shuffling_takes_every_sample_once_an_epoch(pair, alike):
    """In another order: a batch of all samples is the same batch."""
    expected = pair.alone.fit(X, Y, 18, shuffle=False, verbose=0).history
    alike(pair.replicated.fit(X, Y, 18, shuffle=True, verbose=0).history, expected)


def test_several_inputs_and_outputs_by_name(trains_alike, alike):
    """With a loss, its weight, metrics and sample weights for each output, and one output's loss masked."""

    def make():
        numbers = keras.Input((4,), name="numbers")
        words = keras.Input((5,), name="words", dtype="int32")
        joined = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(20, 3)(words))])
        outputs = {"kind": layers.Dense(3, name="kind")(joined), "size": layers.Dense(2, name="size")(joined)}
        model = keras.Model({"numbers": numbers, "words": words}, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            {"kind": crossentropy(), "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
            weighted_metrics={"size": ["mse"]},
        )
        return model

    x, y = {"numbers": X, "words": WORDS}, {"kind": Y, "size": REAL}
    weights = {"kind": WEIGHTS, "size": WEIGHTS[::-1].copy()}
    data = (x, y, weights)
    alone, model, history = trains_alike(make, 2, *data, batch_size=9, validation_data=data)
    assert {"kind_loss", "size_loss", "kind_accuracy", "size_mae", "val_size_mse", "loss"} <= set(history)
    few = {key: value[:7] for key, value in x.items()}
    alike(model.predict(few, verbose=0), {key: value.numpy() for key, value in alone(few).items()})


@pytest.mark.on("tpu")
def test_a_list_of_inputs_and_of_outputs(trains_alike, alike):
    def make():
        inputs = [keras.Input((4,)), keras.Input((2,))]
        joined = layers.Concatenate()(inputs)
        model = keras.Model(inputs, [layers.Dense(3, name="kind")(joined), layers.Dense(2, name="size")(joined)])
        model.compile(keras.optimizers.SGD(0.1), [crossentropy(), "mae"])
        return model

    alone, model, _ = trains_alike(make, 2, [X, REAL], [Y, REAL], batch_size=9)
    alike(model.predict([X, REAL], 9, verbose=0), [output.numpy() for output in alone([X, REAL])])


LABELS = REAL[:8]
STRUCTURES = {
    "a dict of one input": ({"a": X[:8]}, LABELS),
    "a tuple of one label": (X[:8], (LABELS,)),
    "lists of one": ([X[:8]], [LABELS], [WEIGHTS[:8]]),
    "dicts in dicts": ({"a": {"b": X[:8]}}, {"c": LABELS}, None),
    "one part": ({"a": X[:8]},),
    "as many tensors as parts": ({"a": X[:8], "b": REAL[:8]}, ()),
}


@pytest.mark.on("mirrored", "tpu")
@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_batch_arrives_in_its_own_structure(alone_and_replicated, kind):
    """Also where every part of it is a structure of one tensor, so that it has as many tensors as parts."""
    batch = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.constant(leaf), STRUCTURES[kind])
    structures = []

    class Noting(keras.Model):
        def build(self, shape):
            self.factor = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x

        def test_step(self, data):
            structures.append(tf.nest.map_structure(lambda leaf: None if leaf is None else leaf.shape[1:], data))
            leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
            means = [tf.reduce_mean(leaf) for leaf in leaves]
            return {"total": self.factor * tf.add_n([(n + 1) * mean for n, mean in enumerate(means)])}

    def make():
        model = Noting()
        model.build(None)
        model.compile()
        return model

    models = alone_and_replicated(make, 2)
    expected, found = (model.evaluate(tf.data.Dataset.from_tensors(batch), verbose=0) for model in models)
    assert structures[1:] == structures[:1] * len(structures[1:])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")


def reduced():
    """Three models in one, each with another reduction of its loss."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [layers.Dense(3, name=name)(inputs) for name in REDUCTIONS])
    losses = [crossentropy(reduction=name) for name in REDUCTIONS]
    model.compile(keras.optimizers.SGD(0.1), losses, weighted_metrics=[["accuracy"], [], []])
    return model


@pytest.fixture(scope="module")
def two_reduced(make_pair):
    return make_pair(reduced, 2)


ALL_BUT_SOME = np.concatenate([WEIGHTS[:5], np.zeros(4, "float32")])


@pytest.mark.on("mirrored", "tpu")
@pytest.mark.parametrize("weights", [WEIGHTS[:9], ALL_BUT_SOME], ids=["random", "0 for one replica"])
def test_weighted_samples_count_as_much_as_on_one_device(two_reduced, batched, alike, weights):
    """However the loss is reduced; batches of 9 are 5 and 4 for the replicas."""
    two_reduced.restart()
    data = batched(9, X, [Y] * 3, [np.tile(weights, 2)] * 3)
    expected, found = (model.fit(data, shuffle=False, verbose=0).history for model in two_reduced.both)
    assert {f"{name}_loss" for name in REDUCTIONS} < set(found)
    alike(found, expected)
    alike(two_reduced.replicated.get_weights(), two_reduced.alone.get_weights())


def test_classes_have_weights(pair, alike, agree):
    options = {"batch_size": 9, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}, "shuffle": False, "verbose": 0}
    agree(pair.both, lambda model: model.fit(X, Y, **options).history)
    alike(pair.replicated.get_weights(), pair.alone.get_weights())


def test_metrics_that_count_are_those_of_all_samples(trains_alike):
    """Not means of what replicas have: neither AUC nor precision, recall or F1 is one."""

    def make():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
        names = ["AUC", "Precision", "Recall", keras.metrics.F1Score(threshold=0.5), keras.metrics.R2Score()]
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=names)
        return model

    y = (Y[:, None] > 0).astype("float32")
    trains_alike(make, 2, X, y, batch_size=9)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_nobody_waits_for_the_end_of_the_data(method, two):
    """It waits for TensorFlow's thread that tunes the dataset, for up to a minute; here for a generator's end."""
    returned, ended, waited = threading.Event(), threading.Event(), []

    def endless():
        try:
            yield from generated()
        finally:
            waited.append(returned.wait(300))
            ended.set()

    specs = tf.TensorSpec([9, 4], tf.float32), tf.TensorSpec([9], tf.int64)
    dataset = tf.data.Dataset.from_generator(endless, output_signature=specs)
    steps = {"steps_per_epoch": 2} if method == "fit" else {"steps": 2}
    getattr(two.replicated, method)(dataset, verbose=0, **steps)
    returned.set()
    assert ended.wait(300), "the iterator is kept"
    assert waited == [True], "the iterator ended before the method returned"
