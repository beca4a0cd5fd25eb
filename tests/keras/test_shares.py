"""Batches of any size are shared out: fit, evaluate and predict give what one device gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(29, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=29)


def classifier():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def two(make_pair):
    return make_pair(classifier, 2)


@pytest.fixture
def pair(two):
    """On one device and on 2 replicas, as they began; their batches have 8, 5 and 1 samples, for few programs."""
    two.restart()
    return two


def test_a_last_batch_that_does_not_divide_evenly_trains_as_on_one_device(trains_alike):
    """13 samples in batches of 8 leave 5, of which one of 4 replicas has 2."""
    _, model, history = trains_alike(classifier, 4, X[:13], Y[:13], batch_size=8, epochs=3)
    assert list(history) == ["accuracy", "loss"]
    assert history["loss"][2] < history["loss"][0]
    assert int(model.optimizer.iterations.numpy()) == 6


@pytest.mark.on("tpu")
def test_one_replica_trains_as_one_device(trains_alike):
    _, model, _ = trains_alike(classifier, 1, X[:13], Y[:13], batch_size=8)
    assert int(model.optimizer.iterations.numpy()) == 2


def test_a_batch_may_have_fewer_samples_than_there_are_replicas(pair, alike):
    """Or more than there are samples."""
    for count, batch_size in ((6, 5), (5, 64)):
        expected, found = (
            model.fit(
                X[:count], Y[:count], batch_size, validation_data=(X[:1], Y[:1]), shuffle=False, verbose=0
            ).history
            for model in pair.both
        )
        alike(found, expected)
        alike(pair.replicated.get_weights(), pair.alone.get_weights())


def test_evaluate_takes_every_sample_once(pair, alike):
    for count, batch_size in ((8, 8), (13, 8), (1, 8), (1, 1)):
        x, y = X[:count], Y[:count]
        expected, found = (model.evaluate(x, y, batch_size, verbose=0, return_dict=True) for model in pair.both)
        alike(found, expected)


def test_predict_takes_every_sample_once_and_in_order(pair, alike):
    outputs = pair.original(X).numpy()
    for count, batch_size in ((13, 8), (5, 5), (1, 8), (1, 1)):
        alike(pair.replicated.predict(X[:count], batch_size, verbose=0), outputs[:count])
    alike(pair.replicated.predict_on_batch(X[:5]), outputs[:5])


def test_batches_by_hand_give_what_they_give_on_one_device(pair, alike):
    """Metrics go on from call to call until `reset_metrics`, as Keras' do."""
    for size in (8, 5):
        x, y = X[:size], Y[:size]
        for method in ("train_on_batch", "test_on_batch"):
            expected, found = (getattr(model, method)(x, y, return_dict=size == 5) for model in pair.both)
            alike(found, expected)
        alike(pair.replicated.predict_on_batch(x), pair.alone.predict_on_batch(x))
        if size == 5:
            for model in pair.both:
                model.reset_metrics()
    alike(pair.replicated.get_weights(), pair.alone.get_weights())


def test_an_empty_batch_is_passed_over(pair, alike):
    """An empty batch is not a step: the epoch has only the batches with samples."""

    def batches(*sizes):
        stop = 0
        for size in sizes:
            start, stop = stop, stop + size
            yield X[start:stop], Y[start:stop]

    options = {"shuffle": False, "verbose": 0}
    expected = pair.alone.fit(batches(8, 5), steps_per_epoch=2, **options).history
    found = pair.replicated.fit(batches(8, 0, 5), steps_per_epoch=3, **options).history
    alike(found, expected)
    alike(pair.replicated.get_weights(), pair.alone.get_weights())
    assert int(pair.replicated.optimizer.iterations.numpy()) == 2
    expected = pair.alone.evaluate(X[:13], Y[:13], 8, verbose=0)
    alike(pair.replicated.evaluate(batches(0, 8, 5, 0), steps=4, verbose=0), expected)


def test_a_data_set_may_have_an_empty_batch(pair, alike):
    ends = tf.data.Dataset.from_tensor_slices([(0, 8), (8, 8), (8, 13)])
    dataset = ends.map(lambda end: (tf.constant(X)[end[0] : end[1]], tf.constant(Y)[end[0] : end[1]]))
    alike(pair.replicated.evaluate(dataset, verbose=0), pair.alone.evaluate(X[:13], Y[:13], 8, verbose=0))
    alike(pair.replicated.predict(dataset, verbose=0), pair.alone.predict(X[:13], verbose=0))
    assert pair.replicated.predict_on_batch(X[:0]).shape == (0, 3)


class Rows(keras.layers.Layer):
    """Notes how many rows it was given."""

    seen = None

    def call(self, x):
        context = tf.distribute.get_replica_context()
        self.seen.add((context.num_replicas_in_sync, x.shape[0]))
        return x


def test_the_model_runs_on_its_share_on_each_replica(both, is_tpu):
    """Of 8 samples 4; a graph of a strategy with threads is for any number."""
    from replica_engine.keras import replicate_model

    rows = Rows()
    rows.seen = set()
    model = keras.Sequential([keras.Input((4,)), rows])
    replicated = replicate_model(model, strategy=both(2))
    rows.seen.clear()
    assert np.array_equal(replicated.predict(X[:8], verbose=0), X[:8])
    assert rows.seen == {(2, 4 if is_tpu else None)}
