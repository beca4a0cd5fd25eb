"""What the first training step costs, for 1 replica and for 8: tracing, lowering, compiling and running it.

    python -m benchmarks.first_step [--layers 30] [--replicas 1,8] [--repeats 3] [--json out.json]

A deep residual network. TPUStrategy traces its step once, whatever the number of replicas, so its first step
should take about as long for 8 as for 1; tf.distribute, beside it, traces and optimizes the step for each
replica. The stages are those of `replica_engine.xla`; each repeat does all of it anew, with the sizes in turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.contenders import Contender, start, tf_distribute, tpu_strategy
from benchmarks.models import Model, Ops, TensorFlowOps

WIDTH = 128


def deep(layers: int) -> Model:
    """A residual network of dense layers."""

    def loss(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
        *body, head = weights
        for weight in body:
            x = x + ops.relu(ops.dense(ops.standardized(x), weight))
        return ops.cross_entropy(ops.dense(ops.standardized(x), head), labels)

    shapes = ((WIDTH, WIDTH),) * layers + ((WIDTH, 10),)
    return Model("deep", loss, shapes=shapes, batch=8, example=(WIDTH,))


def seconds(do: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, and its result."""
    begin = time.perf_counter()
    result = do()
    return time.perf_counter() - begin, result


def stages(model: Model, replicas: int) -> dict[str, float]:
    """Seconds for each stage of the way of a training step."""
    import tensorflow as tf

    from replica_engine import xla

    weights = [tf.Variable(value) for value in model.weights()]

    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(TensorFlowOps(), weights, x, labels)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(model.rate / replicas * xla.cross_replica_sum(gradient))
        return loss

    x, labels = model.data(replicas)[0]
    both, lowered = seconds(lambda: xla.lower(step, list(zip(x, labels, strict=True))))
    again, _ = seconds(lowered.traced.lower)
    compiling, _ = seconds(lowered.compile)
    return {"trace": both - again, "lower": again, "compile": compiling}


def first_step(contender: Contender) -> tuple[float, list[int]]:
    """Seconds for a contender's first step, and how often the library traced, lowered and compiled for it."""
    from replica_engine import xla

    before = xla.counts()
    taken, _ = seconds(lambda: contender.step(0))
    counts = xla.counts() - before
    return taken, [counts.traces, counts.lowerings, counts.compiles]


def measure(layers: int, sizes: Sequence[int], repeats: int) -> dict[int, dict[str, Any]]:
    """The medians of each size; tf.distribute's is a single figure, since it takes long.

    Raises:
        SystemExit: sizes were traced, lowered or compiled differently often.
    """
    model, warm = deep(layers), deep(1)
    for size in sizes:  # makes the devices, and loads what is loaded once
        stages(warm, size)
        for make in (tpu_strategy, tf_distribute):
            first_step(make(warm, size))
    taken: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    counted: dict[int, list[int]] = {}
    for _ in range(repeats):
        for size in sizes:
            total, counted[size] = first_step(tpu_strategy(model, size))
            taken[size].append({**stages(model, size), "TPUStrategy": total})
            if counted[size] != counted[sizes[0]]:
                raise SystemExit(f"Other traces, lowerings and compilations than for {sizes[0]}: {counted}")
    return {
        size: {
            **{stage: statistics.median(each[stage] for each in rows) for stage in rows[0]},
            "tf.distribute": first_step(tf_distribute(model, size))[0],
            "counts": counted[size],
        }
        for size, rows in taken.items()
    }


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="layers of the network (default %(default)s)")
    parser.add_argument("--replicas", default="1,8", help="how many (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (default %(default)s)")
    parser.add_argument("--json", help="write the figures to this file as well")
    flags = parser.parse_args()
    sizes = [int(size) for size in flags.replicas.split(",")]
    start(max(sizes))
    table = measure(flags.layers, sizes, flags.repeats)

    columns = ("trace", "lower", "compile", "TPUStrategy", "tf.distribute")
    print(f"{platform.machine()}, Python {platform.python_version()}, {flags.layers} layers; seconds")
    print("| N | trace | lower | compile | first step | of tf.distribute | traces, lowerings, compilations |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size, row in table.items():
        figures = " | ".join(f"{row[column]:.2f}" for column in columns)
        print(f"| {size} | {figures} | {', '.join(map(str, row['counts']))} |")
    for size in sizes[1:]:
        ratios = " | ".join(f"{table[size][column] / table[sizes[0]][column]:.2f}" for column in columns)
        print(f"| {size} to {sizes[0]} | {ratios} | |")
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump({"layers": flags.layers, "seconds": table}, file, indent=1)


if __name__ == "__main__":
    main()
