"""Datasets and their iterators, of which a program has taken batches."""

import numpy as np
import tensorflow as tf

from helpers.made_before import BOTH, TPU, made_before
from helpers.on_mirrored import locally

AUTO = tf.data.AUTOTUNE


def rows(count=12, batch=4):
    return tf.data.Dataset.range(count).map(lambda i: tf.cast(i, tf.float32)).batch(batch, drop_remainder=True)


@made_before(*BOTH)
def an_iterator():
    iterator = iter(rows().repeat())
    following = iterator.get_next
    assert following()[0] == 0.0

    def use(strategy):
        for first in (4.0, 8.0, 0.0):
            assert locally(strategy, strategy.run(lambda x: x[0], args=(following(),))) == [first, first]

    return use


@made_before(*BOTH)
def a_dataset_that_is_distributed():
    dataset = rows()
    assert len(list(dataset)) == 3

    def use(strategy):
        distribute = strategy.experimental_distribute_dataset
        found = [locally(strategy, strategy.run(tf.reduce_sum, args=(batch,))) for batch in distribute(dataset)]
        assert found == [[1.0, 5.0], [9.0, 13.0], [17.0, 21.0]]

    return use


@made_before(*BOTH)
def a_function_over_a_dataset():
    """Its loop is traced anew with replicas."""
    dataset, found = rows(), []

    @tf.function
    def of_all(start):
        so_far = start
        for x in dataset:
            so_far += (
                found[0].reduce("SUM", found[0].run(tf.reduce_sum, args=(x,)), None) if found else tf.reduce_sum(x)
            )
        return so_far

    assert of_all(tf.constant(0.0)) == 66.0

    def use(strategy):
        found[:] = [strategy]
        start = tf.zeros([of_all.experimental_get_tracing_count()])
        assert of_all(start)[0] == 2 * 66.0

    return use


@made_before(*BOTH)
def a_dataset_of_python_and_of_a_traced_function():
    scale = tf.Variable(1.0)
    scaled = tf.function(lambda x: x * scale)
    scaled(tf.constant(1.0))

    def numbers():
        for index in range(4):
            yield np.float32(index)

    dataset = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.float32))
    dataset = dataset.map(scaled, num_parallel_calls=AUTO).batch(2).prefetch(AUTO)
    assert [batch.numpy().tolist() for batch in dataset] == [[0.0, 1.0], [2.0, 3.0]]

    def use(strategy):
        scale.assign(2.0)
        distribute = strategy.experimental_distribute_dataset
        found = [locally(strategy, strategy.run(lambda x: x[0], args=(batch,))) for batch in distribute(dataset)]
        assert found == [[0.0, 2.0], [4.0, 6.0]]

    return use


@made_before(TPU)
def an_iterator_for_a_loop_on_the_devices():
    iterator = iter(rows(40, 2))
    assert next(iterator)[0] == 0.0

    def use(strategy):
        with strategy.scope():
            seen = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        strategy.run_steps(lambda _, x: seen.assign_add(tf.reduce_sum(x)), iterator, 2)
        assert float(seen) == 2 * 14.0  # each replica has the batches [2, 3] and [4, 5]

    return use
