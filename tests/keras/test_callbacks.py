"""Callbacks see what they see on one device, and what they do to the model counts."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import classifier
from keras import callbacks

pytestmark = pytest.mark.on("mirrored")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=16)
BATCHES, VALIDATION = (tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(8) for count in (16, 8))


@pytest.fixture(scope="module")
def two(make_pair):
    return make_pair(classifier, 2)


def fit(model, *given, epochs=2):
    options = {"validation_data": VALIDATION, "shuffle": False, "verbose": 0, "callbacks": list(given)}
    return model.fit(BATCHES, epochs=epochs, **options).history


class Notes(callbacks.Callback):
    """Keeps of each call what it was told, and the weights that a model has then."""

    def __init__(self, seen, asked):
        super().__init__()
        self._seen, self._asked = seen, asked

    def _note(self, name, index, logs):
        self._seen.append((name, index, dict(logs or {}), self._asked.get_weights()))

    def on_train_begin(self, logs=None):
        self._note("train", 0, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._note("batch begins", batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._note("batch", batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        self._note("test batch", batch, logs)

    def on_test_end(self, logs=None):
        self._note("test", 0, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch", epoch, logs)


def test_each_call_has_the_logs_of_one_device(pair, alike):
    """And the weights of that moment, of whichever of the two models it asks."""
    notes = []
    for model, asked in ((pair.alone, pair.alone), (pair.replicated, pair.original)):
        seen = []
        fit(model, Notes(seen, asked))
        notes.append(seen)
    expected, found = notes
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert len(found) == 1 + 2 * (2 * 2 + 1 + 1 + 1)
    for one, other in zip(found, expected, strict=True):
        alike(one[2:], other[2:])
        assert all(isinstance(value, float) for value in one[2].values())
    weights = [each[3][0].tobytes() for each in found if each[0] == "batch"]
    assert len(set(weights)) == 4


def test_early_stopping_puts_the_best_weights_back(pair, alike):
    """The rate is so high after two epochs that the third is worse."""
    kept = []
    for model in pair.both:
        rates = callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 if epoch < 2 else 30.0)
        stopping = callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        kept.append((fit(model, rates, stopping, epochs=6), stopping.stopped_epoch, model.get_weights()))
    (expected, epoch, weights), (found, found_epoch, found_weights) = kept
    assert found_epoch == epoch == 2
    assert found["val_loss"][2] > found["val_loss"][1]
    alike(found, expected)
    alike(found_weights, weights)
    loss = pair.original.loss(Y[:8], pair.original(X[:8]))
    assert float(loss) == pytest.approx(found["val_loss"][1], rel=1e-4)


def test_the_rate_is_lowered_on_a_plateau(pair, alike):
    logs = []
    for model in pair.both:
        plateau = callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
        logs.append(fit(model, plateau, epochs=4))
    alike(logs[1], logs[0])
    assert logs[1]["learning_rate"] == pytest.approx([0.1, 0.1, 0.05, 0.025])
    assert float(pair.original.optimizer.learning_rate.numpy()) == pytest.approx(0.0125)


def test_a_scheduler_sets_the_rate_and_a_batch_with_a_rate_of_zero_changes_nothing(pair):
    kernels = []
    look = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: kernels.append(pair.original.get_weights()))
    fit(pair.replicated, callbacks.LearningRateScheduler(lambda epoch: [0.1, 0.0, 0.1][epoch]), look, epochs=3)
    assert np.array_equal(kernels[1][0], kernels[3][0])
    assert not np.array_equal(kernels[3][0], kernels[4][0])


def test_checkpoints_have_the_weights_of_their_epoch(pair, tmp_path):
    kernels = []
    look = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kernels.append(pair.replicated.get_weights()[0]))
    weights = callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    whole = callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="val_loss", save_best_only=True)
    history = fit(pair.replicated, weights, whole, look)
    for epoch in (1, 2):
        pair.alone.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert np.array_equal(pair.alone.get_weights()[0], kernels[epoch - 1])
    best = keras.models.load_model(tmp_path / "best.keras")
    assert type(best) is keras.Sequential
    assert np.array_equal(best.get_weights()[0], kernels[int(np.argmin(history["val_loss"]))])
    assert int(best.optimizer.iterations.numpy()) == 2 * (1 + int(np.argmin(history["val_loss"])))


def test_an_interrupted_training_goes_on_from_its_backup(alone_and_replicated, tmp_path, alike):
    """With models of its own: Keras has the model keep the epoch that it went on from."""
    alone, replicated = alone_and_replicated(classifier, 2)
    expected = fit(alone, epochs=3)

    class Interrupts(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(replicated, callbacks.BackupAndRestore(tmp_path), Interrupts(), epochs=3)
    replicated.set_weights([weight * 0 for weight in replicated.get_weights()])
    found = fit(replicated, callbacks.BackupAndRestore(tmp_path), epochs=3)
    assert len(found["loss"]) == 1
    alike({key: values[0] for key, values in found.items()}, {key: values[2] for key, values in expected.items()})
    alike(replicated.get_weights(), alone.get_weights())


def test_a_table_is_written_for_each_epoch(pair, tmp_path):
    tables = []
    for index, model in enumerate(pair.both):
        path = tmp_path / f"{index}.csv"
        fit(model, callbacks.CSVLogger(path))
        tables.append(list(csv.DictReader(path.open())))
    assert tables[1][0].keys() == tables[0][0].keys()
    for expected, found in zip(*tables, strict=True):
        for key, value in expected.items():
            assert float(found[key]) == pytest.approx(float(value), rel=1e-4)


def test_tensorboard_has_losses_and_the_graph(pair, tmp_path):
    board = callbacks.TensorBoard(tmp_path, histogram_freq=1, write_graph=True, update_freq="batch")
    fit(pair.replicated, board)
    files = {path.parent.name for path in tmp_path.rglob("events.out.*")}
    assert files == {"train", "validation"}
    assert all(path.stat().st_size > 100 for path in tmp_path.rglob("events.out.*"))


def test_a_callback_that_stops_training_is_obeyed(pair):
    class Stops(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    assert len(fit(pair.replicated, Stops(), epochs=5)["loss"]) == 1
    assert int(pair.original.optimizer.iterations.numpy()) == 1


def test_a_callback_may_write_weights_and_train_and_predict(pair, alike, agree):
    """Between steps, with the model itself, which is the replicated one."""
    predictions = []

    class Meddles(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.set_weights([weight * 0.5 for weight in self.model.get_weights()])
            predictions.append(self.model.predict_on_batch(X[:6]))

    agree(pair.both, lambda model: fit(model, Meddles(), epochs=1))
    alike(predictions[2:], predictions[:2])
    alike(pair.original.get_weights(), pair.alone.get_weights())


def test_swapped_averages_of_weights_are_put_back(alone_and_replicated, alike, agree):
    averaged = {"use_ema": True, "ema_momentum": 0.5}
    models = alone_and_replicated(lambda: classifier(keras.optimizers.SGD(0.1, **averaged), metrics=None), 2)
    agree(models, lambda model: fit(model, callbacks.SwapEMAWeights(swap_on_epoch=True)))
    alike(models[1].get_weights(), models[0].get_weights())
