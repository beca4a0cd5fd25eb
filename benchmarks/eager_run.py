"""What one eager `strategy.run` costs, beside tf.distribute.MirroredStrategy in the same process.

    python -m benchmarks.eager_run [--repeats 7] [--runs 100] [--json out.json]

Bodies that do next to nothing, on logical CPU devices, so that the cost is the engine's. Repeats are
interleaved (ours, theirs, ours, ...), so that a change in the machine's speed meets both. tf.distribute is
given its quickest all-reduce for CPUs; its default one, a ring of collectives, can hang in eager mode. The
last row of a size is the limit: N + 1 bare hand-overs between threads, which is what a round takes at least.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import tensorflow as tf

import replica_engine
from replica_engine.engine.event import Event
from replica_engine.engine.thread import ReplicaThread
from replica_engine.testing import logical_devices

SIZES = (2, 4, 8)


def empty() -> None:
    """Nothing."""


def one_merge_call() -> None:
    """One merge call of nothing."""
    tf.distribute.get_replica_context().merge_call(lambda strategy: None)


def four_all_reduces() -> tf.Tensor:
    """Four all-reduces of 1 KiB."""
    context = tf.distribute.get_replica_context()
    value = tf.fill([256], tf.cast(context.replica_id_in_sync_group, tf.float32))
    for _ in range(4):
        value = context.all_reduce("MEAN", value)
    return value


def hand_overs(n: int, runs: int) -> float:
    """Milliseconds that N + 1 bare hand-overs between threads take."""
    back = Event()
    threads = [ReplicaThread(f"bare {index}") for index in range(n)]
    for thread in threads:
        thread.start()
    begin = time.perf_counter()
    for _ in range(runs):
        for thread, following in zip(threads, [*(t.should_run for t in threads[1:]), back], strict=True):
            thread.assign(following.set)
        threads[0].should_run.set()
        back.wait()
    elapsed = time.perf_counter() - begin
    for thread in threads:
        thread.close()
    return elapsed / runs * 1e3


def milliseconds(strategy: tf.distribute.Strategy, body: Callable[[], object], runs: int) -> float:
    """Milliseconds a run."""
    begin = time.perf_counter()
    for _ in range(runs):
        strategy.run(body)
    return (time.perf_counter() - begin) / runs * 1e3


def check_same(ours: tf.distribute.Strategy, theirs: tf.distribute.Strategy) -> None:
    """Both compute the same, or there is nothing to compare."""
    results = [s.experimental_local_results(s.run(four_all_reduces)) for s in (ours, theirs)]
    for one, other in zip(*results, strict=True):
        tf.debugging.assert_equal(one, other)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default %(default)s)")
    parser.add_argument("--runs", type=int, default=100, help="runs a repeat (default %(default)s)")
    parser.add_argument("--json", help="write the figures to this file as well")
    flags = parser.parse_args()

    devices = logical_devices(max(SIZES))
    tf.get_logger().setLevel("ERROR")  # tf.distribute warns about eager overhead, which is what is measured
    rows = []
    print(f"{platform.machine()}, Python {platform.python_version()}, TensorFlow {tf.__version__}")
    print("| N | body | ms a run | spread | tf.distribute | spread | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for n in SIZES:
        ours = replica_engine.MirroredStrategy(devices[:n])
        theirs = tf.distribute.MirroredStrategy(devices[:n], tf.distribute.ReductionToOneDevice())
        check_same(ours, theirs)
        for body in (empty, one_merge_call, four_all_reduces):
            figures: tuple[list[float], list[float]] = ([], [])
            for strategy in (ours, theirs):
                milliseconds(strategy, body, 10)
            for _ in range(flags.repeats):
                for strategy, taken in zip((ours, theirs), figures, strict=True):
                    taken.append(milliseconds(strategy, body, flags.runs))
            mine, peer = (statistics.median(taken) for taken in figures)
            spreads = [f"{min(taken):.2f}-{max(taken):.2f}" for taken in figures]
            name = body.__name__.replace("_", " ")
            rows.append({"replicas": n, "body": name, "ms": figures[0], "tf_distribute_ms": figures[1]})
            print(f"| {n} | {name} | {mine:.2f} | {spreads[0]} | {peer:.2f} | {spreads[1]} | {mine / peer:.2f} |")
        print(f"| {n} | bare hand-overs | {hand_overs(n, 500):.3f} | | | | |", flush=True)
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump({"tensorflow": tf.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
