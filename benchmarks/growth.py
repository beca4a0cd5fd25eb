"""How the cost of a run grows with the number of replicas, the size of the model and the number of merge calls.

    python -m benchmarks.growth [--replicas 1,2,4,8,16,32,64] [--sizes 1,10,100,1000,10000,100000]
        [--merge-calls 0,1,2,5,10,20,50,100] [--runs 100] [--repeats 5] [--quick] [--json out.json]

Measures the points of three plots, which `picture` draws. Fits a straight line to the points of each contender: its
slope is the cost of one more replica, MB or merge call. A point is weighted by the inverse of its value, so that the
line fits small and large values equally well. The line is fitted for each repeat, so that the slope has a spread too.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks import command
from benchmarks.eager_run import empty, strategies
from benchmarks.measure import Row, fitted, interleaved, milliseconds, same

GROUP = "growth"

OURS, COMPILED, THEIRS = "MirroredStrategy", "TPUStrategy", "tf.distribute"

TRAINING = 2
"""The number of replicas in plots that vary something else."""

MOST_STEPS = 20
"""Of the smallest model, a repeat; larger ones take fewer."""


def by_replicas(counts: Sequence[int], runs: int, repeats: int) -> Iterator[Row]:
    """An eager run of an empty body."""
    for replicas in counts:
        pair = dict(zip((OURS, THEIRS), strategies(replicas), strict=True))
        few = max(2, runs // replicas)
        figures = _timed(
            {who: functools.partial(strategy.run, empty, args=(None,)) for who, strategy in pair.items()}, few, repeats
        )
        yield Row(GROUP, "empty run", figures, replicas=replicas, axis="replicas", at=replicas)


def by_size(kilobytes: Sequence[int], repeats: int) -> Iterator[Row]:
    """A step in a `tf.function` that updates one variable with the all-reduced mean of a tensor of its size."""
    for size in kilobytes:
        steps, totals = {}, {}
        for who, strategy in _trainers().items():
            steps[who], totals[who] = _update(strategy, size)
        for step in steps.values():
            step()
        check = same("mean of the elements", {who: total() for who, total in totals.items()}, 1e-5)
        few = max(2, MOST_STEPS // (1 + size // 1000))
        figures = _timed(steps, few, repeats)
        for shown in ((OURS, THEIRS), (COMPILED,)):
            yield Row(
                GROUP,
                "all-reduce and update",
                {who: figures[who] for who in shown},
                replicas=TRAINING,
                check=check,
                axis="KB",
                at=size,
            )


def by_merge_calls(counts: Sequence[int], runs: int, repeats: int) -> Iterator[Row]:
    """An eager run with the given number of empty merge calls."""
    import tensorflow as tf

    pair = dict(zip((OURS, THEIRS), strategies(TRAINING), strict=True))
    for count in counts:

        def body(count: int = count) -> int:
            context = tf.distribute.get_replica_context()
            return sum(context.merge_call(lambda strategy: 1) for _ in range(count))

        sums = {
            who: float(strategy.experimental_local_results(strategy.run(body))[0]) for who, strategy in pair.items()
        }
        check = same("merge calls returned", sums)
        few = max(2, runs // (1 + count))
        figures = _timed({who: functools.partial(strategy.run, body) for who, strategy in pair.items()}, few, repeats)
        yield Row(GROUP, "run", figures, replicas=TRAINING, check=check, axis="merge calls", at=count)


def slopes(rows: Iterable[Row]) -> Iterator[Row]:
    """For each line with at least two points, the cost of one more unit of its axis."""
    lines: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        for who in row.figures:
            lines.setdefault((row.name, row.axis), {}).setdefault(who, []).append(row)
    for (name, axis), contenders in lines.items():
        for who, points in contenders.items():
            if len(points) < 2:
                continue
            repeats = len(points[0].figures[who])
            at = [point.at or 0.0 for point in points]
            fits = [fitted([(x, p.figures[who][i]) for x, p in zip(at, points, strict=True)]) for i in range(repeats)]
            starts, added = zip(*fits, strict=True)
            middle = sorted(starts)[repeats // 2]
            yield Row(
                GROUP,
                f"{name}: slope by {axis}",
                {who: [slope * 1e3 for slope in added]},
                unit="us",
                note=f"fitted from {min(at):,.0f} to {max(at):,.0f}; {middle:.3g} ms at 0",
            )


def _trainers() -> dict[str, Any]:
    import replica_engine

    return {
        **dict(zip((OURS, THEIRS), strategies(TRAINING), strict=True)),
        COMPILED: replica_engine.TPUStrategy(num_cores=TRAINING),
    }


def _update(strategy: Any, kilobytes: int) -> tuple[Callable[[], Any], Callable[[], float]]:
    """A step that updates a variable of this size, and a function for the mean of its elements."""
    import tensorflow as tf

    with strategy.scope():
        weights = tf.Variable(tf.zeros([kilobytes * 1000 // 4]))

    def replica_step() -> Any:
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce("MEAN", weights + tf.cast(context.replica_id_in_sync_group, tf.float32))
        return tf.reduce_max(weights.assign_add(0.1 * mean))

    @tf.function
    def step() -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step), axis=None)

    return lambda: step().numpy(), lambda: float(tf.reduce_mean(weights).numpy())


def _timed(contenders: dict[str, Callable[[], Any]], times: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds per call, after some calls that are not timed."""
    for call in contenders.values():
        milliseconds(call, 2)
    return interleaved({who: functools.partial(milliseconds, call, times) for who, call in contenders.items()}, repeats)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the points of each plot, and then the slopes."""
    import tensorflow as tf

    import replica_engine

    replica_engine.logical_devices(max(*flags.replicas, TRAINING))
    tf.get_logger().setLevel("ERROR")  # tf.distribute warns of the overhead that is measured here
    rows = []
    for plot in (
        by_replicas(flags.replicas, flags.runs, flags.repeats),
        by_size(flags.sizes, flags.repeats),
        by_merge_calls(flags.merge_calls, flags.runs, flags.repeats),
    ):
        for row in plot:
            rows.append(row)
            yield row
    yield from slopes(rows)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("replicas", "1,2,4,8,16,32,64", "1,2,4", "numbers of replicas", command.numbers),
        command.Option("sizes", "1,10,100,1000,10000,100000", "1,100", "sizes of the model in KB", command.numbers),
        command.Option(
            "merge_calls", "0,1,2,5,10,20,50,100", "0,1,10", "numbers of merge calls in a run", command.counts
        ),
        command.Option("runs", "100", "5", "runs per repeat; fewer if they take long"),
    )
