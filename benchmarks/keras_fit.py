"""The cost of an epoch of Keras `fit` on N replicas, beside one device and `tf.distribute`, in one process.

    python -m benchmarks.keras_fit [--models dense,conv,lstm,transformer] [--replicas 2,4] [--repeats 3] [--quick]
        [--json out.json]

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
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.measure import Row, interleaved, milliseconds, same, seconds

CHOSEN = "replicate_model"

OURS, PEERS = (CHOSEN, "threads", "XLA", "threads, in a scope", "XLA, in a scope"), ("tf.distribute", "one device")

SLOW = 0.005
"""Seconds that a slow input takes for a batch."""

TARGET = {"tf.distribute": 0.77}
"""Of the chosen one: 1.3 times as fast."""

TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model of this benchmark.

    Attributes:
        build: makes the model, with weights from a fixed seed.
        batch: the number of samples in a global batch.
        batches: the number of batches in an epoch.
        sample: the shape of an input.
        classes: the number of classes.
        tokens: the number of different tokens in the inputs; None for inputs of floats.
    """

    build: Callable[[], Any]
    batch: int
    batches: int
    sample: tuple[int, ...]
    classes: int = 10
    tokens: int | None = None

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels for an epoch."""
        random = np.random.default_rng(0)
        shape = (self.batch * self.batches, *self.sample)
        x = (
            random.normal(size=shape).astype("float32")
            if self.tokens is None
            else random.integers(1, self.tokens, shape)
        )
        return x, random.integers(0, self.classes, shape[0])

    def slow_data(self) -> Any:
        """The same as a dataset of batches, each of which takes `SLOW` seconds."""
        import tensorflow as tf

        def slow(x: Any, y: Any) -> tuple[Any, Any]:
            return tf.ensure_shape(tf.numpy_function(_late, [x], x.dtype), x.shape), y

        return tf.data.Dataset.from_tensor_slices(self.data()).batch(self.batch, drop_remainder=True).map(slow)


def _late(value: np.ndarray) -> np.ndarray:
    time.sleep(SLOW)
    return value


def _dense() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((784,)), layers.Dense(512, "relu"), layers.Dense(512, "relu"), layers.Dense(10)])


def _conv() -> Any:
    from keras import Input, Sequential, layers

    blocks = [
        layer for size in (16, 32) for layer in (layers.Conv2D(size, 3, activation="relu"), layers.MaxPooling2D())
    ]
    return Sequential([Input((28, 28, 1)), *blocks, layers.Flatten(), layers.Dense(10)])


def _lstm() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((28, 28)), layers.LSTM(64), layers.Dense(10)])


def _transformer() -> Any:
    from keras import Input, Model, layers

    tokens = Input((64,), dtype="int32")
    x = layers.Embedding(1000, 64)(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, "gelu")(x)))
    return Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


MODELS = {
    "dense": Trained(_dense, 128, 60, (784,)),
    "conv": Trained(_conv, 64, 20, (28, 28, 1)),
    "lstm": Trained(_lstm, 64, 20, (28, 28)),
    "transformer": Trained(_transformer, 32, 12, (64,), tokens=1000),
}
"""The models, by name."""


def contenders(trained: Trained, replicas: int) -> dict[str, Any]:
    """The models to fit, by contender."""
    import tensorflow as tf

    import replica_engine

    devices = [f"CPU:{index}" for index in range(replicas)]
    theirs = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    threads, compiled = replica_engine.MirroredStrategy(devices), replica_engine.TPUStrategy(num_cores=replicas)
    scopes = {"threads, in a scope": threads, "XLA, in a scope": compiled, "tf.distribute": theirs}
    made_in: dict[str, Any] = {}
    for name, strategy in scopes.items():
        with strategy.scope():
            made_in[name] = _compiled(trained)
    replicate = replica_engine.keras.replicate_model
    return {
        CHOSEN: replicate(_compiled(trained), replicas=replicas),
        "threads": replicate(_compiled(trained), strategy=threads),
        "XLA": replicate(_compiled(trained), strategy=compiled),
        **made_in,
        "one device": _compiled(trained),
    }


def _compiled(trained: Trained) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = trained.build()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def rows(name: str, replicas: int, repeats: int) -> Iterator[Row]:
    """Yields a row for each contender of this library."""
    trained = MODELS[name]
    x, y = trained.data()
    models = contenders(trained, replicas)

    def epoch(who: str) -> float:
        return models[who].fit(x, y, trained.batch, verbose=0, shuffle=False).history["loss"][0]

    def step(who: str) -> float:
        return milliseconds(lambda: epoch(who)) / trained.batches

    slow_data = trained.slow_data()

    def slow_step(who: str) -> float:
        return milliseconds(lambda: models[who].fit(slow_data, verbose=0)) / trained.batches

    firsts = {who: seconds(functools.partial(epoch, who)) for who in models}
    check = same("loss of the first epoch", {who: loss for who, (_, loss) in firsts.items()}, TOLERANCE)
    figures = interleaved({who: functools.partial(step, who) for who in models}, repeats)
    slow = interleaved({who: functools.partial(slow_step, who) for who in models}, repeats)
    between = interleaved(
        {who: functools.partial(_between_epochs, model, trained, x, y) for who, model in models.items()}, repeats
    )
    for who in OURS:
        yield Row(
            "keras_fit",
            f"{name}, input of 5 ms",
            {each: slow[each] for each in (who, *PEERS)},
            unit="ms a step",
            replicas=replicas,
            check=check,
        )
        yield Row(
            "keras_fit",
            f"{name}, between epochs",
            {each: between[each] for each in (who, *PEERS)},
            replicas=replicas,
            check=check,
        )
        yield Row(
            "keras_fit",
            name,
            {each: figures[each] for each in (who, *PEERS)},
            unit="ms a step",
            replicas=replicas,
            targets=TARGET if who == CHOSEN else {},
            check=check,
            note=f"first epoch {firsts[who][0]:.1f} s, of tf.distribute {firsts['tf.distribute'][0]:.1f} s",
        )


def _between_epochs(model: Any, trained: Trained, x: np.ndarray, y: np.ndarray) -> float:
    """The median of the milliseconds between two epochs of two batches each."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.begun: list[float] = []
            self.ended: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self.begun.append(time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.ended.append(time.perf_counter())

    clock = Clock()
    few = slice(2 * trained.batch)
    model.fit(x[few], y[few], trained.batch, epochs=6, verbose=0, shuffle=False, callbacks=[clock])
    return 1e3 * statistics.median(
        begun - ended for begun, ended in zip(clock.begun[1:], clock.ended[:-1], strict=True)
    )


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each model and number of replicas."""
    import replica_engine

    replica_engine.logical_devices(max(flags.replicas))
    for name in flags.models:
        for replicas in flags.replicas:
            yield from rows(name, replicas, flags.repeats)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.FEW_REPEATS,
        command.Option("models", ",".join(MODELS), "dense", "models to train", command.choose_some(*MODELS)),
        command.Option("replicas", "2,4", "2", "numbers of replicas", command.numbers),
    )
