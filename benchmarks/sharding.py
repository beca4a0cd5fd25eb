"""One replica of several devices: BERT with Adam by Keras' `fit`, divided in four ways, against Keras on JAX.

Both call the same methods of the same model, with `keras.distribution` on JAX's side, from the same initial weights, in
a new process for each figure. "fsdp" on JAX is a layout for each variable, the same that `distribution="fsdp"` chooses;
"zero1" has no peer there, and is compared with "data". "tensor" has half of the devices along the batch, and two along
the heads and hidden units. There are rows for a step, for the first step (tracing and compiling), and for the bytes of
weights and optimizer variables on a device.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import command
from benchmarks.fresh import in_fresh_process
from benchmarks.keras_models import BATCH, MODELS, initial
from benchmarks.keras_training import JAX, XLA, load
from benchmarks.measure import Row, interleaved, same, seconds

TITLES = {"data": "weights whole, batch in parts", "zero1": "ZeRO-1", "fsdp": "FSDP", "tensor": "tensor parallel"}
TARGETS = {"a step": 1.0, "the first step": 1.2, "bytes on a device": 1.05}
TOLERANCE = 1e-3

# The axis of each dimension, by the end of a variable's path.
TENSOR_PARALLEL = {
    "query/kernel": (None, "model", None),
    "key/kernel": (None, "model", None),
    "value/kernel": (None, "model", None),
    "attention_output/kernel": ("model", None, None),
}


class Divided(NamedTuple):
    """What one process measured."""

    first: float  # seconds of the first step
    step: float  # seconds of a later step
    bytes: int  # of weights and optimizer variables on the first device
    losses: list[float]  # the mean losses of the three calls of `fit`


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each way."""
    for way in flags.ways:
        ways = {XLA: way, JAX: "data" if way == "zero1" else way}

        def once(who: str, ways: dict[str, str] = ways) -> Divided:
            one = in_fresh_process(train, who, ways[who], flags.devices, flags.steps)
            print(f"{ways[who]}, {who}: {one}", file=sys.stderr, flush=True)
            return one

        found = interleaved({who: who for who in ways}, flags.repeats, once)
        check = same("losses", {who: each[0].losses[-1] for who, each in found.items()}, TOLERANCE)
        for what, figure, unit in (
            ("a step", lambda one: one.step * 1e3, "ms"),
            ("the first step", lambda one: one.first, "s"),
            ("bytes on a device", lambda one: one.bytes / 2**20, "MiB"),
        ):
            figures = {who: [figure(one) for one in each] for who, each in found.items()}
            name = f"{MODELS['bert'].title} with Adam, {TITLES[way]}, {what}"
            yield Row("sharding", name, figures, unit, flags.devices, {JAX: TARGETS[what]}, check)


def train(who: str, way: str, devices: int, steps: int) -> Divided:
    """Trains in one way; call it in a new process."""
    if who == JAX:
        load(JAX, devices)
    model, bytes_of_first = (_with_jax if who == JAX else _with_ours)(way, devices)
    x, y = MODELS["bert"].data(BATCH * (3 + steps))
    losses, took = [], []
    for begin, end in ((0, 1), (1, 3), (3, 3 + steps)):
        part = slice(begin * BATCH, end * BATCH)
        time, history = seconds(
            lambda part=part: model.fit(x[part], y[part], batch_size=BATCH, shuffle=False, verbose=0)
        )
        took.append(time)
        losses.append(float(history.history["loss"][-1]))
    return Divided(took[0], took[2] / steps, bytes_of_first(), losses)


def _with_ours(way: str, devices: int) -> Any:
    import replica_engine

    distribution = way if way in ("zero1", "fsdp") else _distribution(way, devices)
    strategy = replica_engine.TPUStrategy(num_cores=devices, distribution=distribution)
    with strategy.scope():
        model = _built()
    return model, lambda: int(strategy.memory().variables[0])


def _with_jax(way: str, devices: int) -> Any:
    import keras

    keras.distribution.set_distribution(_distribution(way, devices))
    model = _built()

    def bytes_of_first() -> int:
        variables = [*model.variables, *model.optimizer.variables]
        shards = [variable.value.addressable_shards for variable in variables]
        return sum(shard.data.nbytes for each in shards for shard in each if shard.device.id == 0)

    return model, bytes_of_first


def _distribution(way: str, devices: int) -> Any:
    from keras import distribution

    shape, axes = ((devices // 2, 2), ["batch", "model"]) if way == "tensor" else ((devices,), ["batch"])
    mesh = distribution.DeviceMesh(shape, axes, [f"cpu:{index}" for index in range(devices)])
    if way == "data":
        return distribution.DataParallel(device_mesh=mesh)
    layouts = distribution.LayoutMap(mesh)
    for path, layout in _layouts(way, devices).items():
        layouts[path] = layout
    return distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def _layouts(way: str, devices: int) -> dict[str, tuple]:
    """The axes of each variable that is divided, by its path."""
    from keras import utils

    model = MODELS["bert"].build()
    utils.clear_session()  # the next model gets the same names
    found: dict[str, tuple] = {}
    for variable in model.trainable_variables:
        shape = tuple(variable.shape)
        if way == "tensor":
            ends = [axes for end, axes in TENSOR_PARALLEL.items() if variable.path.endswith(end)]
            if ends:
                found[variable.path] = ends[0]
            continue
        longest = sorted(range(len(shape)), key=lambda axis, shape=shape: -shape[axis])
        best = next((axis for axis in longest if shape[axis] % devices == 0), None)
        if best is not None and 4 * math.prod(shape) >= 1024:  # as `distribution="fsdp"` does
            found[variable.path] = tuple("batch" if axis == best else None for axis in range(len(shape)))
    return found


def _built() -> Any:
    import keras

    model = initial(MODELS["bert"].build())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    return model


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("repeats", "3", "1", "processes of each contender"),
        command.Option("ways", ",".join(TITLES), "fsdp", "ways to divide", command.choose_some(*TITLES)),
        command.Option("devices", "4", "2", "number of devices"),
        command.Option("steps", "10", "1", "steps for each figure of a step"),
    )
