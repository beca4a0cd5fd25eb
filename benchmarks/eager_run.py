"""The cost of one eager `strategy.run`, beside tf.distribute.MirroredStrategy in the same process.

The bodies do almost nothing, on logical CPU devices, so the cost is that of the engine. tf.distribute uses its fastest
all-reduce for CPUs; its default, a ring of collectives, takes twice as long. The other peer is the lower limit of a
round: N + 1 bare hand-overs between threads.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import replica_engine
from benchmarks import command
from benchmarks.contenders import THEIRS, THREADS, distributed, strategy_of
from benchmarks.measure import Row, WrongResult, interleaved, milliseconds
from replica_engine.engine.thread_pool import Event, ReplicaThread

TARGETS = {"empty": 0.45, "one merge call": 0.55}
"""The ratios to tf.distribute that are aimed at, by body: with two replicas. With more, tf.distribute loses."""

WARM_UP = 10  # the number of runs before the clock starts


def empty(_: Any) -> None:
    """Does nothing."""


def one_merge_call(_: Any) -> None:
    """Makes one empty merge call."""
    tf.distribute.get_replica_context().merge_call(lambda strategy: None)


def four_all_reduces(value: Any) -> Any:
    """Makes four all-reduces of 1 KiB."""
    context = tf.distribute.get_replica_context()
    for _ in range(4):
        value = context.all_reduce("MEAN", value)
    return value


BODIES = {"empty": empty, "one merge call": one_merge_call, "four all-reduces of 1 KB": four_all_reduces}
"""By name. They take a value that lies ready on each replica, so that none has ops of its own."""


def ready(strategy: Any) -> Any:
    """The argument of the bodies: 1 KiB, different on each replica."""
    return distributed(strategy, [[float(index)] * 256 for index in range(strategy.num_replicas_in_sync)])


def check_same(ours: Any, theirs: Any, body: Callable[[Any], Any] = four_all_reduces) -> str:
    """Checks that both strategies compute the same for a body, and says so.

    Raises:
        WrongResult: they compute different results.
    """
    results = [
        [value.numpy() for value in strategy.experimental_local_results(strategy.run(body, args=(ready(strategy),)))]
        for strategy in (ours, theirs)
    ]
    if any((one != other).any() for one, other in zip(*results, strict=True)):
        raise WrongResult(f"the strategies come to {results[0]} and {results[1]}")
    return "results bitwise equal"


def run(strategy: Any, body: Callable[[Any], Any], runs: int) -> Callable[[], float]:
    """Milliseconds per run, after some runs that are not timed."""
    once = functools.partial(strategy.run, body, args=(ready(strategy),))
    milliseconds(once, WARM_UP)
    return lambda: milliseconds(once, runs)


def hand_overs(replicas: int, runs: int) -> float:
    """Milliseconds for N + 1 bare hand-overs between threads."""
    back = Event()
    threads = [ReplicaThread(f"bare {index}") for index in range(replicas)]
    for thread in threads:
        thread.start()

    def round_trip() -> None:
        for thread, following in zip(threads, [*(t.should_run for t in threads[1:]), back], strict=True):
            thread.assign(following.set)
        threads[0].should_run.set()
        back.wait()

    taken = milliseconds(round_trip, runs)
    for thread in threads:
        thread.close()
    return taken


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each body and number of replicas."""
    replica_engine.logical_devices(max(flags.replicas))
    tf.get_logger().setLevel("ERROR")  # tf.distribute warns of the overhead that is measured here
    for replicas in flags.replicas:
        pair = {name: strategy_of(name, replicas) for name in (THREADS, THEIRS)}
        check = check_same(*pair.values())
        for name, body in BODIES.items():
            contenders = {who: run(strategy, body, flags.runs) for who, strategy in pair.items()}
            contenders["bare hand-overs"] = functools.partial(hand_overs, replicas, flags.runs)
            figures = interleaved(contenders, flags.repeats)
            targets = {THEIRS: TARGETS[name]} if name in TARGETS else {}
            yield Row("eager_run", name, figures, replicas=replicas, targets=targets, check=check)


if __name__ == "__main__":
    runs = command.Option("runs", "100", "10", "runs per repeat")
    command.main(__doc__, measure, command.replicas("2,4,8"), runs)
