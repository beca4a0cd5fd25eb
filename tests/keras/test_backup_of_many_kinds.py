"""What a `fit` with `BackupAndRestore` goes on with: moments, models and data that are easily forgotten.

A callback ends the first `fit` with an exception; the second one, of a model made in the same way, must come to what an
undisturbed one comes to, bit by bit. `test_backup.py` kills processes.
"""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import Stops, dense

import replica_engine
from replica_engine.errors import BackupError, CheckpointError
from replica_engine.keras import BackupAndRestore, replicate_model
from replica_engine.keras.backup.backup_files import BackupFolder

DATA = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
X, Y = DATA[:, :4], DATA[:, 4:]


def check_goes_on(tmp_path, train, stopped_at, save_freq=2):
    """Trains undisturbed, and with an end after some batches; `train` takes callbacks and returns arrays."""

    def run(name, *callbacks):
        keras.utils.set_random_seed(1)
        return train([*callbacks, BackupAndRestore(tmp_path / name, save_freq=save_freq)])

    with pytest.raises(InterruptedError):
        run("stopped", Stops(stopped_at))
    for found, expected in zip(run("stopped"), run("undisturbed"), strict=True):
        np.testing.assert_array_equal(found, expected)


def plain(optimizer):
    """A model of Keras that runs eagerly, which saves the time to trace it."""
    return dense(4, 2, optimizer, "mse", run_eagerly=True)


def values_of(model, history, *optimizers):
    variables = [*model.variables, *(variable for each in optimizers for variable in each.variables)]
    return [*(variable.numpy() for variable in variables), *map(np.array, history.history.values())]


def test_replicas_keep_their_moving_statistics_at_the_end_of_an_epoch(tmp_path):
    def train(callbacks):
        strategy = replica_engine.MirroredStrategy(replica_engine.logical_devices(2))
        norm = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        replicated = replicate_model(model, strategy=strategy)
        history = replicated.fit(X, Y, batch_size=10, epochs=3, verbose=0, callbacks=callbacks)
        return values_of(model, history, model.optimizer)

    check_goes_on(tmp_path, train, 10)  # the last backup is that of the end of the second epoch


def test_a_fit_waits_for_the_backup_that_the_one_before_is_writing(tmp_path, monkeypatch):
    goes_on, finish = threading.Event(), BackupFolder.finish
    monkeypatch.setattr(BackupFolder, "finish", lambda *args: goes_on.wait(300) and finish(*args))
    seen = []

    def train(*callbacks):
        model = plain("adam")
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[count, *callbacks, BackupAndRestore(tmp_path, 2)])

    with pytest.raises(InterruptedError):
        train(Stops(3))
    threading.Timer(0.3, goes_on.set).start()
    train()
    assert seen == [0, 1, 2, 2, 3, 4]


class Adversaries(keras.Model):
    """As the examples of Keras write one: no `call`, and two optimizers that the first step builds."""

    def __init__(self):
        super().__init__()
        self.generator = dense(3, 4)
        self.critic = dense(4, 1)
        self.seed = keras.random.SeedGenerator(5)

    def compile(self, first, second, **options):
        super().compile(**options)
        self.first, self.second = first, second

    def train_step(self, real):
        latent = keras.random.normal((tf.shape(real)[0], 3), seed=self.seed)
        for optimizer, part, sign in ((self.first, self.critic, 1.0), (self.second, self.generator, -1.0)):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(self.critic(self.generator(latent)) - self.critic(real))
            weights = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_optimizers_that_the_first_step_builds(tmp_path):
    def train(callbacks):
        model = Adversaries()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), run_eagerly=True)
        data = tf.data.Dataset.from_tensor_slices(X).shuffle(40).batch(8)
        history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        return values_of(model, history, model.first, model.second)

    check_goes_on(tmp_path, train, 8)


class Callable(Adversaries):
    def call(self, real):
        return self.critic(real)


def test_optimizers_of_a_scope_that_the_first_step_builds(tmp_path):
    def train(callbacks):
        strategy = replica_engine.MirroredStrategy(replica_engine.logical_devices(2))
        with strategy.scope():
            model = Callable()
            model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
        history = model.fit(
            tf.data.Dataset.from_tensor_slices(X).shuffle(40).batch(8), epochs=2, verbose=0, callbacks=callbacks
        )
        return values_of(model, history, model.first, model.second)

    check_goes_on(tmp_path, train, 8)


# The last backup is that of a last batch, or of one after validations.
@pytest.mark.parametrize(("stopped_at", "in_scope"), [(3, True), (6, True), (6, False)])
def test_validation_that_shuffles_and_an_end_that_comes_unexpected(tmp_path, stopped_at, in_scope):
    """Each validation has another order; and Keras learns in the first epoch how long the data is."""

    def train(callbacks):
        strategy = replica_engine.MirroredStrategy(replica_engine.logical_devices(2))
        with strategy.scope() if in_scope else contextlib.nullcontext():
            model = plain("adam")
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        validation = data.shuffle(40).batch(8)
        data = data.batch(20).filter(lambda x, y: True)
        trained = model if in_scope else replicate_model(model, strategy=strategy)
        history = trained.fit(
            data, epochs=3, verbose=0, callbacks=callbacks, validation_data=validation, validation_steps=2
        )
        return values_of(model, history, model.optimizer)

    check_goes_on(tmp_path, train, stopped_at, save_freq=1)


def test_a_dataset_that_draws_from_a_generator_is_named(tmp_path, caplog):
    noise = tf.random.Generator.from_seed(1)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model = plain("adam")
    drawn = data.map(lambda x, y: (x + noise.normal([4]), y)).prefetch(1)
    named = "the variables that functions of the dataset write, such as a tf.random.Generator"
    for training, validation, lines in (
        (data, data, []),
        (drawn, data, [f"- {named}"]),
        (data, drawn, [f"- of the validation data, {named}"]),
    ):
        caplog.clear()
        model.fit(training, validation_data=validation, verbose=0, callbacks=[BackupAndRestore(tmp_path, 1)])
        found = [line for line in caplog.text.splitlines() if named in line]
        assert [line.partition(named)[0] + named for line in found] == lines


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


def test_the_order_that_keras_draws_for_a_dataset_of_threads(tmp_path):
    def train(callbacks):
        model = plain("sgd")
        return values_of(model, model.fit(Batches(workers=2), epochs=2, verbose=0, callbacks=callbacks))

    check_goes_on(tmp_path, train, 8)


def test_two_fits_with_one_folder(tmp_path):
    """The first `fit` has nothing to do where the backup is one of the second, and leaves it."""

    def train(callbacks):
        model = plain("adam")
        for begin, end in ((0, 2), (2, 4)):
            history = model.fit(X, Y, batch_size=20, initial_epoch=begin, epochs=end, verbose=0, callbacks=callbacks)
        return values_of(model, history, model.optimizer)

    check_goes_on(tmp_path, train, 7)


def test_a_layer_that_the_first_step_builds(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2, name="inner")
            self.add_weight(shape=(), name="own")

        def call(self, x):
            return self.dense(x)

    model = Own()
    model.compile("sgd", "mse")
    model.built = True  # as a build() of the user's says that makes no layer's variables
    with pytest.raises(BackupError, match=r"its layer 'inner' is not.* nothing calls"):
        model.fit(X, Y, verbose=0, callbacks=[BackupAndRestore(tmp_path)])


def test_a_folder_that_cannot_be_written_to_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").touch()
    model = dense(4, 2, "sgd", "mse")
    with pytest.raises(CheckpointError, match=r"file' could not be written: .*Not a directory"):
        model.fit(X, Y, verbose=0, callbacks=[BackupAndRestore(tmp_path / "file")])
