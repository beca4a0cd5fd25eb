"""The models of the training benchmarks, each written once for TensorFlow, JAX and PyTorch.

A model is a function from weights and a batch to a loss. It calls `Ops`, which each framework implements, so contenders
differ in the framework and never in the mathematics. Weights and batches are NumPy arrays from a fixed seed, so all
contenders start from the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

BATCHES = 4  # the number of different batches for each model, used in turn


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations that a model needs from a framework, besides Python's operators."""

    relu: Callable[..., Any]  # max(x, 0)
    softmax: Callable[..., Any]  # over the last dimension
    standardized: Callable[..., Any]  # x with mean 0 and variance 1 over the last dimension
    reshape: Callable[..., Any]  # x in another shape
    einsum: Callable[..., Any]  # Einstein summation
    dense: Callable[..., Any]  # the product of the last dimension of x and a matrix
    conv: Callable[..., Any]  # a 2D convolution with stride 1 and "SAME" padding
    max_pool: Callable[..., Any]  # max pooling over 2 x 2 pixels
    take: Callable[..., Any]  # rows of a table, by their ids
    cross_entropy: Callable[..., Any]  # the mean cross entropy of logits over all labels


def tensorflow_ops() -> Ops:
    """The operations in TensorFlow."""
    import tensorflow as tf

    def standardized(x: Any) -> Any:
        centered = x - tf.reduce_mean(x, -1, keepdims=True)
        return centered * tf.math.rsqrt(tf.reduce_mean(centered * centered, -1, keepdims=True) + 1e-5)

    def cross_entropy(logits: Any, labels: Any) -> Any:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    return Ops(
        tf.nn.relu,
        tf.nn.softmax,
        standardized,
        tf.reshape,
        tf.einsum,
        dense=lambda x, weight: tf.tensordot(x, weight, 1),  # `@` would make the gradient of one product an example
        conv=lambda x, kernel: tf.nn.conv2d(x, kernel, strides=1, padding="SAME"),
        max_pool=lambda x: tf.nn.max_pool2d(x, 2, strides=2, padding="VALID"),
        take=tf.gather,
        cross_entropy=cross_entropy,
    )


def jax_ops() -> Ops:
    """The operations in JAX."""
    import jax
    import jax.numpy as jnp

    def standardized(x: Any) -> Any:
        centered = x - jnp.mean(x, -1, keepdims=True)
        return centered * jax.lax.rsqrt(jnp.mean(centered * centered, -1, keepdims=True) + 1e-5)

    def conv(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def max_pool(x: Any) -> Any:
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, window, "VALID")

    def cross_entropy(logits: Any, labels: Any) -> Any:
        # The sum over one-hot rows has a gradient that needs no scatter.
        chosen = jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.sum(chosen, -1))

    return Ops(
        jax.nn.relu,
        jax.nn.softmax,
        standardized,
        jnp.reshape,
        jnp.einsum,
        jnp.matmul,
        conv,
        max_pool,
        take=lambda table, ids: jnp.take(table, ids, axis=0),
        cross_entropy=cross_entropy,
    )


def torch_ops() -> Ops:
    """The operations in PyTorch, which has channels before pixels; labels are int64."""
    import torch
    from torch.nn import functional

    def conv(x: Any, kernel: Any) -> Any:
        images, kernels = x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)
        return functional.conv2d(images, kernels, padding="same").permute(0, 2, 3, 1)

    return Ops(
        torch.relu,
        lambda x: torch.softmax(x, -1),
        lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-5),
        torch.reshape,
        torch.einsum,
        torch.matmul,
        conv,
        max_pool=lambda x: functional.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1),
        take=lambda table, ids: table[ids],
        cross_entropy=lambda logits, labels: functional.cross_entropy(logits.flatten(0, -2), labels.flatten()),
    )


def initial(shapes: Iterable[Sequence[int]]) -> list[np.ndarray]:
    """Initial weights: random, scaled so that activations are about 1; those of one dimension are 0."""
    random = np.random.default_rng(0)
    return [
        (random.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)
        if len(shape) > 1
        else np.zeros(shape, np.float32)
        for shape in shapes
    ]


def drawn(random: np.random.Generator, shape: Sequence[int], ids: int = 0) -> np.ndarray:
    """An array of so many different ids, or of real numbers if there are none."""
    return random.integers(ids, size=shape, dtype=np.int32) if ids else random.standard_normal(shape, dtype=np.float32)


Loss = Callable[[Ops, Sequence[Any], Any, Any], Any]
"""Computes the loss from weights and a batch (x, labels)."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its weights and its data."""

    name: str  # the name in the table
    loss: Loss  # the mean loss of a batch
    shapes: tuple[tuple[int, ...], ...]  # the shapes of the weights
    batch: int  # the number of examples for each replica
    example: tuple[int, ...]  # the shape of one example
    labels: tuple[int, ...] = ()  # the shape of the labels of one example
    classes: int = 10  # the number of classes
    ids: int = 0  # the number of different ids in the examples; 0 for examples of real numbers
    rate: float = 0.05  # the learning rate

    def weights(self) -> list[np.ndarray]:
        """The initial weights."""
        return initial(self.shapes)

    def data(self, replicas: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Batches (x, labels), with a leading dimension for the replicas."""
        random = np.random.default_rng(1)
        lead = (replicas, self.batch)
        return [
            (drawn(random, lead + self.example, self.ids), drawn(random, lead + self.labels, self.classes))
            for _ in range(BATCHES)
        ]


class Contender(NamedTuple):
    """One way to train, with the initial weights."""

    name: str  # the name in the table
    # runs one training step on the batch with the given index, waits for its end, and returns the losses
    step: Callable[[int], Any]
    mean: Callable[[Any], float]  # the mean of the losses that `step` returned


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
        Model("mlp", _mlp, ((784, 512), (512,), (512, 512), (512,), (512, 10), (10,)), batch=64, example=(784,)),
        Model(
            "conv",
            _conv,
            ((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (7 * 7 * 64, 10), (10,)),
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
        Model("small", _small, ((_SMALL, _SMALL),) * _GRADIENTS + ((_SMALL, 10),), 8, (_SMALL,), rate=1.0),
    )
}
"""The models, by name."""
