"""Cross-replica operations that cannot be done as asked."""

import tensorflow as tf
from helpers.golden import shows

from replica_engine import TPUStrategy, xla
from replica_engine.errors import CollectiveError
from replica_engine.errors.program_errors import may_wait_forever


@shows(CollectiveError.unknown_shape)
def test_a_gathering_of_what_a_mask_leaves():
    def step(x):
        return xla.all_gather(tf.boolean_mask(x, x > 1.0))

    xla.replicate(step, inputs=[[tf.zeros([4])], [tf.zeros([4])]])


@shows(CollectiveError, "not_by_all")
def test_an_operation_in_a_branch_on_the_replica_id():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        context = tf.distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            x = context.all_reduce("SUM", x)
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
