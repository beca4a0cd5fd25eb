"""Compares operations of divided values with one device: `python -m soak.programs.parts '[size, layouts, names]'`.

Prints a line of JSON for each layout, as soon as it is done.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

# LLVM need not spend long on programs that run once; XLA's partitioner does the same with and without.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine import xla
from soak.part_operations import OPERATIONS, Values
from soak.parts import LAYOUTS, SIZES, Axes, Layout

TOLERANCE = 1e-4
"""The largest difference from one device, as a part of the largest number of a result, or of 1 if that is less."""

Found = dict[str, tuple[list[Any], list[Any]]]
"""For each operation its values, and the gradients of all floating numbers."""


def drawn(size: str) -> list[Any]:
    """The numbers of a size: those of `Values`, the indices as int64."""
    batch, length, channels, rows = SIZES[size]
    random = np.random.default_rng(0)
    shapes = (batch, length, channels), (batch, length, length, channels), (rows, channels), (channels, channels)
    numbers = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    return [*numbers, random.integers(0, rows, (batch, length))]


def computed(names: Sequence[str], given: Sequence[Any], lay_out: Callable[[Any, Axes], Any], layout: Layout) -> Found:
    """The operations of some numbers, as one device computes them or in a step."""
    first, second, third = layout.values
    sources, found = [tf.convert_to_tensor(each) for each in given[:4]], {}
    for name in names:
        operation, dtype = OPERATIONS[name]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            x, image, table, kernel = sources
            x, image = lay_out(x, layout.values), lay_out(image, (first, second, None, third))
            indices = lay_out(tf.cast(given[4], dtype), (first, second))
            values = tf.nest.flatten(operation(Values(x, image, table, kernel, indices)))
            values = [lay_out(each, _last(layout.results, len(each.shape))) for each in values]
            sums = [tf.reduce_sum(tf.sin(0.1 * each)) for each in values if each.dtype.is_floating]
        gradients = tape.gradient(sums, sources, unconnected_gradients="zero") if sums else []
        found[name] = values, [tf.convert_to_tensor(each) for each in gradients]
    return found


def on_one_device(names: Sequence[str], given: Sequence[Any]) -> Found:
    """The results of plain TensorFlow: eager, or compiled where a gradient has no kernel for CPUs."""
    found: Found = {}
    for name in names:
        plain = functools.partial(computed, [name], given, lambda value, axes: value, Layout((1, 1)))
        try:
            found |= plain()
        except tf.errors.InvalidArgumentError:
            found |= tf.function(plain, jit_compile=True, autograph=False)()
    return found


def _last(axes: Axes, rank: int) -> Axes:
    """The axes of a value whose last dimensions have some axes."""
    return (*[None] * rank, *axes)[len(axes) :]


def on_devices(names: Sequence[str], given: Sequence[Any], layout: Layout | None) -> list[Found]:
    """The results of each replica; of one device, by XLA, without a layout."""
    if layout is None:
        strategy = replica_engine.TPUStrategy(num_cores=1)
    else:
        count = layout.mesh[0] * layout.mesh[1]
        mesh = keras.distribution.DeviceMesh(layout.mesh, ["batch", "model"], [f"cpu:{each}" for each in range(count)])
        layouts = keras.distribution.LayoutMap(mesh)
        layouts["table"] = layouts["kernel"] = layout.weights
        distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        strategy = replica_engine.TPUStrategy(num_cores=layout.replicas * count, distribution=distribution)
    x, image, table, kernel, indices = given
    with strategy.scope():
        weights = [tf.Variable(table, name="table"), tf.Variable(kernel, name="kernel")]

    def lay_out(value: Any, axes: Axes) -> Any:
        return xla.constrain(value, axes) if any(axes) else value

    @tf.autograph.experimental.do_not_convert  # it would read the file of all operations for each of them
    def step(x: Any, image: Any, indices: Any) -> Found:
        return computed(names, [x, image, *weights, indices], lay_out, layout or Layout((1, 1)))

    results = strategy.run(step, tuple(map(tf.constant, (x, image, indices))))
    flat = [strategy.experimental_local_results(each) for each in tf.nest.flatten(results)]
    return [tf.nest.pack_sequence_as(results, each) for each in zip(*flat, strict=True)]


def agree(found: Any, expected: Any) -> bool:
    """Whether two results are the same, except for rounding."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return False
    if found.dtype.kind not in "fV":
        return bool(np.array_equal(found, expected))
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, finite.max(initial=0.0))
    return bool(np.allclose(found, expected, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True))


def different(replicas: Sequence[Found], expected: Found) -> dict[str, list[str]]:
    """For each operation that differs: "value", "gradient" or both."""
    kinds = ("value", "gradient")
    found = {
        name: [
            kind
            for kind, here, *there in zip(kinds, expected[name], *[each[name] for each in replicas], strict=True)
            if not all(agree(one, other) for each in there for one, other in zip(each, here, strict=True))
        ]
        for name in replicas[0]
    }
    return {name: each for name, each in found.items() if each}


def compared(layout: Layout, names: Sequence[str], given: Sequence[Any], expected: Found) -> list[str]:
    """What is wrong in a layout. What XLA computes so on one device too is right; a program that fails is halved."""
    try:
        found = on_devices(names, given, layout)
        suspects = different(found, {name: expected[name] for name in names})
        if suspects:
            (alone,) = on_devices(list(suspects), given, None)
            still = different([{each: replica[each] for each in suspects} for replica in found], alone)
            suspects = {each: kinds for each, kinds in suspects.items() if each in still}
    except Exception as error:
        if len(names) == 1:
            return [f"{names[0]}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
        middle = len(names) // 2
        halves = names[:middle], names[middle:]
        return [each for half in halves for each in compared(layout, half, given, expected)]
    return [f"{each}: {kind}" for each, kinds in suspects.items() for kind in kinds]


def main() -> None:
    """Compares, and prints what is wrong."""
    gc.set_threshold(50_000, 20, 20)  # tracing makes many objects that stay
    size, layouts, names = json.loads(sys.argv[1])
    given = drawn(size)
    expected = on_one_device(names, given)
    count = sum(1 + any(np.any(each) for each in gradients) for _, gradients in expected.values())
    for name in layouts:
        wrong = compared(LAYOUTS[name], names, given, expected)
        print(json.dumps({"layout": name, "count": count, "wrong": wrong}), flush=True)
    print("done")


if __name__ == "__main__":
    main()
