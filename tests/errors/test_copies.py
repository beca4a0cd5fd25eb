"""What `MirroredStrategy(trace_once=...)` cannot copy from replica 0 to the others."""

import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy
from replica_engine.errors import TraceOnceError, traced_each


@shows(TraceOnceError.not_copied)
def test_a_sync_point_in_a_branch_after_a_sync_point():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], trace_once=True)

    def replica_step(x):
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce("MEAN", x)
        return tf.cond(mean > 0.0, lambda: context.all_reduce("SUM", x), lambda: x)

    @tf.function
    def step(x):
        return strategy.run(replica_step, args=(x,))

    step(tf.constant(1.0))


@shows(TraceOnceError.with_variable)
def test_a_variable_that_is_made_in_the_step():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], trace_once=True)
    weights = []

    def replica_step(x):
        if not weights:
            weights.append(tf.Variable(2.0))
        return tf.py_function(lambda x: x + 1.0, [weights[0] * x], tf.float32)

    @tf.function
    def step(x):
        return strategy.run(replica_step, args=(x,))

    step(tf.constant(1.0))


@shows(TraceOnceError.kept)
def test_a_tensor_in_a_list():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], trace_once=True)

    @tf.function
    def step(x):
        losses = []
        strategy.run(lambda x: losses.append(x * 2.0), args=(x,))
        return losses[0] + losses[-1]

    step(tf.constant(1.0))


@shows(TraceOnceError.own_gradient)
def test_a_tape_outside_and_a_gradient_inside():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], trace_once=True)

    @tf.custom_gradient
    def square(x):
        return x * x, lambda upstream: 2.0 * x * upstream

    @tf.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(square, args=(x,)), axis=None)

    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        total = step(x * 1.0)
    tape.gradient(total, x)


@shows(TraceOnceError.differs)
def test_a_counter_in_python():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], trace_once="checked")
    calls = []

    def replica_step(x):
        calls.append(x)
        return x * float(len(calls))

    @tf.function
    def step(x):
        return strategy.run(replica_step, args=(x,))

    step(tf.constant(1.0))


@shows(traced_each)
def test_the_replica_id_in_python():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], trace_once=True)

    def replica_step(x):
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return x if replica == 0 else -x

    @tf.function
    def step(x):
        return strategy.run(replica_step, args=(x,))

    print(step(tf.constant(1.0)))
