"""The cost of one training step, beside tf.distribute and JAX in the same process.

`shared_models` has the models, and `contenders` the ways to train them. All contenders start from the same weights and
see the same batches, and their losses must agree after the first steps.

A figure is the mean of at least ten steps, and of as many as the fastest contender makes in half a second. Means of ten
steps of 8 ms each differed by a quarter from one time to the next.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator

from benchmarks import command
from benchmarks.contenders import contenders, start
from benchmarks.measure import Row, WrongResult, interleaved, milliseconds, same
from benchmarks.shared_models import MODELS, Contender

TOLERANCE = 1e-4  # the largest relative difference of losses: frameworks add numbers in different orders

PEERS = ("JAX", "tf.distribute")

TARGETS = {"TPUStrategy": {"JAX": 1.0}, "MirroredStrategy": {"tf.distribute": 1.0}}
"""The largest ratio that meets the target, by contender and peer."""

MANY_ALL_REDUCES = {"MirroredStrategy": {"tf.distribute": 0.9}}
"""The targets for a model whose steps are mostly all-reduces."""


def timed(contender: Contender, steps: int) -> float:
    """Milliseconds a step."""
    indices = itertools.count()
    return milliseconds(lambda: contender.step(next(indices)), steps)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each contender of this library, with each model and number of replicas."""
    start(max(flags.replicas))
    for model, replicas in itertools.product(flags.models, flags.replicas):
        targets = TARGETS | (MANY_ALL_REDUCES if model == "small" else {})
        every = {each.name: each for each in contenders(MODELS[model], replicas)}
        losses = {who: each.mean([each.step(index) for index in range(flags.steps)][-1]) for who, each in every.items()}
        check = same(f"loss after {flags.steps} steps", losses, TOLERANCE)
        quickest = min(timed(each, flags.steps) for each in every.values())
        steps = max(flags.steps, round(flags.figure_ms / quickest))
        figures = interleaved(every, flags.repeats, lambda each, steps=steps: timed(each, steps))
        # Arithmetic with NaN or infinity has another speed.
        if not all(math.isfinite(each.mean(each.step(0))) for each in every.values()):
            raise WrongResult(f"{model} on {replicas} replicas computed a loss that is not finite")
        for name in [name for name in figures if name not in PEERS]:
            shown = {who: figures[who] for who in (name, *PEERS)}
            yield Row("train_step", model, shown, replicas=replicas, targets=targets.get(name, {}), check=check)


if __name__ == "__main__":
    steps = "steps before losses are compared, and the smallest number of steps per figure"
    command.main(
        __doc__,
        measure,
        command.FEW_REPEATS,
        command.models(MODELS, "mlp,small"),
        command.replicas("2,4,8"),
        command.Option("steps", "10", "2", steps),
        command.Option("figure_ms", "500", "1", "milliseconds per figure for the fastest contender, about"),
    )
