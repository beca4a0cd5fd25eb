"""A custom training loop on N replicas, in plain TensorFlow. Copy it and put in your model.

One step, as every replica sees it:

1. The replica gets its shard of the global batch and computes the gradients of that shard.
2. Merge call: the replica waits until all replicas are here. Then `apply_gradients` runs once for all replicas: it sums
   the gradients over the replicas and gives every replica's copy of each weight the same update.
3. The replica continues and returns its part of the loss.

The function never asks for the number of replicas. On one device the same code takes the same steps.
"""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from examples.demo.data import SEED, Digits, steps_per_epoch, test_batches, training_batches

HIDDEN = 128
LEARNING_RATE = 0.1
MOMENTUM = 0.9


def train(
    strategy: tf.distribute.Strategy,
    digits: Digits,
    *,
    epochs: int,
    batch_size: int,
    verbose: bool,
) -> tuple[list[tf.Variable], dict[str, list[float]], float]:
    """Trains two dense layers on the digits, with stochastic gradient descent and momentum.

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
    # A variable made in the scope has a copy on every replica, and all copies start out equal.
    with strategy.scope():
        weights = [tf.Variable(value) for value in initial_weights()]
        velocities = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Runs on every replica, with the replica's shard of the global batch."""
        with tf.GradientTape() as tape:
            logits = predict(weights, images)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            # Divide by the size of the global batch, not of this shard. Then the sum over the replicas is the mean
            # over the global batch, for any number of replicas.
            loss = tf.reduce_sum(losses) / batch_size
        gradients = tape.gradient(loss, weights)
        tf.distribute.get_replica_context().merge_call(apply_gradients, args=(gradients,))
        return loss, count_correct(logits, labels)

    def apply_gradients(strategy: tf.distribute.Strategy, gradients: list[tf.distribute.DistributedValues]) -> None:
        """Runs once, while all replicas wait. For each weight, `gradients` has the gradients of all replicas."""
        sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, list(zip(gradients, weights, strict=True)))
        for weight, velocity, gradient in zip(weights, velocities, sums, strict=True):
            strategy.extended.update(weight, update_copy, args=(velocity, gradient))

    def update_copy(weight: tf.Variable, velocity: tf.Variable, gradient: tf.Tensor) -> None:
        """Runs for each replica's copy of a weight, on the device of that copy."""
        velocity.assign(MOMENTUM * velocity + gradient)
        weight.assign_sub(LEARNING_RATE * velocity)

    # The tf.function is around `run`, so the step of all replicas is one graph.
    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        losses, correct = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce("SUM", losses, axis=None), strategy.reduce("SUM", correct, axis=None)

    dataset = training_batches(digits, batch_size=batch_size, epochs=epochs)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    steps = steps_per_epoch(digits, batch_size)
    history: dict[str, list[float]] = {"loss": [], "seconds": []}
    for epoch in range(epochs):
        total_loss, total_correct = 0.0, 0
        for _ in range(steps):
            began = time.perf_counter()
            images, labels = next(batches)
            loss, correct = train_step(images, labels)
            total_loss += float(loss)
            total_correct += int(correct)
            history["seconds"].append(time.perf_counter() - began)
        history["loss"].append(total_loss / steps)
        if verbose:
            accuracy = total_correct / (steps * batch_size)
            print(f"epoch {epoch + 1}/{epochs} - loss: {total_loss / steps:.4f} - accuracy: {accuracy:.4f}", flush=True)
    return weights, history, evaluate(strategy, weights, digits, batch_size=batch_size)


def evaluate(strategy: tf.distribute.Strategy, weights: list[tf.Variable], digits: Digits, *, batch_size: int) -> float:
    """Returns the fraction of the test samples that the model classifies correctly.

    Args:
        strategy: the strategy whose replicas split the work.
        weights: the weights of the model, made in the strategy's scope.
        digits: the samples.
        batch_size: the number of samples in a global batch. The last batch may be smaller, and a replica's shard of it
            may be empty.

    Returns:
        A number from 0.0 to 1.0.
    """

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return count_correct(predict(weights, images), labels)

    @tf.function
    def test_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)

    batches = strategy.experimental_distribute_dataset(test_batches(digits, batch_size=batch_size))
    correct = sum(int(test_step(images, labels)) for images, labels in batches)
    return correct / len(digits.test_labels)


def initial_weights() -> list[np.ndarray]:
    """The weights of two dense layers, 64 pixels to `HIDDEN` units to 10 digits: kernel, bias, kernel, bias."""
    rng = np.random.default_rng(SEED)

    def kernel(rows: int, columns: int) -> np.ndarray:
        return rng.normal(scale=(2 / rows) ** 0.5, size=(rows, columns)).astype(np.float32)

    return [kernel(64, HIDDEN), np.zeros(HIDDEN, np.float32), kernel(HIDDEN, 10), np.zeros(10, np.float32)]


def predict(weights: list[tf.Variable], images: tf.Tensor) -> tf.Tensor:
    """The model: computes a score for each of the ten digits."""
    kernel, bias, kernel_out, bias_out = weights
    return tf.nn.relu(images @ kernel + bias) @ kernel_out + bias_out


def count_correct(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """The number of samples whose highest score is at their label."""
    hits = tf.argmax(logits, axis=1, output_type=labels.dtype) == labels
    return tf.reduce_sum(tf.cast(hits, tf.int32))
