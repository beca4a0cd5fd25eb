"""A restart with another number of steps at once, another size of batches, or other frozen layers.

It goes on with the batch after the last one that was trained, or says that it cannot.
"""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import BackupError
from replica_engine.keras import BackupAndRestore, replicate_model

X = np.random.default_rng(0).normal(size=(48, 3)).astype("f")


class Ends(keras.callbacks.Callback):
    """Ends a training after so many of its steps."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() >= self.after:
            raise InterruptedError


class Seen(keras.metrics.Metric):
    """The sum of the numbers of the rows of an epoch."""

    def __init__(self):
        super().__init__(name="seen")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y, tf.float32)))

    def result(self):
        return self.total + 0.0


NUMBERS = np.arange(48.0, dtype="f")[:, None]
ROWS = NUMBERS.sum()


def arrays(batch_size=8):
    return {"x": X, "y": NUMBERS, "batch_size": batch_size, "shuffle": True}


def dataset(batch_size=8, drop_remainder=False):
    return {"x": tf.data.Dataset.from_tensor_slices((X, NUMBERS)).batch(batch_size, drop_remainder)}


def repeated(batch_size=8):
    return {"x": dataset(batch_size)["x"].repeat(), "steps_per_epoch": 48 // batch_size}


def generator(batch_size=8):
    spec = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    batches = [(X[at : at + batch_size], NUMBERS[at : at + batch_size]) for at in range(0, 48, batch_size)]
    return {"x": tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)}


def train(folder, data, steps_at_once=1, after=None, kind="threads", epochs=3):
    """Trains; returns how many steps all processes have made, and the rows of each epoch."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    is_eager = kind == "plain" and steps_at_once == 1  # which saves the time to trace it
    model.compile("adam", "mse", metrics=[Seen()], steps_per_execution=steps_at_once, run_eagerly=is_eager)
    devices = replica_engine.logical_devices(2)
    trained = replicate_model(model, strategy=replica_engine.MirroredStrategy(devices)) if kind == "threads" else model
    backup = BackupAndRestore(folder, save_freq=1, asynchronous=False)
    callbacks = [backup] if after is None else [backup, Ends(after)]
    with contextlib.suppress(InterruptedError):
        history = trained.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks).history
        return int(model.optimizer.iterations.numpy()), history["seen"]


@pytest.mark.parametrize("data", [arrays, dataset, generator, repeated])
@pytest.mark.parametrize(("first", "second", "after"), [(1, 6, 3), (2, 3, 3), (4, 3, 8), (6, 1, 7)])
def test_another_number_of_steps_at_once(data, first, second, after, tmp_path):
    """Each row is trained once in an epoch, in the epoch that goes on and in those after it."""
    plain = data is not arrays or (first, second) != (1, 6)  # replicas once
    train(tmp_path, data(), first, after, "plain" if plain else "threads")
    if data is repeated and second > 1:
        with pytest.raises(BackupError, match="do not end where the epoch ends"):
            train(tmp_path, data(), second, kind="plain")
        return
    steps, rows = train(tmp_path, data(), second, kind="plain" if plain else "threads")
    assert rows == [ROWS] * 3
    assert steps == 18 or data is generator  # Keras makes a step without rows at an end that it did not know


def restart(tmp_path, before, now):
    """Ends a training after 5 batches, and starts it with other data."""
    train(tmp_path, before, after=6, kind="plain", epochs=1)
    return train(tmp_path, now, kind="plain", epochs=1)


@pytest.mark.parametrize(
    ("before", "now", "batches"),
    [
        (arrays(4), arrays(16), 3),
        (dataset(4, True), dataset(24, True), 2),
        (generator(4), generator(16), 3),
        (repeated(4), repeated(12), 4),
    ],
)
def test_an_epoch_that_ends_before_the_place_of_the_backup(before, now, batches, tmp_path):
    with pytest.raises(BackupError, match=rf"after batch 5 of an epoch, and the epoch has {batches} batches now"):
        restart(tmp_path, before, now)


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (arrays(4), arrays(2), "a batch has 2 samples now, and had 4.*are trained again"),
        (arrays(4), arrays(8), "a batch has 8 samples now, and had 4.*are left out"),
        (dataset(4, True), dataset(8, True), "a batch has 8 samples now, and had 4.*are left out"),
        (dataset(4), dataset(3), "an epoch has 16 batches now, and had 12.*trained again or left out"),
    ],
)
def test_batches_of_another_size_are_warned_of(before, now, text, tmp_path, caplog):
    restart(tmp_path, before, now)
    (warning,) = [each.getMessage() for each in caplog.records if "counted in batches" in each.getMessage()]
    assert re.search(text, warning, re.DOTALL)


@pytest.mark.parametrize("data", [arrays, dataset, generator, repeated])
def test_batches_of_the_same_size_are_not_warned_of(data, tmp_path, caplog):
    restart(tmp_path, data(4), data(4))
    assert "counted in batches" not in caplog.text


def test_a_loop_of_its_own_says_so_too(caplog):
    def restored(now):
        state = replica_engine.TrainingState()
        for _ in state.batches(tf.data.Dataset.range(12).batch(2)):
            if state.batch == 3:
                break
        again = replica_engine.TrainingState()
        again.deserialize(state.serialize())
        return len(list(again.batches(tf.data.Dataset.range(12).batch(now))))

    assert restored(2) == 3
    assert "counted in batches" not in caplog.text
    assert restored(1) == 9
    assert "an epoch has 12 batches now, and had 6" in caplog.text
    with pytest.raises(BackupError, match="has 2 batches now"):
        restored(6)


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize(("before", "now"), [([0], [1]), ([0], []), ([1, 2], [0, 2]), ([0, 1], [1])])
def test_another_frozen_layer(in_scope, before, now, tmp_path):
    """Weights of one shape, so what the optimizer keeps of one could be read into another."""
    fit = fitting(tmp_path, in_scope)
    with pytest.raises(InterruptedError):
        fit(before, Ends(3))
    with pytest.raises(BackupError, match=r"in which .*/(kernel|bias) was (frozen|trained), and here it is"):
        fit(now)
    fit(before)


def test_a_layer_that_is_frozen_only_now(tmp_path):
    """It stays as it is, and each of the others goes on with what the optimizer has kept of it."""
    fit, ends = fitting(tmp_path), Ends(3)
    starts = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: seen.append(state(starts.model)))
    seen = []

    def state(model):
        return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]

    with pytest.raises(InterruptedError):
        fit([], starts, ends)
    stopped = seen[-1]
    seen.clear()
    fit([0], starts)
    assert all(np.array_equal(one, other) for one, other in zip(seen[0], stopped, strict=True))
    frozen, trained = np.array_equal(seen[0][0], seen[-1][0]), np.array_equal(seen[0][2], seen[-1][2])
    assert (frozen, trained) == (True, False)


def fitting(tmp_path, in_scope=False):
    def fit(frozen, *callbacks):
        strategy = replica_engine.MirroredStrategy(replica_engine.logical_devices(2))
        with strategy.scope() if in_scope else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(3) for _ in range(4))])
            for index in frozen:
                model.layers[index].trainable = False
            model.compile("adam", "mse", run_eagerly=True)
            if in_scope:
                model.optimizer.build(model.trainable_variables)
        backup = BackupAndRestore(tmp_path, save_freq=1, asynchronous=False)
        model.fit(X, X, batch_size=8, verbose=0, callbacks=[backup, *callbacks])

    return fit
