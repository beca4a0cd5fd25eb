"""Measures how many copies of a strategy's variables a process has in memory, at several moments."""

import os
import pathlib

import numpy as np
import tensorflow as tf

import replica_engine
from benchmarks.fresh import resident

VARIABLES = 16
FLOATS = 1 << 20  # in each variable
REPLICAS = 2


def grown_with_something_behind():
    """The copies by which the process grows in a first step on variables; something else lies behind their values."""
    strategy = replica_engine.TPUStrategy(num_cores=REPLICAS)
    behind = []

    def step(weights):
        for weight in weights:
            weight.assign_add(tf.ones_like(weight))

    def made(floats):
        with strategy.scope():
            for _ in range(4):
                yield tf.Variable(tf.ones([floats]))
                behind.append(np.ones(floats * 2, np.float32))

    strategy.run(step, args=(list(made(2)),))  # from the first program on, the process keeps memory
    weights = list(made(6 << 20))
    before = as_it_is()
    strategy.run(step, args=(weights,))
    assert len(behind) == 8
    return (as_it_is() - before) / (4 * (6 << 20) * len(weights))


def grown_by_one_variable():
    """The copies by which the process grows in the first step of a large variable, whose value the host has before."""
    strategy = replica_engine.TPUStrategy(num_cores=REPLICAS)

    def made(floats):
        with strategy.scope():
            return tf.Variable(tf.ones([floats]))

    def step(weight):
        weight.assign_add(tf.ones_like(weight))

    strategy.run(step, args=(made(1 << 15),))
    weight = made(16 << 20)
    before = resident()
    strategy.run(step, args=(weight,))
    return (resident() - before) / (4 * (16 << 20))


def as_it_is():
    """The resident set of this process in bytes, with what the C library keeps."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def copies():
    """The copies after two steps, after host writes and two more steps, after another program, and after host reads."""
    strategy = replica_engine.TPUStrategy(num_cores=REPLICAS)

    def made(floats):
        with strategy.scope():
            return [tf.Variable(1.0 + 0.0 * tf.random.uniform([floats])) for _ in range(VARIABLES)]

    def step(weights):
        for weight in weights:
            weight.assign(weight + 1.0)

    def sizes(weights):
        return tf.add_n([tf.reduce_sum(weight) for weight in weights])

    for body in (step, sizes):
        strategy.run(body, args=(made(2),))  # loads the libraries that a run needs
    before = resident()

    def now():
        return (resident() - before) / (4 * FLOATS * VARIABLES)

    weights = made(FLOATS)
    for _ in range(2):
        strategy.run(step, args=(weights,))
    found = [now()]
    for weight in weights:
        weight.assign(2.0 * tf.ones([FLOATS]))  # writing does not count as reading
    for _ in range(2):
        strategy.run(step, args=(weights,))
    found.append(now())
    total = strategy.run(sizes, args=(weights,))  # compiling it reads no value on the host
    assert float(strategy.experimental_local_results(total)[0]) == 4.0 * FLOATS * VARIABLES
    found.append(now())
    assert all(weight.numpy()[-1] == 4.0 for weight in weights)
    return [*found, now()]
