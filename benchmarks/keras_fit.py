"""What an epoch of Keras `fit` costs on N replicas, beside one device and `tf.distribute`, in one process.

    python -m benchmarks.keras_fit [--models dense,conv,lstm,transformer] [--replicas 2,4] [--repeats 7]
        [--seconds 20] [--json out.json]

One device is plain Keras, which uses all cores too. `tf.distribute` is Keras under its MirroredStrategy, which gets
`ReductionToOneDevice`, its best on CPUs, and batches that split evenly. All get the same NumPy arrays and initial
weights, and after the first epoch their losses must agree, or there is nothing to compare. Repeats are interleaved
(A, B, C, A, B, C, ...), so that a change in the machine's speed meets all; ratios are medians over repeats.

`replica_engine.keras.choice` rests on this table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model of this benchmark.

    Attributes:
        build: makes it, with weights of a fixed seed.
        batch: samples in a global batch.
        batches: batches in an epoch.
        sample: the shape of an input.
        classes: how many classes there are.
        tokens: of how many the inputs are; None for floats.
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
    """The models to fit, by who runs them."""
    import tensorflow as tf

    import replica_engine

    devices = [f"CPU:{index}" for index in range(replicas)]
    theirs = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    with theirs.scope():
        distributed = _compiled(trained)
    replicate = replica_engine.keras.replicate_model
    return {
        "one device": _compiled(trained),
        "tf.distribute": distributed,
        "threads": replicate(_compiled(trained), strategy=replica_engine.MirroredStrategy(devices)),
        "XLA": replicate(_compiled(trained), strategy=replica_engine.TPUStrategy(num_cores=replicas)),
    }


def _compiled(trained: Trained) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = trained.build()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def measure(name: str, replicas: int, repeats: int, seconds: float) -> dict[str, Any]:
    """One row: milliseconds of a training step, and those of the first epoch, which compiles."""
    trained = MODELS[name]
    x, y = trained.data()
    models = contenders(trained, replicas)
    times: dict[str, list[float]] = {who: [] for who in models}
    first: dict[str, float] = {}
    losses: dict[str, float] = {}
    for who, model in models.items():
        started = time.perf_counter()
        losses[who] = model.fit(x, y, trained.batch, verbose=0, shuffle=False).history["loss"][0]
        first[who] = time.perf_counter() - started
    if max(losses.values()) - min(losses.values()) > TOLERANCE:
        raise SystemExit(f"{name}: the losses differ: {losses}")
    ends = time.perf_counter() + seconds
    for repeat in range(repeats):
        if repeat > 1 and time.perf_counter() > ends:
            break
        for who, model in models.items():
            started = time.perf_counter()
            model.fit(x, y, trained.batch, verbose=0, shuffle=False)
            times[who].append(1000 * (time.perf_counter() - started) / trained.batches)
    step = {who: statistics.median(each) for who, each in times.items()}
    spread = {who: (min(each), max(each)) for who, each in times.items()}
    return {"model": name, "replicas": replicas, "ms a step": step, "spread": spread, "first epoch, s": first}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = [int(count) for count in options.replicas.split(",")]

    import replica_engine

    replica_engine.testing.logical_devices(max(counts))
    import keras
    import tensorflow as tf

    print(f"Keras {keras.__version__}, TensorFlow {tf.__version__}, Python {platform.python_version()}")
    print("ms a step (median), and the ratio to tf.distribute; in brackets seconds of the first epoch\n")
    rows = []
    for name in options.models.split(","):
        for count in counts:
            row = measure(name, count, options.repeats, options.seconds)
            rows.append(row)
            step, first = row["ms a step"], row["first epoch, s"]
            cells = [f"{who} {ms:.1f} {ms / step['tf.distribute']:.2f} [{first[who]:.1f}]" for who, ms in step.items()]
            print(f"{name:12} N={count}  " + "   ".join(cells), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
