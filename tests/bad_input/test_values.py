"""Values that cannot be passed to replicas, reduced or joined, and tensors without a value."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy, accumulate, split_batch
from replica_engine.errors import ReplicaValueError


def test_a_distributed_value_in_another():
    strategy = TPUStrategy(num_cores=2)

    def replica_id(context):
        return tf.constant(context.replica_id_in_sync_group)

    def all_ids(context):
        return strategy.experimental_distribute_values_from_function(replica_id)

    ids = strategy.experimental_distribute_values_from_function(all_ids)
    with pytest.raises(ReplicaValueError, match="is a distributed value whose components are distributed"):
        strategy.run(tf.square, args=(ids,))


def test_a_gradient_that_is_none():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        used, unused = tf.Variable(2.0), tf.Variable(3.0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = used * x
        gradients = tape.gradient(loss, [used, unused])
        return tf.distribute.get_replica_context().all_reduce("SUM", gradients)

    with pytest.raises(ReplicaValueError, match="A tape gives None for a variable that the loss does not"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_a_sum_of_a_python_number():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def count():
        return 1.0

    with pytest.raises(ReplicaValueError, match="0 is not defined: it is one value for all replicas, not one"):
        strategy.reduce("SUM", strategy.run(count), axis=None)


def test_a_sum_of_unequal_parts_of_a_batch():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def part(context):
        return tf.ones([2 - context.replica_id_in_sync_group])

    parts = strategy.experimental_distribute_values_from_function(part)
    with pytest.raises(ReplicaValueError, match="The values of the replicas have different shapes"):
        strategy.reduce("SUM", parts, axis=None)


def test_a_function_of_numpy_that_is_written_in_c():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def step(x):
        return strategy.run(lambda part: np.exp(part), args=(x,))

    with pytest.raises(NotImplementedError) as caught:
        step(tf.constant([1.0, 2.0]))
    assert "function or by TPUStrategy: while it is traced, a tensor" in str(caught.value.__notes__)


def test_a_condition_without_autograph():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def rectified(x):
        return x if x > 0.0 else 0.0

    @tf.function(autograph=False)
    def step(x):
        return strategy.run(rectified, args=(x,))

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError) as caught:
        step(tf.constant(1.0))
    assert "function or by TPUStrategy: while it is traced, a tensor" in str(caught.value.__notes__)


def test_a_python_number_without_autograph():
    strategy = TPUStrategy(num_cores=2)

    @tf.autograph.experimental.do_not_convert
    def step(x):
        return float(x) + 1.0

    with pytest.raises(TypeError) as caught:
        strategy.run(step, args=(tf.constant(1),))
    assert "function or by TPUStrategy: while it is traced, a tensor" in str(caught.value.__notes__)
    assert "Write tf.cast(x, tf.float32)" in str(caught.value.__notes__)


def test_the_array_of_a_variable():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        weight = tf.Variable(1.0)

    def step(x):
        return x * weight.numpy()

    with pytest.raises(NotImplementedError) as caught:
        strategy.run(step, args=(tf.constant(1.0),))
    assert "function or by TPUStrategy: while it is traced, no value of" in str(caught.value.__notes__)


def test_a_function_of_numpy_of_a_variable():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(1.0)

    @tf.function
    def step(x):
        return strategy.run(lambda part: part * np.exp(weight), args=(x,))

    with pytest.raises(NotImplementedError) as caught:
        step(tf.constant(1.0))
    assert "A NumPy function asks for the value of a variable" in str(caught.value.__notes__)


def test_devices_in_the_place_of_a_strategy():
    with pytest.raises(ReplicaValueError, match="The first argument must be the strategy that the replicas"):
        split_batch(["CPU:0", "CPU:1"], np.ones([8, 4], "float32"))


def test_a_word_for_yes():
    with pytest.raises(ReplicaValueError, match="concurrent must be True or False"):
        MirroredStrategy(["CPU:0", "CPU:1"], concurrent="yes")


def test_a_word_that_is_not_known():
    with pytest.raises(ReplicaValueError, match="graph_optimizer must be"):
        MirroredStrategy(["CPU:0", "CPU:1"], graph_optimizer="none")


@pytest.mark.parametrize("kind", [MirroredStrategy, MultiWorkerMirroredStrategy])
def test_an_argument_of_another_strategy(kind):
    with pytest.raises(ReplicaValueError, match=r"takes no distribution=.*replica_engine.TPUStrategy\(distribution="):
        kind(distribution="fsdp")
    with pytest.raises(ReplicaValueError, match="takes no num_cores="):
        kind(num_cores=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cores'"):
        kind(cores=2)


def test_no_gradient_for_the_first_part():
    weight = tf.Variable(2.0)
    parts = []

    def gradient(x):
        parts.append(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * weight) if len(parts) > 1 else tf.reduce_sum(x)
        return tape.gradient(loss, weight)

    with pytest.raises(ReplicaValueError, match="A result of the function for `accumulate` is None for the"):
        tf.function(lambda x: accumulate(gradient, (x,), steps=2))(tf.ones([4]))
