"""The names of 2018."""

import tensorflow as tf
from helpers.golden import shows

from replica_engine.compat.contrib import TPUStrategy
from replica_engine.errors import ContribError


@shows(ContribError.bad_aggregation)
def test_an_aggregation_that_is_none():
    distribution = TPUStrategy(num_cores=2)

    def tower_fn(x):
        return 2.0 * x

    doubled = distribution.call_for_each_tower(tower_fn, tf.constant(1.0))
    distribution.reduce("MEDIAN", doubled, destinations="/device:CPU:0")


@shows(ContribError.none_in_tower_context)
def test_an_output_without_an_aggregation():
    distribution = TPUStrategy(num_cores=2)
    with distribution.scope():
        iterator = distribution.distribute_dataset(
            lambda: tf.data.Dataset.range(8).batch(2, drop_remainder=True)
        ).make_one_shot_iterator()

    def step_fn(context, inputs):
        def tower_fn(x):
            context.set_last_step_output("loss", tf.reduce_sum(x))

        distribution.call_for_each_tower(tower_fn, inputs)

    distribution.run_steps_on_dataset(step_fn, iterator, iterations=2)


@shows(ContribError.bad_destination)
def test_a_destination_that_is_not_the_host():
    distribution = TPUStrategy(num_cores=2)
    distribution.broadcast(tf.constant(1.0), destinations="/device:TPU:0")


@shows(ContribError.no_host)
def test_a_second_host():
    distribution = TPUStrategy(num_cores=2)
    distribution.get_host_cpu_device(1)
