"""The cost of the first training step, for 1 replica and for 8: tracing, lowering, compiling and running it.

    python -m benchmarks.first_step [--layers 30] [--replicas 1,8] [--repeats 5] [--quick] [--json out.json]

The model is a deep residual network. TPUStrategy traces the step once for any number of replicas, so the first step
should take about as long for 8 as for 1. tf.distribute traces and optimizes the step for each replica. The stages are
those of `replica_engine.xla`. Each repeat makes everything again, with the numbers of replicas in turn. Each row shows
the largest number of replicas, with the smallest as its peer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import command
from benchmarks.measure import Row, WrongResult, interleaved, same, seconds
from benchmarks.shared_models import Model, Ops, TensorFlowOps

WIDTH = 128

TARGET = 1.2
"""What the first step of TPUStrategy may take for the largest size, times that for the smallest."""

TOLERANCE = 1e-4
"""How far losses may be apart, relative to their size."""


def deep(layers: int) -> Model:
    """A residual network of dense layers."""

    def loss(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
        *body, head = weights
        for weight in body:
            x = x + ops.relu(ops.dense(ops.standardized(x), weight))
        return ops.cross_entropy(ops.dense(ops.standardized(x), head), labels)

    shapes = ((WIDTH, WIDTH),) * layers + ((WIDTH, 10),)
    return Model("deep", loss, shapes=shapes, batch=8, example=(WIDTH,))


class Size:
    """The first steps with one number of replicas, and their results.

    Attributes:
        replicas: the number of replicas.
        losses: the losses of the latest first step, by contender.
        counts: how often the library traced, lowered and compiled for the latest first step.
        stages: for each stage, the seconds of each repeat.
    """

    def __init__(self, model: Model, replicas: int):
        self.replicas = replicas
        self.losses: dict[str, float] = {}
        self.counts: tuple[int, ...] = ()
        self.stages: dict[str, list[float]] = {"trace": [], "lower": [], "compile": []}
        self._model = model

    def first_step(self, make: Callable[[Model, int], Any]) -> float:
        """Seconds for the first step of a new contender."""
        from replica_engine import xla

        contender = make(self._model, self.replicas)
        before = xla.counts()
        taken, losses = seconds(lambda: contender.step(0))
        counts = xla.counts() - before
        self.losses[contender.name] = contender.mean(losses)
        if contender.name == "TPUStrategy":
            self.counts = (counts.traces, counts.lowerings, counts.compiles)
            self._measure_stages()
        return taken

    def _measure_stages(self) -> None:
        """Seconds for each stage of a training step."""
        import tensorflow as tf

        from replica_engine import xla

        model = self._model
        weights = [tf.Variable(value) for value in model.weights()]

        def step(x: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = model.loss(TensorFlowOps(), weights, x, labels)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(model.rate / self.replicas * xla.cross_replica_sum(gradient))
            return loss

        x, labels = model.data(self.replicas)[0]
        both, lowered = seconds(lambda: xla.lower(step, list(zip(x, labels, strict=True))))
        again, _ = seconds(lowered.traced.lower)
        compiling, _ = seconds(lowered.compile)
        for stage, taken in zip(self.stages, (both - again, again, compiling), strict=True):
            self.stages[stage].append(taken)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for the first step of each contender, and for each stage.

    Raises:
        WrongResult: the numbers of traces, lowerings or compilations depend on the number of replicas, or losses
            differ.
    """
    from benchmarks.contenders import start, tf_distribute, tpu_strategy

    start(max(flags.replicas))
    makers = {"TPUStrategy": tpu_strategy, "tf.distribute": tf_distribute}
    ordered = sorted(flags.replicas, reverse=True)
    for replicas in ordered:  # makes the devices, and loads modules that are loaded once
        for make in makers.values():
            Size(deep(1), replicas).first_step(make)
    sizes = [Size(deep(flags.layers), replicas) for replicas in ordered]
    contenders = {
        f"{name}, N = {size.replicas}": lambda size=size, make=make: size.first_step(make)
        for name, make in makers.items()
        for size in sizes
    }
    figures = interleaved(contenders, flags.repeats)
    if len({size.counts for size in sizes}) > 1:
        raise WrongResult(f"traces, lowerings and compilations: {[(size.replicas, size.counts) for size in sizes]}")
    checks = [same(f"first loss for N = {size.replicas}", size.losses, TOLERANCE) for size in sizes]
    counted = "traces, lowerings, compilations: " + ", ".join(map(str, sizes[0].counts))
    largest, *others = (f"N = {size.replicas}" for size in sizes)
    for name in makers:
        yield Row(
            "first_step",
            f"first step of {flags.layers} layers",
            {f"{name}, {size}": figures[f"{name}, {size}"] for size in (largest, *others)},
            unit="s",
            replicas=ordered[0],
            targets={f"{name}, {others[-1]}": TARGET} if others and name == "TPUStrategy" else {},
            check="; ".join(checks),
            note=counted if name == "TPUStrategy" else "",
        )
    for stage in sizes[0].stages:
        taken = {f"TPUStrategy, N = {size.replicas}": size.stages[stage] for size in sizes}
        yield Row("first_step", stage, taken, unit="s", replicas=ordered[0], note=counted)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("layers", "30", "4", "number of layers"),
        command.Option("replicas", "1,8", "1,2", "numbers of replicas", command.numbers),
    )
