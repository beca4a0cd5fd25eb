"""The memory that the library takes: for a replica thread, a compiled program, and variables on N devices.

The figure is the growth of the resident set of a new process, which has loaded everything and done the same on a small
scale before. There are no peers: the table shows the numbers themselves. The unit for variables is copies: the growth
divided by the bytes of the variables. N devices take N copies; more than N means a copy on the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import replica_engine
from benchmarks import command
from benchmarks.contenders import COMPILED, THREADS, strategy_of
from benchmarks.fresh import in_fresh_process, resident
from benchmarks.measure import Row, WrongResult

KIB, MIB = 2**10, 2**20

VARIABLES = 2  # the number of variables. They are large, so their memory goes back to the system when it is freed.


def grown(do: Callable[[], Any]) -> tuple[int, Any]:
    """The growth of memory in bytes during a call, and the result of the call, which keeps its memory."""
    before = resident()
    result = do()
    return resident() - before, result


def replica_thread(threads: int) -> float:
    """KiB for each replica thread of a strategy that has run once."""
    devices = replica_engine.logical_devices(threads)

    def run(replicas: int) -> Any:
        strategy = replica_engine.MirroredStrategy(devices[:replicas])
        strategy.run(lambda: None)
        return strategy

    kept = run(1)
    taken, _kept = grown(lambda: (kept, run(threads)))
    return taken / threads / KIB


def cached_program(programs: int) -> float:
    """KiB for each compiled program that a strategy keeps: a small body, compiled for many shapes."""
    strategy = strategy_of(COMPILED, 2)

    def body(x: Any) -> Any:
        return tf.reduce_sum(tf.nn.softmax(x) * 2.0)

    def run(sizes: range) -> None:
        before = replica_engine.xla.counts()
        for size in sizes:
            strategy.run(body, args=(tf.ones([size]),))
        if (compiled := (replica_engine.xla.counts() - before).compiles) != len(sizes):
            raise WrongResult(f"{len(sizes)} shapes were compiled {compiled} times")

    run(range(1, 4))
    taken, _ = grown(lambda: run(range(4, 4 + programs)))
    return taken / programs / KIB


def copies(who: str, replicas: int, megabytes: int) -> list[float]:
    """Copies of variables in memory: after updates of all of them on the replicas, and after reads on the host."""
    replica_engine.logical_devices(replicas)

    def updated(bytes_of_each: int) -> list[Any]:
        strategy = strategy_of(who, replicas)
        with strategy.scope():
            variables = [tf.Variable(tf.ones([bytes_of_each // 4])) for _ in range(VARIABLES)]

        def update() -> None:
            for variable in variables:
                variable.assign_add(tf.ones_like(variable))

        for _ in range(2):
            strategy.run(update)
        return variables

    def read(variables: list[Any]) -> None:
        for variable in variables:
            if (found := variable.numpy()[0]) != 3:
                raise WrongResult(f"1, twice updated by 1, is {found}")

    small = updated(4 * KIB)
    read(small)
    size = megabytes * MIB // VARIABLES
    after_update, variables = grown(lambda: updated(size))
    after_read, _ = grown(lambda: read(variables))
    return [taken / (size * VARIABLES) for taken in (after_update, after_update + after_read)]


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for threads, for programs and for variables."""

    def fresh(function: Callable[..., Any], *args: Any) -> list[Any]:
        return [in_fresh_process(function, *args) for _ in range(flags.repeats)]

    figures = {THREADS: fresh(replica_thread, flags.threads)}
    yield Row("memory", "a replica thread", figures, "KiB", note=f"of {flags.threads} threads")
    figures = {COMPILED: fresh(cached_program, flags.programs)}
    note = f"of {flags.programs} programs of a small body"
    yield Row("memory", "a cached program", figures, "KiB", 2, check="a program for each shape", note=note)
    note = f"of {flags.megabytes} MiB in {VARIABLES} variables"
    for who in (COMPILED, THREADS):
        columns = zip(*fresh(copies, who, flags.replicas, flags.megabytes), strict=True)
        for when, taken in zip(("after an update", "after the host read them"), columns, strict=True):
            figures, check = {who: list(taken)}, "values after two updates"
            yield Row("memory", f"variables {when}", figures, "copies", flags.replicas, check=check, note=note)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("threads", "64", "16", "number of replica threads"),
        command.Option("programs", "20", "5", "number of compiled programs"),
        command.Option("megabytes", "256", "128", "size of all variables together, in MB"),
        command.Option("replicas", "2", "2", "number of replicas"),
    )
