"""Device loops: what `run_steps` cannot take, and what it adds to what ends its inputs."""

import tensorflow as tf
from helpers.golden import shows

from replica_engine import TPUStrategy
from replica_engine.errors import InputsError


@shows(InputsError, "no_step")
def test_a_step_without_the_context():
    strategy = TPUStrategy(num_cores=2)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).batch(8))

    def step(x):
        return tf.reduce_sum(x)

    strategy.run_steps(step, iter(batches), iterations=8)


@shows("note_no_context")
def test_a_step_that_takes_its_context_for_a_part_of_the_batch():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices((tf.zeros([64]), tf.zeros([64]))).batch(8)
    batches = strategy.experimental_distribute_dataset(dataset)

    def step(x, y):
        return tf.reduce_sum((x - y) ** 2)

    strategy.run_steps(step, iter(batches), iterations=8)
