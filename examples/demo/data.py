"""The 1,797 handwritten digits of scikit-learn, in batches. scikit-learn includes them: nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from sklearn import datasets
from sklearn.model_selection import train_test_split

SEED = 0  # of the split into training and test samples, the order of the samples, and the initial weights
TEST_SAMPLES = 450


class Digits(NamedTuple):
    """Images of 8x8 pixels, each as a row of 64 numbers from 0 to 1, and the digits on them."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits() -> Digits:
    """Loads the digits; `TEST_SAMPLES` are for testing. Both parts have the same proportions of the ten digits."""
    images, labels = datasets.load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        (images / 16).astype(np.float32),
        labels.astype(np.int32),
        test_size=TEST_SAMPLES,
        stratify=labels,
        random_state=SEED,
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def steps_per_epoch(digits: Digits, batch_size: int) -> int:
    """The number of whole batches in an epoch."""
    return len(digits.train_labels) // batch_size


def training_batches(digits: Digits, *, batch_size: int, epochs: int) -> tf.data.Dataset:
    """Returns the batches of all epochs, one epoch after the other.

    Each epoch has a different order. It drops the samples that do not fill a whole batch, so that replicas get equal
    shards of every batch. This function draws the orders itself instead of using `tf.data`. So they are the same
    however often the dataset is opened.

    Args:
        digits: the samples.
        batch_size: the number of samples in a global batch.
        epochs: the number of epochs.

    Returns:
        A dataset of `epochs * steps_per_epoch(digits, batch_size)` batches of images and labels.
    """
    rng = np.random.default_rng(SEED)
    samples = len(digits.train_labels)
    used = steps_per_epoch(digits, batch_size) * batch_size
    order = np.concatenate([rng.permutation(samples)[:used] for _ in range(epochs)])

    def take(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(digits.train_images, indices), tf.gather(digits.train_labels, indices)

    return tf.data.Dataset.from_tensor_slices(order).batch(batch_size, drop_remainder=True).map(take)


def test_batches(digits: Digits, *, batch_size: int) -> tf.data.Dataset:
    """The test samples in batches; the last batch may be smaller."""
    return tf.data.Dataset.from_tensor_slices((digits.test_images, digits.test_labels)).batch(batch_size)
