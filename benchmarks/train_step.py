"""What one training step costs, beside tf.distribute and JAX in the same process.

    python -m benchmarks.train_step [--models mlp,conv,transformer] [--replicas 2,4] [--steps 10] [--repeats 7]
        [--json out.json]

`models` has what is trained and `contenders` by whom. All start from the same weights and see the same
batches; after the first steps their losses must agree, or there is nothing to compare. Repeats are
interleaved (A, B, C, A, B, C, ...), so that a change in the machine's speed meets all; ratios are medians
over repeats.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-4
"""How far losses may be apart, relative to their size: frameworks add up in different orders."""


def milliseconds(step: Any, steps: int) -> float:
    """Milliseconds a step."""
    begin = time.perf_counter()
    for index in range(steps):
        step(index)
    return (time.perf_counter() - begin) / steps * 1e3


def check_same(losses: dict[str, float]) -> None:
    """All have trained alike, or there is nothing to compare.

    Raises:
        SystemExit: they have not.
    """
    middle = statistics.median(losses.values())
    apart = {name: abs(loss - middle) / abs(middle) for name, loss in losses.items()}
    if not all(distance <= TOLERANCE for distance in apart.values()):  # a NaN is at no distance
        raise SystemExit(f"After the same steps the losses are apart by more than {TOLERANCE:g}: {losses}")


def measure(contenders: Sequence[Any], steps: int, repeats: int) -> list[dict[str, Any]]:
    """Trains with each, and times them in turn.

    Returns:
        For each its loss after the first steps, and milliseconds a step of each repeat.

    Raises:
        SystemExit: their losses differ.
    """
    rows = []
    for contender in contenders:
        losses = None
        for index in range(steps):
            losses = contender.step(index)
        rows.append({"contender": contender.name, "loss": contender.mean(losses), "ms": []})
    check_same({row["contender"]: row["loss"] for row in rows})
    gc.collect()
    for _ in range(repeats):
        for contender, row in zip(contenders, rows, strict=True):
            row["ms"].append(milliseconds(contender.step, steps))
    return rows


def ratio(taken: Sequence[float], peer: Sequence[float]) -> float:
    """The median over repeats of the ratio in a repeat, in which the machine was equally busy for both."""
    return statistics.median(mine / theirs for mine, theirs in zip(taken, peer, strict=True))


def print_rows(model: str, replicas: int, rows: list[dict[str, Any]]) -> None:
    """A part of the table."""
    peers = [row for peer in ("JAX", "tf.distribute") for row in rows if row["contender"] == peer]
    for row in rows:
        taken = row["ms"]
        figures = f"{statistics.median(taken):.2f} | {min(taken):.2f}-{max(taken):.2f}"
        ratios = " | ".join(f"{ratio(taken, peer['ms']):.2f}" for peer in peers)
        print(f"| {model} | {replicas} | {row['contender']} | {figures} | {ratios} | {row['loss']:.6f} |")
    sys.stdout.flush()


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,conv,transformer", help="which (default %(default)s)")
    parser.add_argument("--replicas", default="2,4", help="how many (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps a repeat (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default %(default)s)")
    parser.add_argument("--json", help="write the figures to this file as well")
    flags = parser.parse_args()
    sizes = [int(size) for size in flags.replicas.split(",")]

    # After the flags are read: importing the frameworks takes seconds.
    from benchmarks.contenders import contenders, start

    start(max(sizes))
    import jax
    import tensorflow as tf

    from benchmarks.models import MODELS

    versions = f"Python {platform.python_version()}, TensorFlow {tf.__version__}, jax {jax.__version__}"
    print(f"{platform.machine()}, {versions}; losses after {flags.steps} steps, equal to {TOLERANCE:g}")
    print("| model | N | | ms a step | spread | to JAX | to tf.distribute | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    table = []
    for name in flags.models.split(","):
        for replicas in sizes:
            rows = measure(contenders(MODELS[name], replicas), flags.steps, flags.repeats)
            print_rows(name, replicas, rows)
            table += [{"model": name, "replicas": replicas, **row} for row in rows]
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump({"versions": versions, "steps": flags.steps, "rows": table}, file, indent=1)


if __name__ == "__main__":
    main()
