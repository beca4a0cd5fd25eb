"""Models whose weights and batches are divided over the devices of a replica."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine.keras import replicate_model
from tests.baseline.start import Numbers, Start, in_floats

LAYOUTS = ("fsdp", "fsdp on three", "zero1", "two of two", "two axes", "batch only")
USES = ("fit", "loop", "replicated")
MODELS: dict[str, tuple[tuple[int, ...], str, Callable[[], list[Any]]]] = {
    "dense": ((12,), "float64", lambda: [keras.layers.Dense(24, "tanh", name="up"), keras.layers.LayerNormalization()]),
    "table": (
        (4,),
        "int32",
        lambda: [keras.layers.Embedding(40, 8, name="table"), keras.layers.GlobalAveragePooling1D()],
    ),
    "convolution": (
        (8, 8, 2),
        "float64",
        lambda: [
            keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="up"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
        ],
    ),
    "attention": (
        (4, 6),
        "float64",
        lambda: [_Attention(), keras.layers.Flatten(), keras.layers.BatchNormalization(momentum=0.7)],
    ),
}
"""The shape of a sample, its dtype, and the layers before the last one."""


class _Attention(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.inner = keras.layers.MultiHeadAttention(2, 8)
        self.inner.build(shape, shape)

    def call(self, x: Any) -> Any:
        return self.inner(x, x) + x


class Divided(NamedTuple):
    """A training of a model in parts.

    Attributes:
        layout: how it is divided.
        model: one of `MODELS`.
        use: whether `fit` trains in a scope, a loop of the user's own, or a replicated model.
        optimizer: the name of Keras' optimizer.
        rest: whether the last batch is smaller, and does not divide.
    """

    layout: str
    model: str
    use: str
    optimizer: str
    rest: bool


def drawn(draw: random.Random, index: int) -> Divided:
    """A training; layouts take turns."""
    layout = LAYOUTS[index % len(LAYOUTS)]
    use = draw.choice(USES)
    # In a scope, replicas of one program take equal shares.
    rest = draw.random() < 0.5 and (layout != "two of two" or use == "replicated")
    return Divided(layout, draw.choice(sorted(MODELS)), use, draw.choice(("Adam", "RMSprop", "Adagrad")), rest)


def run(divided: Divided, start: Start) -> Numbers:
    """Trains three batches, and says losses, weights, the optimizer's variables, predictions and layouts."""
    with in_floats("float64"):
        return _run(divided, start, _strategy(divided.layout))


def _strategy(layout: str) -> replica_engine.TPUStrategy:
    """A strategy of its own for each program: it lists the variables of all its models."""
    devices = [f"cpu:{index}" for index in range(4)]
    if layout == "batch only":
        return replica_engine.TPUStrategy(distribution=keras.distribution.DataParallel(devices=devices))
    if layout == "two axes":
        layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices))
        layouts[".*last/kernel"] = ("model", None)
        distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        return replica_engine.TPUStrategy(distribution=distribution)
    cores = {"fsdp": 4, "fsdp on three": 3, "zero1": 2, "two of two": 4}[layout]
    return replica_engine.TPUStrategy(
        num_cores=cores,
        distribution="zero1" if layout == "zero1" else "fsdp",
        **({"cores_per_replica": 2} if layout == "two of two" else {}),
    )


def _run(divided: Divided, start: Start, strategy: Any) -> Numbers:
    shape, dtype, layers = MODELS[divided.model]
    sizes = (8, 8, 5) if divided.rest else (8, 8, 8)

    def make() -> keras.Model:
        made = keras.Sequential([keras.Input(shape, dtype=dtype), *layers(), keras.layers.Dense(3, name="last")])
        made.compile(getattr(keras.optimizers, divided.optimizer)(0.05), "mse", metrics=["mae"])
        return made

    if divided.use == "replicated":
        model = make()
        runner = replicate_model(model, strategy=strategy)
    else:
        with strategy.scope():
            runner = model = make()
    model.set_weights(
        [each if np.all(each == each.flat[0]) else 0.4 * start.normal(*each.shape) for each in model.get_weights()]
    )
    rows = sum(sizes)
    x = start.normal(rows, *shape) if dtype == "float64" else start.whole(40, rows, *shape).astype("int32")
    y = start.normal(rows, 3)
    numbers: Numbers = {}
    if divided.use == "loop":
        step = lambda x, y: model.train_step((x, y))["loss"]  # noqa: E731
        for number, end in enumerate(np.cumsum(sizes)):
            share = slice(end - sizes[number], end)
            batch = strategy.experimental_distribute_values_from_function(
                lambda context, share=share: _share(x[share], y[share], context)
            )
            losses = strategy.run(lambda batch: step(*batch), args=(batch,))
            numbers[f"loss {number}"] = np.asarray(strategy.reduce("MEAN", losses, axis=None))
    else:
        history = runner.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        numbers |= {f"history {name}": np.asarray(value) for name, value in history.items()}
    numbers |= {f"weight {index}": each.numpy() for index, each in enumerate(model.variables)}
    numbers |= {f"optimizer {index} {each.name}": each.numpy() for index, each in enumerate(model.optimizer.variables)}
    numbers["predictions"] = np.asarray(runner.predict(x[:8], batch_size=8, verbose=0))
    return numbers | {"layouts": np.array(str(strategy.layouts()))}


def _share(x: np.ndarray, y: np.ndarray, context: Any) -> tuple[tf.Tensor, tf.Tensor]:
    index, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
    return tf.constant(np.array_split(x, count)[index]), tf.constant(np.array_split(y, count)[index])
