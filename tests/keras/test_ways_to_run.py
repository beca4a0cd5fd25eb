"""Eagerly, several steps an execution, compiled by XLA, from another thread, several models at once."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import classifier, crossentropy
from helpers.versions import HAS_XLA
from keras import layers

import replica_engine
from replica_engine import MirroredStrategy, logical_devices
from replica_engine.keras import replicate_model
from replica_engine.upstream import host_datasets

pytestmark = pytest.mark.on("mirrored")  # where nothing else is said

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(54, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=54)
BATCHES, VALIDATION = (tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(9) for count in (54, 18))


@pytest.fixture
def trains_with(alone_and_replicated, alike):
    """6 steps of 9 samples, of which 4 are one execution and then 2 more."""

    def trains_with(**options):
        alone, replicated = alone_and_replicated(lambda: classifier(**options), 2)
        batches = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
        arguments = {"validation_data": VALIDATION, "shuffle": False, "verbose": 0}
        alone.compile(alone.optimizer, alone.loss, metrics=["accuracy"], run_eagerly=True)
        expected = alone.fit(BATCHES, **arguments).history
        alike(replicated.fit(BATCHES, callbacks=[note], **arguments).history, expected)
        alike(replicated.get_weights(), alone.get_weights())
        assert int(replicated.optimizer.iterations.numpy()) == 6
        assert batches == ([3, 7] if "steps_per_execution" in options else [*range(6)])

    return trains_with


@pytest.mark.on("mirrored", "tpu")
def test_several_steps_are_one_execution(trains_with):
    trains_with(steps_per_execution=4)


def in_scope(strategy, steps):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        return classifier(steps_per_execution=steps)


@pytest.mark.parametrize("steps", [2, 5, 20])
def test_steps_of_an_execution_have_the_bits_of_steps_one_by_one(steps):
    """The batches are of 10 and of 4 samples; 20 are more than run in one call."""
    strategy = MirroredStrategy(logical_devices(2))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10).repeat(4)
    one, several = in_scope(strategy, 1), in_scope(strategy, steps)
    histories = [model.fit(data, epochs=2, verbose=0).history for model in (one, several)]
    assert histories[0] == histories[1]
    assert one.evaluate(data, verbose=0) == several.evaluate(data, verbose=0)
    assert np.array_equal(one.predict(data, verbose=0), several.predict(data, verbose=0))
    assert all(map(np.array_equal, one.get_weights(), several.get_weights()))


def test_the_steps_before_a_batch_that_fails_are_kept():
    def batches():
        for start in range(0, 50, 10):
            yield X[start : start + 10], Y[start : start + 10]
        raise ValueError("no more")

    model = in_scope(MirroredStrategy(logical_devices(2)), 4)
    with pytest.raises((ValueError, tf.errors.OpError), match="no more"):
        model.fit(batches(), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 5


def test_the_steps_before_a_batch_that_cannot_be_divided_are_kept():
    """Its arrays have 10 and 9 samples."""

    def batches():
        for labels in (10, 10, 9, 10):
            yield X[:10], Y[:labels]

    shapes = [(tf.TensorSpec([None, *X.shape[1:]], X.dtype), tf.TensorSpec([None, *Y.shape[1:]], Y.dtype))]
    data = tf.data.Dataset.from_generator(batches, output_signature=shapes[0])
    model = in_scope(MirroredStrategy(logical_devices(2)), 4)
    with pytest.raises(Exception, match=r"samples|shape|size"):
        model.fit(data, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.on("tpu")
@pytest.mark.parametrize("is_dealt", [False, True], ids=["whole", "dealt"])
def test_compiled_steps_of_an_execution_may_differ_in_shape(is_dealt):
    """Sequences of 3 and of 5 in batches of one size."""
    from replica_engine import TPUStrategy

    batches = [np.arange(8.0 * length, dtype="float32").reshape(8, length, 1) / 40 for length in (3, 3, 5, 5, 3)]
    shape = tf.TensorSpec([8, None, 1], tf.float32), tf.TensorSpec([8], tf.float32)
    data = tf.data.Dataset.from_generator(
        lambda: ((batch, batch.mean((1, 2))) for batch in batches), output_signature=shape
    )

    def trained(steps, strategy=None):
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.layers.GlobalMaxPooling1D(), keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=steps)
        given = strategy.experimental_distribute_dataset(data) if is_dealt and strategy is not None else data
        return model.fit(given, verbose=0, steps_per_epoch=5 if is_dealt else None).history["loss"]

    assert np.allclose(trained(4, TPUStrategy(num_cores=2)), trained(1), rtol=1e-5)


def test_a_prediction_in_a_callback_of_another_one_keeps_the_data_of_its_own():
    """A model that makes functions itself takes what TensorFlow has dealt."""

    class Own(keras.Model):
        def call(self, x):
            return 2.0 * x

        def make_train_function(self, force=False):
            return super().make_train_function(force)

    with MirroredStrategy(logical_devices(2)).scope():
        first, second = keras.Sequential([keras.layers.Lambda(lambda x: 3.0 * x)]), Own()
        first.compile()
        second.compile()
    found = []

    class Predicts(keras.callbacks.Callback):
        def on_predict_begin(self, logs=None):
            found.append(second.predict(X, batch_size=10, verbose=0))

    outputs = first.predict(X, batch_size=10, verbose=0, callbacks=[Predicts()])
    assert np.allclose(outputs, 3 * X)
    assert np.allclose(found[0], 2 * X)


class TwoOutputs(keras.Model):
    """A row per sample, and their number."""

    def call(self, x):
        return {"rows": 2 * x, "count": tf.cast(tf.shape(x)[:1], "float32")}


def test_outputs_without_a_row_per_sample_are_those_of_one_device():
    with MirroredStrategy(logical_devices(2)).scope():
        model = TwoOutputs()
        model.compile(steps_per_execution=3)
    outputs = model.predict(X, batch_size=10, verbose=0)
    assert np.array_equal(outputs["rows"], 2 * X)
    assert outputs["count"].tolist() == [10, 10, 10, 10, 10, 4]


@pytest.mark.parametrize("option", ["run_eagerly", "jit_compile"])
def test_it_runs_eagerly_or_compiled_by_keras(trains_with, option):
    trains_with(**{option: True})


class Scaled(keras.Model):
    """Its one weight; `look` sees what comes in."""

    def __init__(self, look=lambda x: None, **options):
        super().__init__()
        self.look = look
        self.factor = self.add_weight(shape=(), initializer="ones", **options)

    def build(self, shape):
        pass

    def call(self, x):
        self.look(x)
        return x * self.factor


def of_values(y, outputs):
    return np.abs(np.asarray(y) - 2 * outputs.numpy()).mean(1)


def refuses_nan(x):
    assert not np.isnan(x.numpy()).any()


def branches(x):
    if tf.reduce_any(x > 100):
        raise ValueError("too big")


def squared(y, outputs):
    return tf.reduce_mean((y.to_tensor() - 2 * outputs.to_tensor()) ** 2, 1)


def rows_of(y, outputs):
    return tf.cast(y.row_lengths() + outputs.row_lengths(), "float32")


RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 0.5], [5.0, 6.0]])
SEES_VALUES = {  # the first calls make losses and metrics, as on one device: of what the model really gives
    "a metric reads values": (X[:4], {"loss": "mse", "metrics": [of_values], "run_eagerly": True}, {}),
    "a weighted metric": (X[:4], {"loss": "mse", "weighted_metrics": [of_values, "mae"], "run_eagerly": True}, {}),
    "call reads values": (X[:4], {"loss": "mse", "run_eagerly": True}, {"look": refuses_nan}),
    "call branches": (X[:4], {"loss": "mse", "metrics": ["mae"], "run_eagerly": True}, {"look": branches}),
    "a regularizer": (X[:4], {"loss": "mse", "metrics": [of_values], "run_eagerly": True}, {"regularizer": "l2"}),
    "late variables": (X[:4], {"loss": "mse", "metrics": ["r2_score", of_values], "run_eagerly": True}, {}),
    "a ragged loss": (RAGGED, {"loss": squared}, {}),
    "a ragged metric": (RAGGED, {"loss": squared, "metrics": [rows_of]}, {}),
    "a ragged loss, eagerly": (RAGGED, {"loss": squared, "metrics": [rows_of], "run_eagerly": True}, {}),
}


@pytest.mark.parametrize("kind", SEES_VALUES)
def test_losses_metrics_and_call_see_what_they_see_on_one_device(both, alike, kind, agree):
    """In the first call too, in which Keras would make losses and metrics of dense symbols, under a strategy."""
    data, options, of_model = SEES_VALUES[kind]
    models = []
    for _ in range(2):
        model = Scaled(**of_model)
        model(data)
        model.compile(keras.optimizers.SGD(0.05), **options)
        models.append(model)
    alone, replicated = models[0], replicate_model(models[1], strategy=both(2))
    alone.run_eagerly = True
    for _ in range(2):
        agree((alone, replicated), lambda model: model.evaluate(data, data, verbose=0))
        agree((alone, replicated), lambda model: model.train_on_batch(data, data))
    alike(replicated.get_weights(), alone.get_weights())


@pytest.mark.parametrize("is_eager", [False, True], ids=["traced", "eager"])
def test_what_call_raises_in_the_first_call_is_raised(both, is_eager):
    def look(x):
        if not isinstance(x, np.ndarray):
            raise LookupError("nothing there")

    model = Scaled(look)
    model.build(None)
    model.compile("sgd", "mse", run_eagerly=is_eager)
    with pytest.raises(LookupError, match="nothing there"):
        replicate_model(model, strategy=both(2)).train_on_batch(X[:4], X[:4])


@pytest.mark.on("tpu")
def test_a_variable_of_its_own_is_changed_once_a_step(both):
    """Also in the first step of an eager model, in which its losses and metrics are made."""
    model = Scaled(lambda x: model.steps.assign_add(1))
    model.steps = tf.Variable(0)
    model.build(None)
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    replicated = replicate_model(model, strategy=both(2))
    for step in range(2):
        replicated.train_on_batch(X[:4], X[:4])
        assert model.steps.numpy() == step + 1


@pytest.mark.on("tpu")
def test_a_model_can_be_made_eager_and_back(both, alike):
    keras.utils.set_random_seed(1)
    model = classifier()
    replicated = replicate_model(model, strategy=both(2))
    replicated.train_on_batch(X[:8], Y[:8])
    replicated.run_eagerly = True
    assert model.run_eagerly
    replicated.train_on_batch(X[:8], Y[:8])
    model.run_eagerly = False
    replicated.train_on_batch(X[:8], Y[:8])
    assert int(model.optimizer.iterations.numpy()) == 3


@pytest.fixture(scope="module")
def two(make_pair):
    return make_pair(classifier, 2)


def test_another_thread_trains_it(pair, alike):
    results = []
    for model in pair.both:
        thread = threading.Thread(
            target=lambda model=model: results.append(model.fit(BATCHES, shuffle=False, verbose=0).history)
        )
        thread.start()
        thread.join(60)
    alike(results[1], results[0])
    alike(pair.replicated.get_weights(), pair.alone.get_weights())


def test_two_threads_predict_with_it_at_once(pair, alike):
    """One after the other: each has the whole model for as long as its call takes."""
    expected = pair.original(X).numpy()
    pair.replicated.predict(BATCHES, verbose=0)
    outputs = []
    threads = [
        threading.Thread(target=lambda: outputs.append(pair.replicated.predict(BATCHES, verbose=0))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outputs) == 2
    for found in outputs:
        alike(found, expected)


def test_two_models_train_at_once_each_on_its_own_replicas(pair, both, alike):
    other = classifier()
    other.set_weights(pair.alone.get_weights())
    models = [pair.replicated, replicate_model(other, strategy=both(2))]
    expected = pair.alone.fit(BATCHES, shuffle=False, verbose=0).history
    found = {}
    barrier = threading.Barrier(2)

    def train(index):
        barrier.wait(300)
        found[index] = models[index].fit(BATCHES, shuffle=False, verbose=0).history

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(found) == 2
    for index, model in enumerate(models):
        alike(found[index], expected)
        alike(model.get_weights(), pair.alone.get_weights())


def test_replicated_models_of_one_original_take_turns(pair, alike):
    """On different numbers of replicas of both kinds of strategies: all of them are the original."""
    strategy = replica_engine.TPUStrategy(num_cores=3) if HAS_XLA else MirroredStrategy(logical_devices(3))
    other = replicate_model(pair.original, strategy=strategy)
    for model in (other, pair.replicated, pair.original, other, pair.replicated):
        alike(
            model.fit(BATCHES, shuffle=False, verbose=0).history,
            pair.alone.fit(BATCHES, shuffle=False, verbose=0).history,
        )
        alike(other.get_weights(), pair.alone.get_weights())
    alike(other.predict_on_batch(X[:7]), pair.alone(X[:7]).numpy())
    assert other.strategy.num_replicas_in_sync == 3
    assert pair.replicated.strategy.num_replicas_in_sync == 2


@pytest.mark.on("tpu")
def test_two_models_share_a_layer(both, alike):
    """An encoder and what is trained through it, each replicated."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    encoded = layers.Dense(3, "tanh")(inputs)
    encoder, whole = keras.Model(inputs, encoded), keras.Model(inputs, layers.Dense(3)(encoded))
    whole.compile("sgd", crossentropy())
    strategy = both(2)
    fast_encoder, fast = replicate_model(encoder, strategy=strategy), replicate_model(whole, strategy=strategy)
    before = fast_encoder.predict_on_batch(X[:9])
    fast.fit(VALIDATION, verbose=0)
    after = fast_encoder.predict_on_batch(X[:9])
    assert not np.array_equal(before, after)
    alike(after, encoder(X[:9]).numpy())


def test_a_strategy_is_used_for_a_loop_of_ones_own_between_calls(both, alike):
    strategy = both(2)
    keras.utils.set_random_seed(1)
    model = classifier()
    replicated = replicate_model(model, strategy=strategy)
    replicated.train_on_batch(X[:8], Y[:8])
    total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
    assert float(strategy.experimental_local_results(total)[0]) == 2.0
    alike(replicated.predict_on_batch(X[:8]), model(X[:8]).numpy())


@pytest.mark.on("tpu")
def test_a_batch_like_the_last_one_is_not_taken_apart_again(both, monkeypatch):
    strategy = both(2)
    replicated = replicate_model(classifier(), strategy=strategy)
    kind, taken_apart = type(strategy.extended.backend), []
    run = kind.run

    def noted(backend, fn, args, programs):
        taken_apart.append(args[0].values[0].shape)
        return run(backend, fn, args, programs=programs)

    monkeypatch.setattr(kind, "run", noted)
    replicated.fit(X[:50], Y[:50], 12, epochs=2, shuffle=False, verbose=0)
    assert taken_apart == 2 * [(6, 4), (1, 4)]  # of the five batches of an epoch the first four are alike


@pytest.mark.on("mirrored", "tpu")
@pytest.mark.parametrize("way", ["in a scope", "replicated"])
def test_nobody_waits_for_the_end_of_an_iterator(strategy, way, monkeypatch):
    """It takes up to as long as the iterator has lived."""
    clear_last, threads, seen = host_datasets._clear_last, [], threading.Event()

    def clear(held):
        threads.append(threading.current_thread())
        of_steps = isinstance(held[0], tf.Tensor)  # the resource of the iterator that the steps have read
        clear_last(held)
        if of_steps:
            seen.set()

    monkeypatch.setattr(host_datasets, "_clear_last", clear)
    with strategy.scope() if way == "in a scope" else contextlib.nullcontext():
        model = classifier()
    model = model if way == "in a scope" else replicate_model(model, strategy=strategy)
    model.fit(BATCHES, verbose=0)
    assert seen.wait(60)
    assert threading.main_thread() not in threads


def test_the_last_reference_is_dropped_on_the_thread_for_which_nobody_waits():
    dropped = []

    class Iterator:
        def __del__(self):
            dropped.append(threading.get_ident())

    owned = [Iterator()]
    held = [owned[0]]
    thread = threading.Thread(target=host_datasets._clear_last, args=[held])
    thread.start()
    owned.clear()
    thread.join(60)
    assert dropped == [thread.ident]
