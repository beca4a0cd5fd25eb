"""Measures how many copies of a strategy's variables a process has in memory, at several moments."""

import tensorflow as tf

import replica_engine
from benchmarks.fresh import resident

VARIABLES = 16
FLOATS = 1 << 20  # in each variable
REPLICAS = 2


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
