"""Strategies in the style of 2018 for the tests of the contrib class, and the values on each of their towers."""

import numpy as np
import tensorflow as tf

from replica_engine import xla
from replica_engine.compat import contrib

NONE, SUM, MEAN = tf.VariableAggregation.NONE, tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA  # 2018's ONLY_FIRST_TOWER

HOST = "/device:CPU:0"


def named(value):
    """How a parameter is called in a test's name."""
    return getattr(value, "name", str(value))


def make(towers, steps_per_run=1):
    return contrib.TPUStrategy(xla.PjrtClusterResolver("cpu"), steps_per_run, num_cores=towers)


def variable(distribution, initial, aggregation=NONE, on_read=False):
    kind = tf.VariableSynchronization.ON_READ if on_read else tf.VariableSynchronization.AUTO
    with distribution.scope():
        return tf.Variable(initial, aggregation=aggregation, synchronization=kind, trainable=not on_read)


def spread(distribution, *values):
    """A distributed value with one number for each tower."""
    return distribution.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def each(distribution, value):
    """What each tower has of a value."""
    return [np.asarray(one).tolist() for one in distribution.unwrap(value)]


def merged(distribution, merge_fn, *args):
    """What each tower gets from a merge call, of arguments of its own."""

    def tower_fn(*args):
        return contrib.get_tower_context().merge_call(merge_fn, *args)

    return each(distribution, distribution.call_for_each_tower(tower_fn, *args))


# Data.


def numbers(count, batch=1):
    """Makes a dataset of the batches 0.0, 1.0, ..."""
    return lambda: tf.data.Dataset.range(count).map(lambda i: tf.cast(i, tf.float32)).batch(batch, drop_remainder=True)


def one_shot(distribution, dataset_fn):
    with distribution.scope():
        return distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()


def sums(distribution, count, batch=2):
    """The sums of batches of numbers, of each step and tower."""
    batches = np.arange(count).reshape(-1, distribution.num_towers, batch)
    return batches.sum(-1).tolist()
