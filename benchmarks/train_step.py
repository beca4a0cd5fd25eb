"""The cost of one training step, beside tf.distribute and JAX in the same process.

    python -m benchmarks.train_step [--models mlp,conv,transformer,small] [--replicas 2,4,8] [--steps 10]
        [--figure-ms 500] [--repeats 3] [--quick] [--json out.json]

`models` has the models, and `contenders` the ways to train them. All contenders start from the same weights and see the
same batches, and their losses must agree after the first steps.

A figure is the mean of at least ten steps, and of as many as the fastest contender makes in half a second. Means of ten
steps of 8 ms each differed by a quarter from one time to the next.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator

from benchmarks import command
from benchmarks.measure import Row, WrongResult, interleaved, milliseconds, same
from benchmarks.shared_models import MODELS

TOLERANCE = 1e-4
"""The largest relative difference of losses: frameworks add numbers in different orders."""

PEERS = ("JAX", "tf.distribute")

TARGETS = {"TPUStrategy": {"JAX": 1.0}, "MirroredStrategy": {"tf.distribute": 1.0}}
"""The largest ratio that meets the target, by contender and peer."""

MANY_ALL_REDUCES = {"MirroredStrategy": {"tf.distribute": 0.9}}
"""The targets for a model whose steps are mostly all-reduces."""


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each contender of this library, with each model and number of replicas."""
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
            # Arithmetic with NaN or infinity has another speed.
            if not all(math.isfinite(each.mean(each.step(0))) for each in every):
                raise WrongResult(f"{model} on {replicas} replicas computed a loss that is not finite")
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
        command.FEW_REPEATS,
        command.Option("models", ",".join(MODELS), "mlp,small", "models to train", command.choose_some(*MODELS)),
        command.Option("replicas", "2,4,8", "2", "numbers of replicas", command.numbers),
        command.Option(
            "steps", "10", "2", "steps before losses are compared, and the smallest number of steps per figure"
        ),
        command.Option("figure_ms", "500", "1", "milliseconds per figure for the fastest contender, about"),
    )
