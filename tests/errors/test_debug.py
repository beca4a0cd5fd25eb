"""Programs that go wrong without an error, in debug mode."""

import tensorflow as tf
from helpers.golden import shows

import replica_engine
from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import DebugError


@shows(DebugError)
def test_the_first_infinity():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    probabilities = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([0.5, float(context.replica_id_in_sync_group == 0)])
    )

    def entropy(p):
        return -tf.reduce_sum(p * tf.math.log(p))

    with replica_engine.debug():
        strategy.run(entropy, args=(probabilities,))


@shows(DebugError, "copies")
def test_a_gradient_that_was_not_reduced():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        weight = tf.Variable(1.0, name="weight")
    shards = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([1.0, 2.0]) * float(context.replica_id_in_sync_group)
    )

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((weight * x - 1.0) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    with replica_engine.debug():
        strategy.run(step, args=(shards,))


@shows(DebugError, "twice")
def test_a_sum_that_is_summed_again():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(gradient):
        context = tf.distribute.get_replica_context()
        gradient = context.all_reduce("MEAN", gradient)
        return context.all_reduce("SUM", 0.1 * gradient)

    with replica_engine.debug():
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(DebugError, "mean")
def test_a_mean_of_shards_of_unequal_size():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    shards = strategy.experimental_distribute_values_from_function(
        lambda context: tf.range(2.0 + float(context.replica_id_in_sync_group))
    )
    with replica_engine.debug():
        losses = strategy.run(tf.reduce_mean, args=(shards,))
        strategy.reduce("MEAN", losses, axis=None)


@shows(DebugError, "tape")
def test_a_tape_around_a_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(1.0)
    with replica_engine.debug(), tf.GradientTape():
        strategy.run(lambda x: weight * x, args=(tf.constant([1.0, 2.0]),))


@shows("may_be_meant")
def test_a_reduction_whose_result_is_dropped():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(gradient):
        tf.distribute.get_replica_context().all_reduce("MEAN", gradient)
        return gradient

    with replica_engine.debug():
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows("may_be_meant", "batch")
def test_a_batch_for_each_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable([1.0, 1.0], aggregation=tf.VariableAggregation.MEAN)

    def step(x):
        weight.assign_sub(0.1 * x)

    with replica_engine.debug():
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows("may_be_meant", "random")
def test_dropout_that_is_the_same_on_all_replicas():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return tf.reduce_sum(tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2]))

    with replica_engine.debug():
        strategy.run(step, args=(tf.ones([8]),))
