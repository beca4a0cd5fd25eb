"""Programs on the replica threads of a MirroredStrategy, and what each replica gets."""

import inspect

import numpy as np
import tensorflow as tf

FORMS = ("graph", "eager")  # the function that replicas run is traced, or runs as Python


def context():
    return tf.distribute.get_replica_context()


def replica_id():
    return context().replica_id_in_sync_group


def index():
    """The replica's id as a Python number, also while a graph is built; `None` where one graph is that of all."""
    number = tf.get_static_value(replica_id())
    return None if number is None else int(number)


def line_of(text):
    """The number of the first line with some text in the file of the caller."""
    with open(inspect.stack()[1].filename) as file:
        return next(number for number, line in enumerate(file, start=1) if text in line)


def total(x, op="SUM"):
    return context().all_reduce(op, x)


def shares(strategy, rows):
    """A distributed value: each replica has an equal share of the rows."""
    parts = np.split(np.asarray(rows, np.float32), strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


def numbered(strategy, first=1.0):
    """A distributed value: replica i has the number `first + i`."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(first + context.replica_id_in_sync_group)
    )


def locally(strategy, value):
    """What each replica has of a value, as plain values."""

    def plain(leaf):
        return leaf.numpy().tolist() if hasattr(leaf, "numpy") else leaf

    return [tf.nest.map_structure(plain, each[0]) for each in strategy.experimental_local_results([value])]


def run(strategy, body, *args, form="graph"):
    """What each replica returns, as plain values."""
    return locally(strategy, stepping(strategy, body, form)(*args))


def stepping(strategy, body, form="graph"):
    """A step that runs the body on all replicas."""

    def step(*args):
        return strategy.run(body, args=args)

    return tf.function(step) if form == "graph" else step
