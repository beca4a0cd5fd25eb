"""Measures by how many bytes a process grows when something is done often, in a process where nothing else runs."""

import gc
import threading

import psutil
import tensorflow as tf

import replica_engine
from replica_engine import logical_devices

MEGABYTE = 1 << 18  # elements of float32


def grown_by_compiled_runs():
    """In 300 runs with an array of a megabyte as argument, as result and as variable, which is read each time."""
    strategy = replica_engine.TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([MEGABYTE]))

    def step(x):
        variable.assign_add(x)
        return x * 2.0

    x = tf.ones([MEGABYTE])
    read = tf.function(lambda: strategy.experimental_local_results(variable)[0])

    def runs(count):
        for _ in range(count):
            strategy.run(step, args=(x,))
            read()

    grown = _grown(runs, 30, 300)
    assert variable.numpy()[0] == 330.0
    return grown


def grown_by_compiled_strategies():
    """In 30 strategies of two replicas that are dropped, each with a variable of a megabyte."""

    def once():
        strategy = replica_engine.TPUStrategy(num_cores=2)
        with strategy.scope():
            variable = tf.Variable(tf.zeros([MEGABYTE]))
        strategy.run(lambda: tf.group(variable.assign_add(variable + 1.0)))

    def strategies(count):
        for _ in range(count):
            once()
            gc.collect()

    return _grown(strategies, 3, 30)


def grown_by_merge_calls():
    """In 2,000 runs on threads with a merge call, and how many threads more there are then."""
    strategy = replica_engine.MirroredStrategy(logical_devices(2))

    def meet():
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda strategy, x: x, args=(tf.zeros([64]),))

    def runs(count):
        for _ in range(count):
            strategy.run(meet)

    runs(300)  # caches fill
    threads = threading.active_count()
    return _grown(runs, 100, 2000), threading.active_count() - threads


def _grown(do, before, times):
    do(before)
    gc.collect()
    start = psutil.Process().memory_info().rss
    do(times)
    gc.collect()
    return psutil.Process().memory_info().rss - start
