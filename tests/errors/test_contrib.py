"""The names of 2018."""

import tensorflow as tf
from helpers.golden import shows

from replica_engine.compat.contrib import TPUStrategy
from replica_engine.errors import ContribError


@shows(ContribError)
def test_an_aggregation_that_is_none():
    distribution = TPUStrategy(num_cores=2)

    def tower_fn(x):
        return 2.0 * x

    doubled = distribution.call_for_each_tower(tower_fn, tf.constant(1.0))
    distribution.reduce("MEDIAN", doubled, destinations="/device:CPU:0")
