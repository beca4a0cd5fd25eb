"""The cost of the first training step of a large Keras model, beside tf.distribute, each in a new process.

The program is a user's: Keras' ResNet-50, a `tf.function` step with `strategy.run`, and a Keras optimizer, with eight
images for each replica. Each figure has a new process, of this library and of tf.distribute in turn, because only the
first time is slow. The first step is traced, optimized and run. The other row also includes making the strategy, the
model and the optimizer. The second step is not timed, but its loss, after an update of all weights, must be the same
too. tf.distribute uses its fastest all-reduce for CPUs.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

from benchmarks import command
from benchmarks.fresh import in_fresh_process
from benchmarks.keras_training import THEIRS, THREADS, WARM_UP, Trained, train
from benchmarks.measure import Row, interleaved, same
from benchmarks.models import START_UP_TARGETS, TOLERANCE, processor_time

BATCH = 8  # the number of images for each replica


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for the first step, and one that includes building the model, of each number of replicas."""
    for replicas in flags.replicas:
        trained = functools.partial(_trained, replicas)
        found = interleaved({who: who for who in (THREADS, THEIRS)}, flags.repeats, trained)
        figures = {who: [each.first.seconds for each in trained] for who, trained in found.items()}
        whole = {who: [each.built.seconds + each.first.seconds for each in trained] for who, trained in found.items()}
        check = "; ".join(
            same(f"loss of step {step + 1}", {who: each[-1].losses[step] for who, each in found.items()}, TOLERANCE)
            for step in range(WARM_UP)
        )
        note = processor_time({who: [each.first for each in trained] for who, trained in found.items()})
        row = functools.partial(Row, "start_up", unit="s", replicas=replicas, check=check)
        yield row("first step of ResNet-50", figures, targets=START_UP_TARGETS.get(replicas, {}), note=note)
        yield row("building ResNet-50, and its first step", whole)


def _trained(replicas: int, who: str) -> Trained:
    return in_fresh_process(train, who, "resnet", replicas, replicas * BATCH)


if __name__ == "__main__":
    repeats = command.Option("repeats", "2", "1", "processes of each strategy")
    command.main(__doc__, measure, repeats, command.replicas("4,8"))
