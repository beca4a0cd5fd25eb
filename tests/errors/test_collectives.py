"""Cross-replica operations that cannot be done as asked."""

import keras
import numpy as np
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.errors import CollectiveError, may_wait_forever
from replica_engine.keras import replicate_model


@shows(CollectiveError.unknown_reduction)
def test_a_product_over_replicas():
    def step(x):
        return xla.all_reduce(x, "PRODUCT")

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(CollectiveError.unknown_reduction, "average")
def test_an_average_over_replicas():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("AVG", x)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(CollectiveError.unknown_reduction, "maximum")
def test_a_maximum_over_replicas_on_threads():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("MAXIMUM", x)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(CollectiveError.no_axis, "of_scalars")
def test_a_gathering_of_losses():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    losses = strategy.run(tf.square, args=(tf.constant(2.0),))
    strategy.gather(losses, axis=0)


@shows(CollectiveError.wrong_dtype)
def test_a_sum_of_truth_values():
    def step(x):
        return xla.cross_replica_sum(x > 1.0)

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(CollectiveError.host_only)
def test_a_gathering_of_text():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        names = tf.strings.as_string(x)
        return tf.distribute.get_replica_context().all_gather(names, axis=0)

    strategy.run(step, args=(tf.constant([1, 2]),))


@shows(CollectiveError.apart)
def test_an_operation_in_a_model_whose_shares_are_of_two_sizes():
    """It is caught: each replica then takes the whole batch of 7."""

    class Total(keras.layers.Layer):
        def call(self, x):
            if not tf.distribute.has_strategy():
                return x
            return x / tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(x))

    x = np.ones([7, 2], "float32")
    model = keras.Sequential([keras.Input((2,)), Total(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fast = replicate_model(model, strategy=TPUStrategy(num_cores=2))
    print(sorted(fast.train_on_batch(x, x[:, :1], return_dict=True)))


@shows(CollectiveError.bad_groups)
def test_groups_that_leave_a_replica_out():
    def step(x):
        return xla.cross_replica_sum(x, groups=[[0, 1]])

    xla.replicate(step, inputs=[[tf.constant(float(i))] for i in range(3)])


@shows(CollectiveError.bad_groups, "of_a_table")
def test_a_table_in_the_place_of_groups():
    strategy = TPUStrategy(num_cores=2)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)

    def step(x):
        return xla.cross_replica_sum(x, table)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(CollectiveError.unequal_groups)
def test_groups_of_two_sizes():
    def step(x):
        return xla.all_gather(x, groups=[[0, 1], [2]])

    xla.replicate(step, inputs=[[tf.zeros([2])] for _ in range(3)])


@shows(CollectiveError.bad_pairs)
def test_a_replica_that_receives_twice():
    def step(x):
        return xla.collective_permute(x, pairs=[(0, 1), (1, 1)])

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(CollectiveError.no_axis)
def test_a_dimension_that_is_not_there():
    def step(x):
        return xla.all_gather(x, axis=1)

    xla.replicate(step, inputs=[[tf.zeros([4])], [tf.zeros([4])]])


@shows(CollectiveError.not_divisible)
def test_a_dimension_that_cannot_be_split():
    def step(x):
        return xla.all_to_all(x, split_axis=0, concat_axis=1)

    xla.replicate(step, inputs=[[tf.zeros([3, 2])], [tf.zeros([3, 2])]])


@shows(CollectiveError.unknown_shape)
def test_a_gathering_of_what_a_mask_leaves():
    def step(x):
        return xla.all_gather(tf.boolean_mask(x, x > 1.0))

    xla.replicate(step, inputs=[[tf.zeros([4])], [tf.zeros([4])]])


@shows(CollectiveError.not_by_all)
def test_an_operation_in_a_branch_on_the_replica_id():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        context = tf.distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            x = context.all_reduce("SUM", x)
        return x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(CollectiveError.not_by_all, "in_a_loop")
def test_an_operation_in_a_loop_up_to_the_replica_id():
    strategy = TPUStrategy(num_cores=4)

    def step(x):
        for _ in tf.range(xla.replica_id() // 2):
            x = xla.cross_replica_sum(x)
        return x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(may_wait_forever)
def test_an_operation_in_a_branch_on_a_loss():
    strategy = TPUStrategy(num_cores=2)
    losses = strategy.experimental_distribute_values_from_function(lambda context: tf.constant(1.0))

    def step(loss):
        if loss < 10.0:
            loss = tf.distribute.get_replica_context().all_reduce("MEAN", loss)
        return loss

    strategy.run(step, args=(losses,))


@shows(CollectiveError.growing_in_loop)
def test_a_gathering_in_a_loop_whose_shapes_are_left_open():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        for _ in tf.range(3):
            tf.autograph.experimental.set_loop_options(shape_invariants=[(x, tf.TensorShape(None))])
            x = tf.distribute.get_replica_context().all_gather(x, axis=0)
        return x

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))
