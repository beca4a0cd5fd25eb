"""Keras `fit` on N replicas. Copy it and put in your model.

A Keras model that is built and compiled under `strategy.scope()` is trained on all replicas of the strategy. `fit`
splits every batch over the replicas, sums their gradients and gives every replica's copy of a weight the same update.
Nothing else needs to change.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

from examples.demo.data import SEED, Digits, steps_per_epoch, test_batches, training_batches

LEARNING_RATE = 0.1


def train(
    strategy: tf.distribute.Strategy,
    digits: Digits,
    *,
    epochs: int,
    batch_size: int,
    verbose: bool,
) -> tuple[list[tf.Variable], dict[str, list[float]], float]:
    """Trains a small convolutional net on the digits.

    Args:
        strategy: the strategy whose replicas train; any strategy works, also `tf.distribute.OneDeviceStrategy`.
        digits: the samples.
        epochs: how many times to go through the training samples.
        batch_size: the number of samples in a global batch, which is split over the replicas.
        verbose: whether to print a line for each epoch.

    Returns:
        The trained weights; the mean "loss" of each epoch, and the "seconds" of each step; and the fraction of the test
        samples that the model classifies correctly.
    """
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(LEARNING_RATE, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    clock = Clock()
    fitted = model.fit(
        # One dataset with the batches of all epochs, one epoch after the other. The usual `dataset.shuffle(...)`
        # would train equally well. But under a strategy Keras opens the dataset once more to build the model, and
        # then the order of the samples would not be the same in every run.
        training_batches(digits, batch_size=batch_size, epochs=epochs),
        epochs=epochs,
        steps_per_epoch=steps_per_epoch(digits, batch_size),
        shuffle=False,
        verbose=2 if verbose else 0,  # a line for each epoch
        callbacks=[clock],
    )
    _, accuracy = model.evaluate(test_batches(digits, batch_size=batch_size), verbose=0)

    # `value` of a Keras variable is its tf.Variable, which has a copy on every replica.
    weights = [variable.value for variable in model.trainable_variables]
    return weights, {"loss": fitted.history["loss"], "seconds": clock.seconds}, accuracy


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


class Clock(keras.callbacks.Callback):
    """Measures the time of each step, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras before the first step of an epoch."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras after each step."""
        self.seconds.append(time.perf_counter() - self._began)
        self._began = time.perf_counter()
