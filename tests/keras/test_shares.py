"""Batches of any size are shared out: fit, evaluate and predict give what one device gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import classifier

from replica_engine.keras import replicate_model

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(29, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=29)


def with_momentum():
    return classifier(keras.optimizers.SGD(0.1, momentum=0.9))


@pytest.fixture(scope="module")
def three(make_pair):
    return make_pair(with_momentum, 3)


@pytest.fixture
def pair(three):
    """On one device and on 3 replicas, as they began; their batches have 9, 5 and 1 samples, for few programs."""
    three.restart()
    return three


@pytest.fixture
def of(batched):
    """`of(count, size)`: the first samples, in batches of so many."""
    return lambda count, size: batched(size, X[:count], Y[:count])


QUIET = {"shuffle": False, "verbose": 0}


def test_a_last_batch_that_does_not_divide_evenly_trains_as_on_one_device(pair, of, alike, agree):
    """14 samples in batches of 9 leave 5, of which one of 3 replicas has 1."""
    history = agree(pair.both, lambda model: model.fit(of(14, 9), epochs=3, **QUIET).history)
    alike(*(model.get_weights() for model in (pair.replicated, pair.alone)))
    alike(*([variable.numpy() for variable in model.optimizer.variables] for model in (pair.replicated, pair.alone)))
    alike(*([variable.numpy() for variable in model.metrics_variables] for model in (pair.replicated, pair.alone)))
    assert list(history) == ["accuracy", "loss"]
    assert history["loss"][2] < history["loss"][0]
    assert int(pair.replicated.optimizer.iterations.numpy()) == 6


@pytest.mark.on("tpu")
def test_one_replica_trains_as_one_device(trains_alike):
    _, model, _ = trains_alike(with_momentum, 1, X[:16], Y[:16], batch_size=8)
    assert int(model.optimizer.iterations.numpy()) == 2


def test_a_batch_may_have_fewer_samples_than_there_are_replicas(pair, of, alike):
    """Or more than there are samples."""
    for count, batch_size in ((6, 5), (5, 64)):
        data, last = of(count, batch_size), of(1, 1)
        expected, found = (model.fit(data, validation_data=last, **QUIET).history for model in pair.both)
        alike(found, expected)
        alike(pair.replicated.get_weights(), pair.alone.get_weights())


def test_evaluate_takes_every_sample_once(pair, of, alike):
    for count, batch_size in ((9, 9), (14, 9), (1, 9)):
        data = of(count, batch_size)
        expected, found = (model.evaluate(data, verbose=0, return_dict=True) for model in pair.both)
        alike(found, expected)


def test_predict_takes_every_sample_once_and_in_order(pair, alike):
    outputs = pair.original(X).numpy()
    for count, batch_size in ((14, 9), (5, 5), (1, 9), (1, 1)):
        alike(pair.replicated.predict(X[:count], batch_size, verbose=0), outputs[:count])
    alike(pair.replicated.predict_on_batch(X[:5]), outputs[:5])


@pytest.mark.on("tpu")
def test_predict_gives_each_replica_its_share_of_an_uneven_batch(both):
    """With zeros up to the next even size, or to that of a program that is there; and never the whole batch."""
    seen = []

    class Notes(keras.layers.Layer):
        def call(self, x):
            seen.append(x.shape[0])
            return x

    model = replicate_model(keras.Sequential([keras.Input((4,)), Notes()]), strategy=both(3))
    seen.clear()  # the shapes of its making
    for count in (5, 4, 3):
        assert model.predict_on_batch(X[:count]).tolist() == X[:count].tolist()
        assert max(seen) <= 3, "two rows, and three where it is asked whether outputs grow with the batch"


@pytest.mark.on("tpu", rest="mirrored")
def test_batches_by_hand_give_what_they_give_on_one_device(pair, alike):
    """Metrics go on from call to call until `reset_metrics`, as Keras' do."""
    for size in (9, 5):
        x, y = X[:size], Y[:size]
        for method in ("train_on_batch", "test_on_batch"):
            expected, found = (getattr(model, method)(x, y, return_dict=size == 5) for model in pair.both)
            alike(found, expected)
        alike(pair.replicated.predict_on_batch(x), pair.alone.predict_on_batch(x))
        if size == 5:
            for model in pair.both:
                model.reset_metrics()
    alike(pair.replicated.get_weights(), pair.alone.get_weights())


def test_an_empty_batch_is_passed_over(pair, of, alike):
    """An empty batch is not a step: the epoch has only the batches with samples."""

    def batches(*sizes):
        stop = 0
        for size in sizes:
            start, stop = stop, stop + size
            yield X[start:stop], Y[start:stop]

    expected = pair.alone.fit(of(14, 9), **QUIET).history
    found = pair.replicated.fit(batches(9, 0, 5), steps_per_epoch=3, **QUIET).history
    alike(found, expected)
    alike(pair.replicated.get_weights(), pair.alone.get_weights())
    assert int(pair.replicated.optimizer.iterations.numpy()) == 2
    expected = pair.alone.evaluate(of(14, 9), verbose=0)
    alike(pair.replicated.evaluate(batches(0, 9, 5, 0), steps=4, verbose=0), expected)


def test_a_data_set_may_have_an_empty_batch(pair, of, alike):
    ends = tf.data.Dataset.from_tensor_slices([(0, 9), (9, 9), (9, 14)])
    dataset = ends.map(lambda end: (tf.constant(X)[end[0] : end[1]], tf.constant(Y)[end[0] : end[1]]))
    alike(pair.replicated.evaluate(dataset, verbose=0), pair.alone.evaluate(of(14, 9), verbose=0))
    alike(pair.replicated.predict(dataset, verbose=0), pair.alone(X[:14]).numpy())
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
