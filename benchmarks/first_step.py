"""The cost of the first training step, for 1 replica and for 8: tracing, lowering, compiling and running it.

The model is a deep residual network. TPUStrategy traces the step once for any number of replicas, so the first step
should take about as long for 8 as for 1. tf.distribute traces and optimizes the step for each replica. The stages are
those of a timeline. Each repeat makes everything again, with the numbers of replicas in turn. Each row shows
the largest number of replicas, with the smallest as its peer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import command
from benchmarks.contenders import COMPILED, THEIRS, made, start
from benchmarks.keras_training import STAGES, with_stages
from benchmarks.measure import Row, WrongResult, interleaved, same, seconds
from benchmarks.shared_models import Model, Ops
from replica_engine import xla

WIDTH = 128

TARGET = 1.2  # what the first step of TPUStrategy may take for the largest size, times that for the smallest

TOLERANCE = 1e-4  # how far losses may be apart, relative to their size


def deep(layers: int) -> Model:
    """A residual network of dense layers."""

    def loss(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
        *body, head = weights
        for weight in body:
            x = x + ops.relu(ops.dense(ops.standardized(x), weight))
        return ops.cross_entropy(ops.dense(ops.standardized(x), head), labels)

    return Model("deep", loss, ((WIDTH, WIDTH),) * layers + ((WIDTH, 10),), batch=8, example=(WIDTH,))


class Size:
    """The first steps with one number of replicas, and the results of the latest: losses, counts, seconds of stages."""

    def __init__(self, model: Model, replicas: int):
        self.replicas = replicas
        self.losses: dict[str, float] = {}
        self.counts: tuple[int, ...] = ()
        self.stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self._model = model

    def first_step(self, name: str) -> float:
        """Seconds for the first step of a new contender."""
        contender = made(name, self._model, self.replicas)
        if name != COMPILED:
            taken, losses = seconds(lambda: contender.step(0))
        else:
            before = xla.counts()
            taken, (losses, stages) = seconds(lambda: with_stages(lambda: contender.step(0)))
            counts = xla.counts() - before
            self.counts = (counts.traces, counts.lowerings, counts.compiles)
            for stage, of_stage in stages.items():
                self.stages[stage].append(of_stage)
        self.losses[name] = contender.mean(losses)
        return taken


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for the first step of each contender, and for each stage.

    Raises:
        WrongResult: the numbers of traces, lowerings or compilations depend on the number of replicas, or losses
            differ.
    """
    start(max(flags.replicas))
    names = (COMPILED, THEIRS)
    ordered = sorted(flags.replicas, reverse=True)
    for replicas in ordered:  # makes the devices, and loads modules that are loaded once
        for name in names:
            Size(deep(1), replicas).first_step(name)
    sizes = [Size(deep(flags.layers), replicas) for replicas in ordered]
    contenders = {f"{name}, N = {size.replicas}": (size, name) for name in names for size in sizes}
    figures = interleaved(contenders, flags.repeats, lambda both: both[0].first_step(both[1]))
    if len({size.counts for size in sizes}) > 1:
        raise WrongResult(f"traces, lowerings and compilations: {[(size.replicas, size.counts) for size in sizes]}")
    checks = [same(f"first loss for N = {size.replicas}", size.losses, TOLERANCE) for size in sizes]
    counted = "traces, lowerings, compilations: " + ", ".join(map(str, sizes[0].counts))
    for name in names:
        shown = {who: figures[who] for who, (_, contender) in contenders.items() if contender == name}
        yield Row(
            "first_step",
            f"first step of {flags.layers} layers",
            shown,
            unit="s",
            replicas=ordered[0],
            targets={[*shown][-1]: TARGET} if len(shown) > 1 and name == COMPILED else {},
            check="; ".join(checks),
            note=counted if name == COMPILED else "",
        )
    for stage in STAGES:
        taken = {f"{COMPILED}, N = {size.replicas}": size.stages[stage] for size in sizes}
        yield Row("first_step", stage, taken, unit="s", replicas=ordered[0], note=counted)


if __name__ == "__main__":
    layers = command.Option("layers", "30", "4", "number of layers")
    command.main(__doc__, measure, layers, command.replicas("1,8", "1,2"))
