"""Keras `fit` on N replicas. Copy it and put in your model.

A Keras model that is built and compiled under `strategy.scope()` is trained on all replicas of the strategy. `fit`
splits every batch over the replicas, sums their gradients and gives every replica's copy of a weight the same update.
Nothing else needs to change.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from replica_engine.demo.data import Digits, steps_per_epoch, test_batches, training_batches
from replica_engine.demo.progress import Progress


def train(
    strategy: tf.distribute.Strategy,
    digits: Digits,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    progress: Progress,
) -> tuple[list[tf.Variable], float]:
    """Trains a small convolutional net on the digits.

    Args:
        strategy: the strategy whose replicas train; any strategy works, also `tf.distribute.OneDeviceStrategy`.
        digits: the samples.
        epochs: how many times to go through the training samples.
        batch_size: the number of samples in a global batch, which is split over the replicas.
        learning_rate: the step size.
        seed: the seed of the initial weights and of the order of the samples.
        progress: the progress display, which is told of each step and epoch.

    Returns:
        The trained weights, and the fraction of the test samples that the model classifies correctly.
    """
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(learning_rate, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    model.fit(
        # One dataset with the batches of all epochs, one epoch after the other. The usual `dataset.shuffle(...)`
        # would train equally well. But under a strategy Keras opens the dataset once more to build the model, and
        # then the order of the samples would not be the same in every run.
        training_batches(digits, batch_size=batch_size, epochs=epochs, seed=seed),
        epochs=epochs,
        steps_per_epoch=steps_per_epoch(digits, batch_size),
        shuffle=False,
        verbose=0,
        callbacks=[ReportProgress(progress)],
    )
    _, accuracy = model.evaluate(test_batches(digits, batch_size=batch_size), verbose=0)

    # `value` of a Keras variable is its tf.Variable, which has a copy on every replica.
    return [variable.value for variable in model.trainable_variables], accuracy


def build_model() -> keras.Model:
    """The model: it takes an image of 8x8 pixels as a row of 64 numbers, and scores each of the ten digits."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


class ReportProgress(keras.callbacks.Callback):
    """Reports each step and epoch of `fit` to the progress display."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras after each step; the loss in `logs` is the mean since the epoch began."""
        self._progress.step((logs or {})["loss"])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras after each epoch."""
        self._progress.epoch(loss=(logs or {})["loss"], accuracy=(logs or {})["accuracy"])
