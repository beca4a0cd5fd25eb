"""What is trained: models, batches and callbacks. One device trains each of them too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SCOPE_THREADS, SCOPE_COMPILED = "scope on threads", "scope compiled"
REPLICATED_THREADS, REPLICATED_COMPILED = "replicated on threads", "replicated compiled"
SCOPES = SCOPE_THREADS, SCOPE_COMPILED
REPLICATED = REPLICATED_THREADS, REPLICATED_COMPILED

FEATURES, WORDS, LENGTH = 4, 12, 6
BATCH = 8
"""The samples of a batch that replicas divide evenly, and by which a step that knows it divides."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A training on several replicas, and on one device.

    Attributes:
        name: what it is about.
        make: makes the compiled model.
        sizes: the samples of each batch.
        replicas: the number of replicas.
        ways: how it runs on replicas.
        feed: "dataset", whose length nobody knows; "arrays", of which Keras makes batches of `BATCH`; or "calls" of
            `train_on_batch`.
        words: whether inputs are sequences of words, of which word 0 is masked.
        weighted: whether samples have weights.
        tested: the samples of the batch of `evaluate`.
        epochs: the number of epochs.
        callback: makes a callback of `fit`.
        devices: the devices of each replica, over which weights are divided.
    """

    name: str
    make: Callable[[], keras.Model]
    sizes: tuple[int, ...] = (BATCH, BATCH, BATCH)
    replicas: int = 2
    ways: tuple[str, ...] = (*SCOPES, *REPLICATED)
    feed: str = "dataset"
    words: bool = False
    weighted: bool = False
    tested: int = 7
    epochs: int = 1
    callback: Callable[[], keras.callbacks.Callback] | None = None
    devices: int = 1

    def samples(self, rows: int, seed: int) -> tuple[np.ndarray, ...]:
        """Inputs, labels, and the weights of samples if they have some."""
        draw = np.random.default_rng(seed)
        if self.words:
            x = draw.integers(1, WORDS, (rows, LENGTH)).astype("int32")
            x[np.arange(LENGTH) >= draw.integers(1, LENGTH + 1, (rows, 1))] = 0
            y = draw.normal(size=(rows, LENGTH, 1)).astype("float32")
        else:
            x = draw.normal(size=(rows, FEATURES)).astype("float32")
            y = (np.sin(x[:, :2]) + 0.1 * draw.normal(size=(rows, 2))).astype("float32")
        weights = draw.uniform(0, 2, rows).astype("float32")
        return (x, y, weights) if self.weighted else (x, y)

    def dataset(self, sizes: tuple[int, ...], seed: int) -> tf.data.Dataset:
        """Batches of these sizes."""
        ends = np.cumsum(sizes)
        whole = self.samples(int(ends[-1]), seed)
        made = [tuple(each[end - size : end] for each in whole) for size, end in zip(sizes, ends.tolist(), strict=True)]
        signature = tuple(tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in whole)
        return tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)


class OwnStep(keras.Model):
    """A step of the user's own, whose loss is the mean over the samples that it is given."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.error = keras.metrics.Mean(name="error")

    def train_step(self, data: Any) -> Any:
        """One step."""
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((self(x, training=True) - y) ** 2, axis=1)
            loss = self.of_errors(errors)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.error.update_state(errors)
        return {"error": self.error.result(), "loss": loss}

    def of_errors(self, errors: tf.Tensor) -> tf.Tensor:
        """The loss."""
        return tf.reduce_mean(errors)

    def test_step(self, data: Any) -> Any:
        """The error of a batch."""
        x, y = data
        self.error.update_state(tf.reduce_sum((self(x) - y) ** 2, axis=1))
        return {"error": self.error.result()}


class OwnStepOfAll(OwnStep):
    """As tf.distribute has it: each replica divides by the samples of all, and what it gets is added up."""

    def of_errors(self, errors: tf.Tensor) -> tf.Tensor:
        """The replica's part of the loss."""
        return tf.nn.compute_average_loss(errors, global_batch_size=BATCH)


class Largest(keras.metrics.Metric):
    """A metric of the user's own that is no sum."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Keeps the largest error."""
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y - outputs))))

    def result(self) -> Any:
        """The largest error."""
        return self.value


class Counted(Largest):
    """A metric of the user's own that is a sum."""

    def __init__(self) -> None:
        super().__init__("counted")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Counts large errors."""
        self.value.assign_add(tf.reduce_sum(tf.cast(tf.abs(y - outputs) > 0.5, "float32")))


class SetsWeights(keras.callbacks.Callback):
    """Sets the weights and the rate after the first batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Makes both smaller."""
        if batch == 0:
            self.model.set_weights([0.9 * weight for weight in self.model.get_weights()])
            self.model.optimizer.learning_rate = 0.02


class Compiles(keras.callbacks.Callback):
    """Compiles the model with another optimizer, loss and metric before the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compiles; plain Keras would go on with its functions."""
        if epoch == 1:
            eager = self.model.run_eagerly
            self.model.compile(keras.optimizers.SGD(0.1), "mae", metrics=["mse"], run_eagerly=eager)
            self.model.make_train_function(force=True)


def _compiled(
    model: keras.Model, optimizer: Any = None, loss: Any = "mse", metrics: tuple[Any, ...] = ("mae",), **options: Any
) -> keras.Model:
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9) if optimizer is None else optimizer()
    model.compile(optimizer, _made(loss), metrics=[*map(_made, metrics)] or None, **options)
    return model


def _made(given: Any) -> Any:
    return given() if callable(given) else given


def _dense(kind: type[keras.Model] = keras.Model, width: int = 3, **options: Any) -> keras.Model:
    inputs = keras.Input((FEATURES,), name="x")
    hidden = keras.layers.Dense(width, activation="tanh", name="hidden")(inputs)
    return _compiled(kind(inputs, keras.layers.Dense(2, name="last")(hidden), name="net"), **options)


def _net(*args: Any, **options: Any) -> Callable[[], keras.Model]:
    return functools.partial(_dense, *args, **options)


def _embedding() -> keras.Model:
    layers = [
        keras.Input((LENGTH,), dtype="int32", name="x"),
        keras.layers.Embedding(WORDS, 3, mask_zero=True, name="table"),
        keras.layers.Dense(1, name="last"),
    ]
    return _compiled(keras.Sequential(layers, name="net"))


def _sgd(rate: float, **options: Any) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.SGD(rate, **options)


def _scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0)


def _accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1)


def _loss(reduction: str) -> Callable[[], keras.losses.Loss]:
    return lambda: keras.losses.MeanSquaredError(reduction=reduction)


CASES = (
    Case("equal", _net(), tested=BATCH),
    Case("rest", _net(), (8, 8, 5), 4, feed="arrays"),
    Case("uneven", _net(), (13, 13), 4),
    Case("tiny", _net(), (8, 3, 8), 4, tested=3),
    Case("empty", _net(), (8, 0, 8)),
    Case("masked", _embedding, (8, 8, 5), words=True),
    Case("weighted", _net(loss=_loss("mean_with_sample_weight")), (8, 8, 5), weighted=True),
    Case("sum", _net(loss=_loss("sum"), optimizer=_sgd(0.005)), (8, 8, 5)),
    Case("own step of a mean", _net(OwnStep, metrics=()), (8, 8, 5)),
    Case("own step of all", _net(OwnStepOfAll, metrics=()), ways=SCOPES),
    Case("own metrics", _net(metrics=(Largest, Counted))),
    Case("clipped", _net(optimizer=_sgd(0.1, clipnorm=0.1)), ways=SCOPES),
    Case("accumulated", _net(optimizer=_accumulating), (8, 8, 8, 5)),
    Case("loss scale", _net(optimizer=_scaled), (8, 8, 5), ways=(SCOPE_THREADS, REPLICATED_COMPILED)),
    Case("sets weights", _net(), ways=(SCOPE_COMPILED, REPLICATED_THREADS), callback=SetsWeights),
    Case("compiles", _net(), ways=(SCOPE_THREADS, REPLICATED_COMPILED), epochs=2, callback=Compiles),
    Case("fsdp", _net(width=64), (8, 8, 5), 1, ways=(SCOPE_COMPILED,), devices=4),
    Case("fsdp of two", _net(width=64), (8, 8, 5), ways=(REPLICATED_COMPILED,), devices=2),
    Case("several steps", _net(steps_per_execution=2), (8, 8, 8, 8), ways=SCOPES),
    Case("calls", _net(), (8, 5), ways=SCOPES, feed="calls"),
)
"""All trainings: with the ways of each, 60 programs."""
