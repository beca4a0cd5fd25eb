"""Keras under TPUStrategy: what fit, evaluate and predict promise beyond the contract of all strategies."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_steps import OwnStep, dense

from replica_engine.errors import ReplicaMismatchError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")).astype("float32")

# Gradients are summed in another order than on one device: a few units in the last place (6e-8) a step. Four steps
# leave that far below these.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def build(*more, optimizer=None, **options):
    model = keras.Sequential([keras.Input((4,)), dense(4, 1, activation="tanh"), *more, dense(1, 2)])
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), "mse", **options)
    return model


def on_one_device(*more, **options):
    """The same model under no strategy; eager, which saves the time to trace it."""
    return build(*more, run_eagerly=True, **options)


def batches(size=8, count=16):
    """Of arrays Keras would make a pipeline for each call, which takes long."""
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(size)


def fit(model, epochs=2, batch=8, **options):
    return model.fit(batches(batch), epochs=epochs, verbose=0, shuffle=False, **options).history


@pytest.fixture(scope="module")
def trained(replicas):
    """A model on two replicas and the weights that it had first, for tests to share: compiling it takes long."""
    with replicas(2).strategy.scope():
        model = build(optimizer=keras.optimizers.SGD(0.05))
    return model, model.get_weights()


@pytest.fixture
def shared(trained):
    """That model as it was first: with SGD and a rate of 0.05."""
    model, weights = trained
    model.set_weights(weights)
    model.optimizer.iterations.assign(0)
    model.optimizer.learning_rate = 0.05
    model.stop_training = False
    return model


def like_shared():
    """The same on one device."""
    return on_one_device(optimizer=keras.optimizers.SGD(0.05))


@pytest.fixture(scope="module")
def alone():
    """What the model comes to on one device: its history and weights."""
    model = on_one_device(metrics=["mae"])
    return fit(model), model.get_weights()


@pytest.mark.parametrize("jit_compile", [True, False])
def test_jit_compile_trains_on_two_replicas(scoped, alone, jit_compile):
    """With True, tf.distribute refuses on CPU: a variable is "located in device CPU:0" and wanted on CPU:1."""
    model = scoped(lambda: build(jit_compile=jit_compile, metrics=["mae"]))
    history = fit(model)
    for key, values in alone[0].items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5)
    for found, expected in zip(model.get_weights(), alone[1], strict=True):
        np.testing.assert_allclose(found, expected, **CLOSE)
    if jit_compile:
        loss = np.mean((model.predict(X, 8, verbose=0) - Y) ** 2)
        np.testing.assert_allclose(model.evaluate(X, Y, 8, verbose=0)[0], loss, rtol=1e-6)


def dropping():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), dense(1, 2)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def test_dropout_is_different_on_each_replica_and_step_and_the_same_for_the_same_seed(two, scoped):
    histories, weights = [], []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        model = scoped(dropping)
        histories.append(fit(model, epochs=1)["loss"])
        weights.append(model.get_weights()[0])
    dropped = functools.partial(model.layers[0], tf.ones([4, 50]), training=True)
    drops = [str(one) for _ in range(2) for one in two.each(two.strategy.run(dropped))]
    assert len(set(drops)) == 4
    assert histories[0] == histories[1]
    assert np.array_equal(weights[0], weights[1])
    assert histories[0] != histories[2]


def test_a_synchronized_batch_normalization_trains_as_on_one_device(two, scoped):
    normalization = lambda: keras.layers.BatchNormalization(momentum=0.5, synchronized=True)  # noqa: E731
    model = scoped(lambda: build(normalization(), optimizer=keras.optimizers.SGD(0.05), jit_compile=True))
    history = fit(model)
    moving = [two.components(variable.value) for variable in model.layers[1].non_trainable_variables]
    assert all(first == second for first, second in moving)
    other = on_one_device(keras.layers.BatchNormalization(momentum=0.5), optimizer=keras.optimizers.SGD(0.05))
    np.testing.assert_allclose(history["loss"], fit(other)["loss"], rtol=1e-4)
    for found, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_moving_statistics_of_a_replica_outlive_evaluation_prediction_and_saving(two, scoped, tmp_path):
    """A batch normalization that is not synchronized trains on the statistics of each replica's part."""
    model = scoped(lambda: build(keras.layers.BatchNormalization(momentum=0.5), optimizer=keras.optimizers.SGD(0.05)))
    first, second = fit(model)["loss"]
    assert second < first
    before = [two.components(variable.value) for variable in model.layers[1].non_trainable_variables]
    assert all(one != other for one, other in before)
    model.evaluate(batches(), verbose=0)
    model.predict(batches(), verbose=0)
    model.get_weights()
    model.save(tmp_path / "model.keras")
    assert [two.components(variable.value) for variable in model.layers[1].non_trainable_variables] == before
    inside = two.each(two.strategy.run(lambda: model.layers[1].moving_mean.value + 0.0))
    assert inside == before[0]


def test_evaluate_and_predict_take_partial_batches(replicas):
    """Of 9 = 8 + 1 three of the four replicas get nothing in the last batch, and of 1 in the only one.

    To build metrics, `evaluate` of Keras adds up the parts of its first batch, under any strategy: so that one has
    to be whole there.
    """
    other = build()
    with replicas(4).strategy.scope():
        model = build(metrics=["mae"])
    for count in (1, 9):
        x, y = X[:count], Y[:count]
        expected = other(x).numpy()
        np.testing.assert_allclose(model.predict(batches(8, count), verbose=0), expected, **CLOSE)
        if count > 8:
            found = model.evaluate(batches(8, count), verbose=0, return_dict=True)
            assert found["mae"] == pytest.approx(np.mean(np.abs(expected - y)), rel=1e-5)
            assert found["loss"] == pytest.approx(np.mean((expected - y) ** 2), rel=1e-5)


@pytest.mark.parametrize("count", [11, 9], ids=["a rest of 3 samples", "a rest of one"])
def test_a_partial_last_batch_trains_as_on_one_device(shared, count):
    other = like_shared()
    data = batches(8, count).filter(lambda *_: True)  # nobody knows how many it gives
    losses = [model.fit(data, epochs=2, verbose=0, shuffle=False).history["loss"] for model in (shared, other)]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    for ours, theirs in zip(shared.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    assert shared.optimizer.iterations.numpy() == 4
    expected = np.mean((shared.predict(X[:count], 8, verbose=0) - Y[:count]) ** 2)
    assert shared.evaluate(X[:count], Y[:count], 8, verbose=0) == pytest.approx(expected, rel=1e-5)


def test_a_data_set_with_drop_remainder_trains(shared):
    dataset = tf.data.Dataset.from_tensor_slices((X[:13], Y[:13])).batch(4, drop_remainder=True)
    losses = shared.fit(dataset, epochs=2, verbose=0).history["loss"]
    assert int(shared.optimizer.iterations.numpy()) == 6
    assert losses[1] < losses[0]


def test_a_model_is_built_in_its_first_batch(scoped, alone):
    def make():
        model = keras.Sequential([dense(4, 1, activation="tanh"), dense(1, 2)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=True)
        return model

    model = scoped(make)
    np.testing.assert_allclose(fit(model)["loss"], alone[0]["loss"], rtol=2e-5)
    momentum = model.optimizer.variables[2:]
    assert len(momentum) == 4
    assert all(variable.value.distribute_strategy is not None for variable in momentum)


# Callbacks, which look at and write to the model from the host, between steps.


class Looks(keras.callbacks.Callback):
    """Notes the first kernel after each batch."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def on_train_batch_end(self, batch, logs=None):
        self.kernels.append(self.model.layers[0].kernel.numpy())


def test_a_callback_sees_the_weights_of_each_batch(shared):
    looks, other = Looks(), Looks()
    fit(shared, callbacks=[looks])
    fit(like_shared(), callbacks=[other])
    assert len(looks.kernels) == 4
    np.testing.assert_allclose(looks.kernels, other.kernels, **CLOSE)
    assert len({kernel.tobytes() for kernel in looks.kernels}) == 4


def test_a_schedule_writes_the_learning_rate_from_the_host(shared):
    schedule = lambda epoch, rate: [0.1, 0.0, 0.01][epoch]  # noqa: E731
    other, looks = like_shared(), Looks()
    history = fit(shared, epochs=3, callbacks=[keras.callbacks.LearningRateScheduler(schedule), looks])
    expected = fit(other, epochs=3, callbacks=[keras.callbacks.LearningRateScheduler(schedule)])
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-4)
    assert np.array_equal(looks.kernels[1], looks.kernels[3])  # a rate of 0
    assert not np.array_equal(looks.kernels[3], looks.kernels[4])


def test_early_stopping_stops_and_puts_the_best_weights_back(shared):
    """The rate is set so high after two epochs that the third is worse."""
    schedule = lambda epoch, rate: 0.05 if epoch < 2 else 20.0  # noqa: E731
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    history = fit(
        shared,
        epochs=10,
        validation_data=batches(),
        callbacks=[keras.callbacks.LearningRateScheduler(schedule), stopping],
    )
    assert len(history["loss"]) == 3
    assert history["val_loss"][2] > history["val_loss"][1]
    assert shared.evaluate(batches(), verbose=0) == pytest.approx(history["val_loss"][1], rel=1e-5)


def test_checkpoints_of_each_epoch_have_its_weights(shared, tmp_path):
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    looks = Looks()
    fit(shared, epochs=2, callbacks=[saving, looks])
    other = like_shared()
    for epoch, kernel in ((1, looks.kernels[1]), (2, looks.kernels[3])):
        other.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert np.array_equal(other.get_weights()[0], kernel)


# Models of other kinds.


def test_a_model_that_is_compiled_outside_of_the_scope_logs_what_it_logs_in_it(scoped):
    plain = lambda: keras.Sequential([keras.Input((4,)), dense(1, 2)])  # noqa: E731
    alone, model = plain(), scoped(plain)
    for each in (alone, model):
        each.compile("sgd", "mse", metrics=["mae"], run_eagerly=each is alone)
    expected = fit(alone)
    for name, values in fit(model).items():
        np.testing.assert_allclose(values, expected[name], **CLOSE)


def test_a_custom_training_step_with_collectives(scoped):
    def make():
        model = OwnStep()
        model.compile(jit_compile=True)
        return model

    model = scoped(make)
    losses = fit(model)["own"]
    kernel = np.asarray(keras.initializers.GlorotUniform(1)((4, 1)))
    bias, expected = np.zeros(1, "float32"), []
    for _ in range(2):
        seen = []
        for x, y in ((X[:8], Y[:8]), (X[8:], Y[8:])):
            error = x @ kernel + bias - y
            seen.append(np.mean(error**2))
            kernel = kernel - 0.05 * 2 * x.T @ error / 8
            bias = bias - 0.05 * 2 * error.mean(0)
        expected.append(np.mean(seen))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(model.layer.kernel.numpy(), kernel, rtol=1e-4, atol=1e-5)
    assert float(model.batches.numpy()) == 4.0


def test_mixed_bfloat16_trains(scoped):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = scoped(lambda: build(jit_compile=True))
        losses = fit(model)["loss"]
        outputs = model(X)
    finally:
        keras.config.set_dtype_policy("float32")
    assert outputs.dtype == tf.bfloat16
    assert {weight.dtype.name for weight in model.get_weights()} == {"float32"}
    assert losses[1] < losses[0]
    other = on_one_device()
    np.testing.assert_allclose(losses, fit(other)["loss"], rtol=0.05)  # bfloat16 has 8 bits


def test_a_model_of_many_kinds_of_layers_trains_as_on_one_device(two, scoped):
    def make():
        inputs = keras.Input((8,), dtype="int32")
        x = keras.layers.Embedding(20, 6, embeddings_initializer=keras.initializers.RandomUniform(seed=1))(inputs)
        x = keras.layers.Conv1D(5, 3, kernel_initializer=keras.initializers.GlorotUniform(2), activation="relu")(x)
        x = keras.layers.LayerNormalization()(x)
        x = keras.layers.GlobalAveragePooling1D()(x)
        outputs = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(5))(x)
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    tokens = RANDOM.integers(0, 20, size=(16, 8))
    labels = RANDOM.integers(0, 3, size=16)
    model, other = scoped(make), make()
    other.run_eagerly = True  # which saves the time to trace it
    data = tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(8)
    found, expected = (each.fit(data, epochs=2, verbose=0, shuffle=False).history for each in (model, other))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)
    assert found["accuracy"] == pytest.approx(expected["accuracy"])
    for one, two_ in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two_, rtol=1e-3, atol=1e-4)


def test_sequences_of_other_lengths_are_no_unequal_shares(two):
    """Both replicas have four samples of a batch; the error names the shapes, and not a last batch."""
    with two.strategy.scope():
        model = keras.Sequential([keras.Input((None, 4)), keras.layers.GlobalAveragePooling1D(), dense(1, 2)])
        model.compile("sgd", "mse")

    def samples():
        for length in (3, 3, 3, 5):
            yield np.ones((4, length, 4), "float32"), np.ones((4, 1), "float32")

    specs = tf.TensorSpec([4, None, 4]), tf.TensorSpec([4, 1])
    dataset = two.strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_generator(samples, output_signature=specs)
    )
    with pytest.raises(ReplicaMismatchError, match=r"shape \(4, 3, 4\) on replica 0 and \(4, 5, 4\) on"):
        model.fit(dataset, steps_per_epoch=2, verbose=0)
