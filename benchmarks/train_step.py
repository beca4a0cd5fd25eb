"""What one training step costs, beside tf.distribute and JAX in the same process.

    python -m benchmarks.train_step [--models mlp,conv,transformer,small] [--replicas 2,4,8] [--steps 10]
        [--figure-ms 500] [--repeats 7] [--quick] [--json out.json]

`models` has what is trained and `contenders` by whom. All start from the same weights and see the same batches; after
the first steps their losses must agree, or there is nothing to compare.

A figure is the mean of at least ten steps, and of as many as take the quickest contender half a second: means of ten
steps of 8 ms differed by a quarter from one time to the next.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator

from benchmarks import command
from benchmarks.measure import Row, WrongResult, interleaved, milliseconds, same
from benchmarks.models import MODELS

TOLERANCE = 1e-4
"""How far losses may be apart, relative to their size: frameworks add up in different orders."""

PEERS = ("JAX", "tf.distribute")

TARGETS = {"TPUStrategy": {"JAX": 1.0}, "MirroredStrategy": {"tf.distribute": 1.0}}
"""By contender and peer."""

MANY_ALL_REDUCES = {"MirroredStrategy": {"tf.distribute": 0.9}}
"""Targets where all-reduces are most of a step."""


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """A row for each of the library's contenders, with each model and number of replicas."""
    from benchmarks.contenders import Contender, contenders, start

    start(max(flags.replicas))

    def timed(contender: Contender, steps: int) -> float:
        indices = itertools.count()
        return milliseconds(lambda: contender.step(next(indices)), steps)

    for model in flags.models:
        targets = TARGETS | (MANY_ALL_REDUCES if model == "small" else {})
        for replicas in flags.replicas:
            every = contenders(MODELS[model], replicas)
            losses = {each.name: each.mean([each.step(index) for index in range(flags.steps)][-1]) for each in every}
            check = same(f"loss after {flags.steps} steps", losses, TOLERANCE)
            quickest = min(timed(each, flags.steps) for each in every)
            steps = max(flags.steps, round(flags.figure_ms / quickest))
            figures = interleaved({each.name: functools.partial(timed, each, steps) for each in every}, flags.repeats)
            if not all(math.isfinite(each.mean(each.step(0))) for each in every):  # else it was other arithmetic
                raise WrongResult(f"{model} on {replicas} replicas came to a loss that is no number")
            for name in figures:
                if name not in PEERS:
                    shown = {who: figures[who] for who in (name, *PEERS)}
                    yield Row(
                        "train_step",
                        model,
                        shown,
                        replicas=replicas,
                        targets=targets.get(name, {}),
                        check=check,
                    )


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("models", ",".join(MODELS), "mlp,small", "which", command.some_of(*MODELS)),
        command.Option("replicas", "2,4,8", "2", "how many", command.numbers),
        command.Option("steps", "10", "2", "steps before losses are compared, and steps a figure, at least"),
        command.Option("figure_ms", "500", "1", "milliseconds a figure, about, of the quickest"),
    )
