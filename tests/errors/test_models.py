"""Keras models that cannot be replicated, batches that cannot be shared out, optimizers out of place."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import BackupError, BatchError, LogError, OptimizerError, ReplicateError
from replica_engine.errors.value_errors import (
    warn_metric_not_a_sum,
    warn_other_batches,
    warn_uneven_rest,
    warn_whole_steps,
)
from replica_engine.keras import BackupAndRestore, CrossReplicaOptimizer, replicate_model, train_function


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


@shows(ReplicateError, "unbuilt")
def test_a_model_that_is_not_built():
    class Mine(keras.Model):
        def __init__(self):
            super().__init__(name="mine")
            self.hidden = keras.layers.Dense(8, name="hidden")

        def call(self, x):
            return self.hidden(x)

    replicate_model(Mine(), replicas=2)


@shows(ReplicateError, "too_few_devices")
def test_more_replicas_than_devices():
    """On 8 CPU devices."""
    words = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")
    layers = [keras.Input((1,), dtype="string"), words, keras.layers.Embedding(4, 2)]
    model = keras.Sequential(layers)
    replicate_model(model, replicas=16)


class Returning(keras.Model):
    """Its step returns what `value` makes of the outputs."""

    def __init__(self, value):
        super().__init__(name="net")
        self.hidden = keras.layers.Dense(2)
        self.value = value
        self(np.ones([1, 3], "float32"))
        self.compile("sgd")

    def call(self, x):
        return self.hidden(x)

    def train_step(self, data):
        return {"value": self.value(self(data[0]))}


def train(value):
    replicated = replicate_model(Returning(value), strategy=MirroredStrategy(["CPU:0", "CPU:1"]))
    replicated.train_on_batch(np.ones([8, 3], "float32"), np.ones([8, 2], "float32"))


@shows(LogError)
def test_a_step_that_returns_a_number_for_each_sample():
    train(lambda outputs: tf.reduce_sum(outputs, axis=1))


@shows(BatchError)
def test_arrays_of_two_lengths():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    replicated = replicate_model(model, replicas=2)
    replicated.train_on_batch(np.ones([8, 4], "float32"), np.ones([6, 1], "float32"))


@pytest.fixture
def _few_sizes(monkeypatch):
    monkeypatch.setattr(train_function, "MANY_SIZES", 2)


@pytest.mark.usefixtures("_few_sizes")
@shows("many_batch_sizes")
def test_batches_of_many_sizes():
    """The warning comes at the second size here, and not at the eighth."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    replicated = replicate_model(model, strategy=TPUStrategy(num_cores=2))
    for size in (2, 8):
        replicated.predict_on_batch(np.ones([size, 4], "float32"))


@shows(warn_whole_steps)
def test_a_step_that_clips_its_gradients():
    class Clipping(keras.Model):
        def __init__(self):
            super().__init__(name="clipping")
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
            self.optimizer.apply(clipped, weights)
            return {"loss": loss}

    model = Clipping()
    model(np.ones([1, 3], "float32"))
    model.compile("sgd")
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    replicated = replicate_model(model, strategy=strategy)
    replicated.train_on_batch(np.ones([8, 3], "float32"), np.ones([8, 2], "float32"))


@shows("note_sparse_inputs")
def test_a_sparse_input_of_a_compiled_model():
    words = keras.Input((4,), sparse=True, name="words")
    model = keras.Model({"words": words}, keras.layers.Dense(2, name="score")(words), name="scorer")
    replicated = replicate_model(model, strategy=TPUStrategy(num_cores=2, soft_placement=False))
    batch = {"words": tf.sparse.from_dense([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 0.0]])}
    replicated.predict(batch, verbose=0)


@shows(OptimizerError)
def test_gradients_applied_in_a_merge_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build([weight])

    def update(strategy, gradient):
        optimizer.apply([gradient], [weight])

    def step(x):
        tf.distribute.get_replica_context().merge_call(update, args=(x,))

    strategy.run(step, args=(tf.constant(1.0),))


@shows(warn_uneven_rest)
def test_a_rest_that_does_not_divide():
    class ItsOwnStep(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((self(x) - y) ** 2) / 4
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = ItsOwnStep([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    # Not of the evaluation: it counts samples.
    model.evaluate(np.ones((9, 3)), np.ones((9, 2)), batch_size=4, verbose=0)
    for _ in range(2):  # warned of once
        model.fit(np.ones((11, 3)), np.ones((11, 2)), batch_size=4, verbose=0)


@shows(warn_metric_not_a_sum)
def test_a_metric_that_is_a_maximum():
    class Biggest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="biggest")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y, outputs, sample_weight=None):
            error = tf.reduce_max(tf.abs(y - outputs))
            self.value.assign(tf.maximum(self.value, error))

        def result(self):
            return self.value

    class ItsOwnStep(keras.Sequential):
        def train_step(self, data):
            x, y = data
            return self.compute_metrics(x, y, self(x, training=True))

    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = ItsOwnStep([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", metrics=[Biggest()])
    model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


@shows(BackupError, "another_model")
def test_a_backup_of_another_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for units in (2, 3):
        layers = [keras.Input((3,)), keras.layers.Dense(units, name="head")]
        model = keras.Sequential(layers, name="net")
        model.compile("sgd", "mse")
        backup = BackupAndRestore("backup", delete_checkpoint=False)
        x, y = np.ones((4, 3)), np.ones((4, units))
        model.fit(x, y, verbose=0, shuffle=False, callbacks=[backup])


class Ends(keras.callbacks.Callback):
    """Ends a training after its sixth batch, as a lost machine does."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            raise InterruptedError


def train_with_backup(folder, batch_size=4, is_lost=False, is_frozen=False):
    """Trains a net of two layers for an epoch of 48 samples."""
    layers = [keras.Input((3,)), keras.layers.Dense(3, name="base"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential(layers, name="net")
    model.layers[0].trainable = not is_frozen
    model.compile("adam", "mse")
    backup = BackupAndRestore(folder, save_freq=1, asynchronous=False)
    callbacks = [Ends(), backup] if is_lost else [backup]
    x, y = np.ones((48, 3)), np.ones((48, 2))
    with contextlib.suppress(InterruptedError):
        model.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False, callbacks=callbacks)


@shows(BackupError.fewer_batches)
def test_a_backup_behind_the_end_of_the_epoch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train_with_backup("backup", batch_size=4, is_lost=True)
    train_with_backup("backup", batch_size=16)


@shows(warn_other_batches)
def test_a_backup_of_larger_batches(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train_with_backup("backup", batch_size=4, is_lost=True)
    train_with_backup("backup", batch_size=2)


@shows(BackupError, "other_trained")
def test_a_backup_of_a_frozen_layer(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train_with_backup("backup", is_frozen=True, is_lost=True)
    train_with_backup("backup")


class Counts(keras.callbacks.Callback):
    """Has a state, and no way to save it."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


@shows("not_backed_up")
def test_a_callback_whose_state_cannot_be_saved(tmp_path):
    model = make_model()
    model.compile("sgd", "mse")
    backup = BackupAndRestore(tmp_path)
    batch = np.ones((4, 3)), np.ones((4, 2))
    batches = (batch for _ in range(2))
    model.fit(batches, steps_per_epoch=1, epochs=2, verbose=0, callbacks=[Counts(), backup])


@shows(BackupError)
def test_a_backup_of_an_unbuilt_model(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2)], name="net")
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0, callbacks=[BackupAndRestore(tmp_path)])
