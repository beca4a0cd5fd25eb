"""How the cost of a run grows with the number of replicas, the size of the model and the number of merge calls.

Measures the points of three plots, which `picture` draws. Fits a straight line to the points of each contender: its
slope is the cost of one more replica, MB or merge call. A point is weighted by the inverse of its value, so that the
line fits small and large values equally well. The line is fitted for each repeat, so that the slope has a spread too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

import replica_engine
from benchmarks import command
from benchmarks.contenders import COMPILED, THEIRS, THREADS, strategy_of
from benchmarks.eager_run import empty
from benchmarks.measure import Row, fitted, interleaved, milliseconds, same

TRAINING = 2  # the number of replicas in plots that vary something else

MOST_STEPS = 20  # of the smallest model, a repeat; larger ones take fewer


def by_replicas(flags: argparse.Namespace) -> Iterator[Row]:
    """An eager run of an empty body."""
    for replicas in flags.replicas:
        runs = {
            who: functools.partial(strategy_of(who, replicas).run, empty, args=(None,)) for who in (THREADS, THEIRS)
        }
        figures = _timed(runs, max(2, flags.runs // replicas), flags.repeats)
        yield Row("growth", "empty run", figures, replicas=replicas, axis="replicas", at=replicas)


def by_size(flags: argparse.Namespace) -> Iterator[Row]:
    """A step in a `tf.function` that updates one variable with the all-reduced mean of a tensor of its size."""
    for size in flags.sizes:
        both = {who: _update(strategy_of(who, TRAINING), size) for who in (THREADS, THEIRS, COMPILED)}
        steps = {who: step for who, (step, _) in both.items()}
        for step in steps.values():
            step()
        check = same("mean of the elements", {who: total() for who, (_, total) in both.items()}, 1e-5)
        figures = _timed(steps, max(2, MOST_STEPS // (1 + size // 1000)), flags.repeats)
        for contenders in ((THREADS, THEIRS), (COMPILED,)):
            shown = {who: figures[who] for who in contenders}
            yield Row("growth", "all-reduce and update", shown, replicas=TRAINING, check=check, axis="KB", at=size)


def by_merge_calls(flags: argparse.Namespace) -> Iterator[Row]:
    """An eager run with the given number of empty merge calls."""
    pair = {who: strategy_of(who, TRAINING) for who in (THREADS, THEIRS)}
    for count in flags.merge_calls:

        def body(count: int = count) -> int:
            context = tf.distribute.get_replica_context()
            return sum(context.merge_call(lambda strategy: 1) for _ in range(count))

        runs = {who: functools.partial(strategy.run, body) for who, strategy in pair.items()}
        sums = {who: float(pair[who].experimental_local_results(run())[0]) for who, run in runs.items()}
        check = same("merge calls returned", sums)
        figures = _timed(runs, max(2, flags.runs // (1 + count)), flags.repeats)
        yield Row("growth", "run", figures, replicas=TRAINING, check=check, axis="merge calls", at=count)


def slopes(rows: Iterable[Row]) -> Iterator[Row]:
    """For each line with at least two points, the cost of one more unit of its axis."""
    lines: dict[tuple[str, str, str], list[tuple[float, list[float]]]] = {}
    for row in rows:
        for who, figures in row.figures.items():
            lines.setdefault((row.name, row.axis, who), []).append((row.at or 0.0, figures))
    for (name, axis, who), points in lines.items():
        if len(points) < 2:
            continue
        at = [x for x, _ in points]
        repeats = zip(*[figures for _, figures in points], strict=True)
        starts, added = zip(*[fitted([*zip(at, figures, strict=True)]) for figures in repeats], strict=True)
        note = f"fitted from {min(at):,.0f} to {max(at):,.0f}; {statistics.median_high(starts):.3g} ms at 0"
        yield Row("growth", f"{name}: slope by {axis}", {who: [slope * 1e3 for slope in added]}, unit="us", note=note)


def _update(strategy: Any, kilobytes: int) -> tuple[Callable[[], Any], Callable[[], float]]:
    """A step that updates a variable of this size, and a function for the mean of its elements."""
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
    return interleaved(contenders, repeats, lambda call: milliseconds(call, times))


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the points of each plot, and then the slopes."""
    replica_engine.logical_devices(max(*flags.replicas, TRAINING))
    tf.get_logger().setLevel("ERROR")  # tf.distribute warns of the overhead that is measured here
    rows = []
    for row in itertools.chain(by_replicas(flags), by_size(flags), by_merge_calls(flags)):
        rows.append(row)
        yield row
    yield from slopes(rows)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.replicas("1,2,4,8,16,32,64", "1,2,4"),
        command.Option("sizes", "1,10,100,1000,10000,100000", "1,100", "sizes of the model in KB", command.numbers),
        command.Option("merge_calls", "0,1,2,5,10,20,50,100", "0,1,10", "merge calls in a run", command.counts),
        command.Option("runs", "100", "5", "runs per repeat; fewer if they take long"),
    )
