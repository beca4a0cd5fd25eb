"""Load: many replicas, many runs, many threads."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

import replica_engine
from benchmarks.contenders import COMPILED, THREADS, distributed, make_shared_strategy
from benchmarks.fresh import in_fresh_process, peak
from benchmarks.measure import seconds
from replica_engine import logical_devices
from soak.outcome import Outcome, tell

MANY = 64  # the number of replicas, on any number of cores

GROWTH = 100  # the largest growth of memory in bytes per run: 10 MB in a hundred thousand runs


def meet(x: Any) -> tf.Tensor:
    """Returns a sum over replicas, and does nothing else."""
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


def many_replicas(name: str) -> tuple[int, list[str], str]:
    """Trains on 64 replicas for a while; all copies stay bitwise equal, and equal to a training on one replica."""
    strategy = make_shared_strategy(name, MANY)
    with strategy.scope():
        weight = tf.Variable(tf.ones([8]))

    def step(x: Any) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        weight.assign_sub(context.all_reduce("SUM", x * weight) / 2**20)
        return context.all_reduce("SUM", tf.reduce_sum(x))

    rows = np.arange(MANY * 8, dtype=np.float32).reshape(MANY, 8)
    inputs = distributed(strategy, rows)
    began, steps, wrong = time.monotonic(), 20, []
    for _ in range(steps):
        sums = [float(value) for value in strategy.experimental_local_results(strategy.run(step, args=(inputs,)))]
        if sums != [float(rows.sum())] * MANY:
            wrong.append(f"a step returned {sums}")
    in_function = tf.function(lambda: strategy.run(step, args=(inputs,)))
    for _ in range(steps):
        in_function()
    took = time.monotonic() - began
    copies = [np.asarray(value) for value in strategy.experimental_local_results(weight)]
    wanted = np.ones(8) * (1 - rows.sum(axis=0) / 2**20) ** (2 * steps)
    if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
        wrong.append("copies differ")
    if not np.allclose(copies[0], wanted, rtol=1e-5):
        wrong.append(f"the weights are {copies[0]}, not {wanted}")
    text = f"{took / steps / 2 * 1e3:.0f} ms a step, {threading.active_count()} threads in the process"
    return 2 * steps, wrong, text


def many_runs(name: str, runs: int) -> tuple[int, list[str], str]:
    """Makes very many small runs; memory and the number of threads must not grow."""
    strategy, process = make_shared_strategy(name, 2), psutil.Process()
    x = tf.ones([64])

    def some(count: int) -> tuple[int, int]:
        for _ in range(count):
            result = strategy.run(meet, args=(x,))
        if float(strategy.experimental_local_results(result)[0][0]) != 2.0:
            wrong.append("a run returned another number")
        gc.collect()
        return threading.active_count(), process.memory_info().rss

    wrong: list[str] = []
    some(max(1000, runs // 20))  # caches fill
    threads, memory = some(max(100, runs // 20))
    took, now = seconds(lambda: [some(runs // 10) for _ in range(10)])
    if any(each != threads for each, _ in now):
        wrong.append(f"threads: {threads}, then {[each for each, _ in now]}")
    grown = now[-1][1] - memory
    if grown > max(GROWTH * runs, 4 * 2**20):
        each = [round((memory_then - memory) / 2**20, 1) for _, memory_then in now]
        wrong.append(f"memory grew by {grown / 2**20:.1f} MiB: {each}")
    text = f"{took / runs * 1e3:.2f} ms a run; memory {grown / 2**20:+.1f} MiB, threads {now[-1][0] - threads:+d}"
    return runs, wrong, text


def many_threads() -> tuple[int, list[str], str]:
    """Sixteen user threads call `run` on four strategies at once, in all forms."""
    strategies = [
        make_shared_strategy(THREADS, 2),
        replica_engine.MirroredStrategy(logical_devices(3), concurrent=True),
        make_shared_strategy(COMPILED, 2),
        make_shared_strategy(COMPILED, 4),
    ]
    totals = []
    for strategy in strategies:
        with strategy.scope():
            totals.append(tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM))
    wrong: list[str] = []
    each = 100

    def work(index: int) -> None:
        strategy, total = strategies[index % 4], totals[index % 4]
        size, x = strategy.num_replicas_in_sync, tf.constant(float(index))

        def eager() -> Any:
            return strategy.run(meet, args=(x,))

        run = tf.function(eager) if index >= 12 else eager
        for _ in range(each):
            values = [float(value) for value in strategy.experimental_local_results(run())]
            if values != [float(size * index)] * size:
                wrong.append(f"thread {index}: {values}")
        strategy.run(lambda: total.assign_add(tf.ones([])))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        took, _ = seconds(lambda: list(pool.map(work, range(16))))
    for strategy, total in zip(strategies, totals, strict=True):
        if float(total.numpy()) != 4.0 * strategy.num_replicas_in_sync:
            wrong.append(f"the total is {float(total.numpy())}, not {4 * strategy.num_replicas_in_sync}")
    return 16 * each, wrong, f"{16 * each / took:.0f} runs a second"


def large_model() -> tuple[int, list[str], str]:
    """Trains a model whose replicas would need 30 GiB on four devices, in a process of its own."""
    try:
        variables, losses, most = in_fresh_process(train_large_model)
    except Exception as error:  # it may have been killed
        return 0, [f"{type(error).__name__}: {error}"], ""
    replicas, device, most = len(variables) * sum(variables) / 2**30, max(variables) / 2**30, most / 2**30
    wrong = []
    if replicas < 30 or most > 12:
        wrong.append(f"{replicas:.1f} GiB of replicas in {most:.1f} GiB")
    if not all(later < earlier for earlier, later in itertools.pairwise(losses)):
        wrong.append(f"losses {losses}")
    text = f"replicas would need {replicas:.0f} GiB; {device:.1f} GiB a device, {most:.1f} GiB in all"
    return len(losses), wrong, text


def train_large_model(layers: int = 10, width: int = 8192) -> tuple[list[int], list[float], int]:
    """Trains for three steps, in parts; the bytes of variables on each device, losses, the process' largest memory."""
    logical_devices(4)
    strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
    with strategy.scope():
        dense = [keras.layers.Dense(width, "relu", use_bias=False) for _ in range(layers)]
        model = keras.Sequential([keras.Input([width]), *dense])
        model.compile(keras.optimizers.Adam(1e-5), "mse")
    x = np.random.default_rng(0).normal(size=(16, width)).astype("f")
    losses = [float(model.train_on_batch(x, x)) for _ in range(3)]
    return list(strategy.memory().variables), losses, peak()


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Runs each load, and yields an outcome for each."""
    logical_devices(MANY)
    yield _outcome("TPUStrategy", "a model of 30 GiB in parts, on 4 devices", large_model)
    both = "MirroredStrategy, TPUStrategy"
    yield _outcome(both, "16 user threads call run on 4 strategies at once", many_threads)
    for name in (THREADS, COMPILED):
        yield _outcome(name, f"{MANY} replicas on this machine", functools.partial(many_replicas, name))
        what = "small runs in a row, with flat memory and threads"
        yield _outcome(name, what, functools.partial(many_runs, name, flags.runs))


def _outcome(where: str, what: str, work: Callable[[], tuple[int, list[str], str]]) -> Outcome:
    taken, (count, wrong, found) = seconds(work)
    outcome = Outcome("load", where, what, found=found)
    outcome.add(taken, [f"{where}: {what}: {each}" for each in wrong], count)
    tell(f"{where}: {what}", wrong, found)
    return outcome
