"""The cost of an epoch of Keras `fit` on N replicas, beside one device and `tf.distribute`, in one process.

One device is plain Keras, which also uses all cores. `tf.distribute` is Keras under its MirroredStrategy with
`ReductionToOneDevice`, the fastest on CPUs, and batches that split evenly. All contenders get the same NumPy arrays and
initial weights, and their losses must agree after the first epoch. The rows of `replicate_model` use the strategy that
it chooses itself. The rows for threads and XLA are the two that it chooses from; its choice is based on them. "in a
scope" are models that were made in the `scope()` of the same strategies. "between epochs" is the time from the end of
the last step of an epoch to the beginning of the next step. "input of 5 ms" takes its batches from a dataset that takes
this long for each: it hides behind the steps if it is read ahead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import Input, Model, Sequential, layers

import replica_engine
from benchmarks import command
from benchmarks.contenders import COMPILED, THEIRS, THREADS, strategy_of
from benchmarks.keras_models import KerasModel
from benchmarks.measure import Row, interleaved, milliseconds, same, seconds
from replica_engine.keras import replicate_model

CHOSEN, ONE_DEVICE = "replicate_model", "one device"

STRATEGIES = {"threads": THREADS, "XLA": COMPILED}

OURS, PEERS = (CHOSEN, *STRATEGIES, *(f"{name}, in a scope" for name in STRATEGIES)), (THEIRS, ONE_DEVICE)

SLOW = 0.005  # seconds that a slow input takes for a batch

TARGET = {THEIRS: 0.77}  # of the chosen one: 1.3 times as fast

TOLERANCE = 1e-3


def _dense() -> Any:
    return Sequential([Input((784,)), layers.Dense(512, "relu"), layers.Dense(512, "relu"), layers.Dense(10)])


def _conv() -> Any:
    blocks = [(layers.Conv2D(size, 3, activation="relu"), layers.MaxPooling2D()) for size in (16, 32)]
    return Sequential([Input((28, 28, 1)), *blocks[0], *blocks[1], layers.Flatten(), layers.Dense(10)])


def _lstm() -> Any:
    return Sequential([Input((28, 28)), layers.LSTM(64), layers.Dense(10)])


def _transformer() -> Any:
    tokens = Input((64,), dtype="int32")
    x = layers.Embedding(1000, 64)(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, "gelu")(x)))
    return Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


MODELS = {
    "dense": KerasModel("dense", _dense, (784,), batch=128, batches=60),
    "conv": KerasModel("conv", _conv, (28, 28, 1), batch=64, batches=20),
    "lstm": KerasModel("lstm", _lstm, (28, 28), batch=64, batches=20),
    "transformer": KerasModel("transformer", _transformer, (64,), ids=1000, batch=32, batches=12),
}
"""The models, by name."""


def contenders(case: KerasModel, replicas: int) -> dict[str, Any]:
    """The models to fit, by contender."""

    def compiled() -> Any:
        keras.utils.set_random_seed(0)
        model = case.build()
        model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    strategies = {name: strategy_of(kind, replicas) for name, kind in STRATEGIES.items()}
    scopes = {f"{name}, in a scope": strategy for name, strategy in strategies.items()}
    made: dict[str, Any] = {}
    for name, strategy in {**scopes, THEIRS: strategy_of(THEIRS, replicas)}.items():
        with strategy.scope():
            made[name] = compiled()
    replicated = {name: replicate_model(compiled(), strategy=strategy) for name, strategy in strategies.items()}
    return {CHOSEN: replicate_model(compiled(), replicas=replicas), **replicated, **made, ONE_DEVICE: compiled()}


def rows(name: str, replicas: int, repeats: int) -> Iterator[Row]:
    """Yields the rows of each contender of this library."""
    case = MODELS[name]
    x, y = case.data(case.batch * case.batches)
    models = contenders(case, replicas)

    def epoch(model: Any) -> float:
        return model.fit(x, y, case.batch, verbose=0, shuffle=False).history["loss"][0]

    def late(value: np.ndarray) -> np.ndarray:
        time.sleep(SLOW)
        return value

    def slow(x: Any, y: Any) -> tuple[Any, Any]:
        return tf.ensure_shape(tf.numpy_function(late, [x], x.dtype), x.shape), y

    slow_data = tf.data.Dataset.from_tensor_slices((x, y)).batch(case.batch, drop_remainder=True).map(slow)

    def between_epochs(model: Any) -> float:
        """The median of the milliseconds between two epochs of two batches each."""
        clock, few = Clock(), slice(2 * case.batch)
        model.fit(x[few], y[few], case.batch, epochs=6, verbose=0, shuffle=False, callbacks=[clock])
        apart = [begun - ended for begun, ended in zip(clock.begun[1:], clock.ended[:-1], strict=True)]
        return 1e3 * statistics.median(apart)

    firsts = {who: seconds(functools.partial(epoch, model)) for who, model in models.items()}
    check = same("loss of the first epoch", {who: loss for who, (_, loss) in firsts.items()}, TOLERANCE)
    steps = interleaved(models, repeats, lambda model: milliseconds(lambda: epoch(model)) / case.batches)
    slow_steps = interleaved(
        models, repeats, lambda model: milliseconds(lambda: model.fit(slow_data, verbose=0)) / case.batches
    )
    between = interleaved(models, repeats, between_epochs)
    for who in OURS:
        note = f"first epoch {firsts[who][0]:.1f} s, of tf.distribute {firsts[THEIRS][0]:.1f} s"
        for what, figures, unit, more in (
            (f"{name}, input of 5 ms", slow_steps, "ms a step", {}),
            (f"{name}, between epochs", between, "ms", {}),
            (name, steps, "ms a step", {"targets": TARGET if who == CHOSEN else {}, "note": note}),
        ):
            shown = {each: figures[each] for each in (who, *PEERS)}
            yield Row("keras_fit", what, shown, unit, replicas, check=check, **more)


class Clock(keras.callbacks.Callback):
    """Writes down when the first of two batches begins, and when the second one ends."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Writes down the first."""
        if batch == 0:
            self.begun.append(time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes down the second."""
        if batch == 1:
            self.ended.append(time.perf_counter())


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each model and number of replicas."""
    replica_engine.logical_devices(max(flags.replicas))
    for name, replicas in itertools.product(flags.models, flags.replicas):
        yield from rows(name, replicas, flags.repeats)


if __name__ == "__main__":
    command.main(__doc__, measure, command.FEW_REPEATS, command.models(MODELS, "dense"), command.replicas("2,4"))
