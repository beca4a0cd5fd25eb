"""scikit-learn's 1,797 handwritten digits, in batches. They come with scikit-learn: nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

TEST_SHARE = 0.25
SPLIT_SEED = 0  # fixed, whatever the seed of the training: all trainings are tested on the same samples


class Digits(NamedTuple):
    """Images of 8x8 pixels, each a row of 64 numbers from 0 to 1, and the digits on them."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits() -> Digits:
    """The digits, a quarter of them set aside for testing, each digit in both parts alike."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        (images / 16).astype(np.float32),
        labels.astype(np.int32),
        test_size=TEST_SHARE,
        stratify=labels,
        random_state=SPLIT_SEED,
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def steps_per_epoch(digits: Digits, batch_size: int) -> int:
    """How many whole batches there are in an epoch."""
    return len(digits.train_labels) // batch_size


def training_batches(digits: Digits, *, batch_size: int, epochs: int, seed: int) -> tf.data.Dataset:
    """The batches of all epochs, one epoch after the other.

    Each epoch has an order of its own, and drops the samples that are left over when it is cut into whole batches:
    replicas get equal shares of every batch. The orders are drawn here, and not by `tf.data`, so that they
    depend on the seed alone, however often and by whom the dataset is opened.

    Args:
        digits: the samples.
        batch_size: samples in a global batch.
        epochs: how many.
        seed: of the orders.

    Returns:
        A dataset of `epochs * steps_per_epoch(digits, batch_size)` batches of images and labels.
    """
    rng = np.random.default_rng(seed)
    samples = len(digits.train_labels)
    used = steps_per_epoch(digits, batch_size) * batch_size
    order = np.concatenate([rng.permutation(samples)[:used] for _ in range(epochs)])

    def take(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(digits.train_images, indices), tf.gather(digits.train_labels, indices)

    return tf.data.Dataset.from_tensor_slices(order).batch(batch_size, drop_remainder=True).map(take)


def test_batches(digits: Digits, *, batch_size: int) -> tf.data.Dataset:
    """The test samples in batches, the last of which may be smaller."""
    return tf.data.Dataset.from_tensor_slices((digits.test_images, digits.test_labels)).batch(batch_size)
