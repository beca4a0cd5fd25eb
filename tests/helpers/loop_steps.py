"""Steps for the tests of device loops, batches for them, and ways to run them."""

import concurrent.futures
import threading

import numpy as np
import tensorflow as tf

from replica_engine import xla

FIRST, SUM = tf.VariableAggregation.ONLY_FIRST_REPLICA, tf.VariableAggregation.SUM

THREAD = "replica_engine: inputs"

PAIR = (np.float32(1.0), np.float32(2.0))

# Batches.


def numbers(count, start=0):
    """That many batches, 0.0, 1.0, ..., each the same on all replicas."""
    return [np.float32(start + number) for number in range(count)]


def floats(count):
    """The same batches as a dataset."""
    return tf.data.Dataset.range(count).map(lambda i: tf.cast(i, tf.float32))


class Counted:
    """An iterator over numbers that counts how many were taken."""

    def __init__(self, count):
        self.taken = 0
        self._count = count

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self._count:
            raise StopIteration
        self.taken += 1
        return np.float32(self.taken - 1)


class GetNext:
    """An iterator of TensorFlow 1."""

    def __init__(self, dataset):
        self._iterator = iter(dataset)

    def get_next(self):
        return self._iterator.get_next()


def then_fail(batches, error):
    yield from batches
    raise error


# Steps.


class Noting:
    """A step that remembers its inputs, scalars on each replica, and how often it ran.

    Args:
        replicas: the fixture that has the strategy.
        most: the largest number of steps.
    """

    def __init__(self, replicas, most=20):
        self.replicas = replicas
        self.strategy = replicas.strategy
        self.seen = replicas.variable(tf.zeros([most]), SUM, on_read=True)
        self.count = replicas.variable(0, FIRST)

    def step(self, context, x):
        self.seen.assign(tf.tensor_scatter_nd_update(self.seen, [[self.count]], [tf.cast(x, tf.float32)]))
        self.count.assign_add(1)
        context.set_last_step_output("x", x)

    def run(self, iterator, iterations, **options):
        return self.strategy.run_steps(self.step, iterator, iterations, **options)

    @property
    def inputs(self):
        """The inputs of the steps so far: one list if all replicas had the same, otherwise one for each replica."""
        count = int(self.count.numpy())
        each = [one[:count] for one in self.replicas.components(self.seen)]
        return each[0] if all(one == each[0] for one in each) else each


def make_total(replicas):
    """A variable, and a step that adds its input to it."""
    total = replicas.variable(0.0, SUM)

    def step(context, x):
        total.assign_add(x)
        context.set_last_step_output("x", x)

    return total, step


def replica_context():
    return tf.distribute.get_replica_context()


def hosted(fn, returns=None):
    """`outside_compilation` of a function whose results are known."""
    return lambda *args: xla.outside_compilation(xla.returns(returns)(fn), *args)


# Runs.


def looped(replicas, context, step, batches):
    """Runs a step for each batch, in one of the contexts."""
    if context == "replica":
        return replicas.strategy.run_steps(step, batches, len(batches))
    return replicas.strategy.extended.experimental_run_steps_on_iterator(step, batches, len(batches))


def at_once(*functions):
    """Calls functions on threads of their own that start together; their results, or the first error."""
    start = threading.Barrier(len(functions))

    def call(fn):
        start.wait(60)
        return fn()

    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(timeout=500) for each in [pool.submit(call, fn) for fn in functions]]
