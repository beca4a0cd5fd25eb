"""The models of the training benchmarks, each written once for TensorFlow, JAX and PyTorch.

A model is a function from weights and a batch to a loss. It calls `Ops`, which each framework implements, so contenders
differ in the framework and never in the mathematics. Weights and batches are NumPy arrays from a fixed seed, so all
contenders start from the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

BATCHES = 4
"""The number of different batches for each model, used in turn."""


class Ops(Protocol):
    """The operations that a model needs from a framework, besides Python's operators."""

    def relu(self, x: Any) -> Any:
        """max(x, 0)."""

    def softmax(self, x: Any) -> Any:
        """Softmax over the last dimension."""

    def standardized(self, x: Any) -> Any:
        """x with mean 0 and variance 1 over the last dimension."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """x in another shape."""

    def einsum(self, equation: str, *operands: Any) -> Any:
        """Einstein summation."""

    def dense(self, x: Any, weight: Any) -> Any:
        """The product of the last dimension of x and a matrix."""

    def conv(self, x: Any, kernel: Any) -> Any:
        """A 2D convolution with stride 1 and "SAME" padding."""

    def max_pool(self, x: Any) -> Any:
        """Max pooling over 2 x 2 pixels."""

    def take(self, table: Any, ids: Any) -> Any:
        """Rows of a table."""

    def cross_entropy(self, logits: Any, labels: Any) -> Any:
        """The mean cross entropy over all labels."""


class TensorFlowOps:
    """The operations in TensorFlow."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._tf = tf
        self.relu = tf.nn.relu
        self.softmax = tf.nn.softmax
        self.reshape = tf.reshape
        self.einsum = tf.einsum
        self.take = tf.gather

    def standardized(self, x: Any) -> Any:
        """See `Ops.standardized`."""
        centered = x - self._tf.reduce_mean(x, -1, keepdims=True)
        return centered * self._tf.math.rsqrt(self._tf.reduce_mean(centered * centered, -1, keepdims=True) + 1e-5)

    def dense(self, x: Any, weight: Any) -> Any:
        """See `Ops.dense`. `@` would compute the gradient with one product for each example."""
        return self._tf.tensordot(x, weight, 1)

    def conv(self, x: Any, kernel: Any) -> Any:
        """See `Ops.conv`."""
        return self._tf.nn.conv2d(x, kernel, strides=1, padding="SAME")

    def max_pool(self, x: Any) -> Any:
        """See `Ops.max_pool`."""
        return self._tf.nn.max_pool2d(x, 2, strides=2, padding="VALID")

    def cross_entropy(self, logits: Any, labels: Any) -> Any:
        """See `Ops.cross_entropy`."""
        each = self._tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return self._tf.reduce_mean(each)


class JaxOps:
    """The operations in JAX."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self._jax, self._jnp = jax, jnp
        self.relu = jax.nn.relu
        self.softmax = jax.nn.softmax
        self.reshape = jnp.reshape
        self.einsum = jnp.einsum

    def standardized(self, x: Any) -> Any:
        """See `Ops.standardized`."""
        centered = x - self._jnp.mean(x, -1, keepdims=True)
        return centered * self._jax.lax.rsqrt(self._jnp.mean(centered * centered, -1, keepdims=True) + 1e-5)

    def dense(self, x: Any, weight: Any) -> Any:
        """See `Ops.dense`."""
        return x @ weight

    def conv(self, x: Any, kernel: Any) -> Any:
        """See `Ops.conv`."""
        numbers = ("NHWC", "HWIO", "NHWC")
        return self._jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def max_pool(self, x: Any) -> Any:
        """See `Ops.max_pool`."""
        window = (1, 2, 2, 1)
        return self._jax.lax.reduce_window(x, -np.inf, self._jax.lax.max, window, window, "VALID")

    def take(self, table: Any, ids: Any) -> Any:
        """See `Ops.take`."""
        return self._jnp.take(table, ids, axis=0)

    def cross_entropy(self, logits: Any, labels: Any) -> Any:
        """See `Ops.cross_entropy`. It sums over one-hot rows, whose gradient needs no scatter."""
        chosen = self._jax.nn.one_hot(labels, logits.shape[-1]) * self._jax.nn.log_softmax(logits)
        return -self._jnp.mean(self._jnp.sum(chosen, -1))


class TorchOps:
    """The operations in PyTorch; `labels` are int64."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.relu = torch.relu
        self.reshape = torch.reshape
        self.einsum = torch.einsum

    def softmax(self, x: Any) -> Any:
        """See `Ops.softmax`."""
        return self._torch.softmax(x, -1)

    def standardized(self, x: Any) -> Any:
        """See `Ops.standardized`."""
        return self._torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5)

    def dense(self, x: Any, weight: Any) -> Any:
        """See `Ops.dense`."""
        return x @ weight

    def conv(self, x: Any, kernel: Any) -> Any:
        """See `Ops.conv`. PyTorch has channels before pixels."""
        images, kernels = x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)
        return self._torch.nn.functional.conv2d(images, kernels, padding="same").permute(0, 2, 3, 1)

    def max_pool(self, x: Any) -> Any:
        """See `Ops.max_pool`."""
        return self._torch.nn.functional.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)

    def take(self, table: Any, ids: Any) -> Any:
        """See `Ops.take`."""
        return table[ids]

    def cross_entropy(self, logits: Any, labels: Any) -> Any:
        """See `Ops.cross_entropy`."""
        classes = logits.shape[-1]
        return self._torch.nn.functional.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))


Loss = Callable[[Ops, Sequence[Any], Any, Any], Any]
"""Computes the loss from weights and a batch (x, labels)."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its weights and its data.

    Attributes:
        name: the name in the table.
        loss: the mean loss of a batch.
        shapes: the shapes of the weights.
        batch: the number of examples for each replica.
        example: the shape of one example.
        labels: the shape of the labels of one example.
        classes: the number of classes.
        ids: the number of different ids in the examples; 0 for examples of real numbers.
        rate: the learning rate.
    """

    name: str
    loss: Loss
    shapes: tuple[tuple[int, ...], ...]
    batch: int
    example: tuple[int, ...]
    labels: tuple[int, ...] = ()
    classes: int = 10
    ids: int = 0
    rate: float = 0.05

    def weights(self) -> list[np.ndarray]:
        """The initial weights: random, scaled so that activations are about 1; biases are 0."""
        random = np.random.default_rng(0)
        return [
            (random.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)
            if len(shape) > 1
            else np.zeros(shape, np.float32)
            for shape in self.shapes
        ]

    def data(self, replicas: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Batches (x, labels), with a leading dimension for the replicas."""
        random = np.random.default_rng(1)
        lead = (replicas, self.batch)
        batches = []
        for _ in range(BATCHES):
            x: np.ndarray
            if self.ids:
                x = random.integers(self.ids, size=lead + self.example, dtype=np.int32)
            else:
                x = random.standard_normal(lead + self.example, dtype=np.float32)
            batches.append((x, random.integers(self.classes, size=lead + self.labels, dtype=np.int32)))
        return batches


def _mlp(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
    w1, b1, w2, b2, w3, b3 = weights
    x = ops.relu(ops.dense(x, w1) + b1)
    x = ops.relu(ops.dense(x, w2) + b2)
    return ops.cross_entropy(ops.dense(x, w3) + b3, labels)


def _conv(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
    k1, b1, k2, b2, w, b = weights
    x = ops.max_pool(ops.relu(ops.conv(x, k1) + b1))
    x = ops.max_pool(ops.relu(ops.conv(x, k2) + b2))
    return ops.cross_entropy(ops.dense(ops.reshape(x, (x.shape[0], -1)), w) + b, labels)


_HEADS, _WIDTH, _LENGTH, _WORDS, _LAYERS = 4, 128, 64, 256, 2


def _transformer(ops: Ops, weights: Sequence[Any], ids: Any, labels: Any) -> Any:
    words, places, *layers, head = weights
    x = ops.take(words, ids) + places
    for first in range(0, len(layers), 4):
        qkv, out, up, down = layers[first : first + 4]
        x = x + _attention(ops, ops.standardized(x), qkv, out)
        x = x + ops.dense(ops.relu(ops.dense(ops.standardized(x), up)), down)
    return ops.cross_entropy(ops.dense(ops.standardized(x), head), labels)


def _attention(ops: Ops, x: Any, qkv: Any, out: Any) -> Any:
    batch, depth = x.shape[0], _WIDTH // _HEADS
    parts = ops.reshape(ops.dense(x, qkv), (batch, _LENGTH, 3, _HEADS, depth))
    query, key, value = (parts[:, :, index] for index in range(3))
    scores = ops.softmax(ops.einsum("bqhd,bkhd->bhqk", query, key) / np.float32(np.sqrt(depth)))
    mixed = ops.einsum("bhqk,bkhd->bqhd", scores, value)
    return ops.dense(ops.reshape(mixed, (batch, _LENGTH, _WIDTH)), out)


_SMALL, _GRADIENTS = 16, 200


def _small(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
    *branches, head = weights
    mixed = [ops.relu(ops.dense(x, branch)) for branch in branches]
    return ops.cross_entropy(ops.dense(sum(mixed[1:], mixed[0]) / np.float32(len(mixed)), head), labels)


MODELS = {
    model.name: model
    for model in (
        Model(
            "mlp",
            _mlp,
            shapes=((784, 512), (512,), (512, 512), (512,), (512, 10), (10,)),
            batch=64,
            example=(784,),
        ),
        Model(
            "conv",
            _conv,
            shapes=((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (7 * 7 * 64, 10), (10,)),
            batch=32,
            example=(28, 28, 1),
        ),
        Model(
            "transformer",
            _transformer,
            shapes=(
                (_WORDS, _WIDTH),
                (_LENGTH, _WIDTH),
                *(((_WIDTH, 3 * _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH), (4 * _WIDTH, _WIDTH)) * _LAYERS),
                (_WIDTH, _WORDS),
            ),
            batch=8,
            example=(_LENGTH,),
            labels=(_LENGTH,),
            classes=_WORDS,
            ids=_WORDS,
        ),
        # Many small gradients, so most of the cost is their all-reduces.
        Model(
            "small",
            _small,
            shapes=((_SMALL, _SMALL),) * _GRADIENTS + ((_SMALL, 10),),
            batch=8,
            example=(_SMALL,),
            rate=1.0,
        ),
    )
}
"""The models, by name."""
