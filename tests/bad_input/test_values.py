"""Values that cannot be passed to replicas, reduced or joined, and tensors without a value."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, MultiWorkerMirroredStrategy, accumulate, split_batch
from replica_engine.errors import ReplicaValueError


def test_a_distributed_value_in_another(tpu):
    make = tpu.experimental_distribute_values_from_function
    ids = make(lambda _: make(lambda context: tf.constant(context.replica_id_in_sync_group)))
    with pytest.raises(ReplicaValueError, match="is a distributed value whose components are distributed"):
        tpu.run(tf.square, args=(ids,))


def test_a_gradient_that_is_none(threads):
    with threads.scope():
        used, unused = tf.Variable(2.0), tf.Variable(3.0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = used * x
        gradients = tape.gradient(loss, [used, unused])
        return tf.distribute.get_replica_context().all_reduce("SUM", gradients)

    with pytest.raises(ReplicaValueError, match="A tape gives None for a variable that the loss does not"):
        threads.run(step, args=(tf.constant(1.0),))


@pytest.mark.parametrize(
    ("autograph", "fn", "value", "error"),
    [
        (True, lambda part: np.exp(part), [1.0, 2.0], NotImplementedError),
        (False, lambda x: x if x > 0.0 else 0.0, 1.0, tf.errors.OperatorNotAllowedInGraphError),
    ],
    ids=["a function of NumPy that is written in C", "a condition without AutoGraph"],
)
def test_the_value_of_a_tensor_in_a_function(threads, autograph, fn, value, error):
    step = tf.function(lambda x: threads.run(fn, args=(x,)), autograph=autograph)
    with pytest.raises(error) as caught:
        step(tf.constant(value))
    assert "function or by TPUStrategy: while it is traced, a tensor" in str(caught.value.__notes__)


def test_a_python_number_without_autograph(tpu):
    @tf.autograph.experimental.do_not_convert
    def step(x):
        return float(x) + 1.0

    with pytest.raises(TypeError) as caught:
        tpu.run(step, args=(tf.constant(1),))
    assert "function or by TPUStrategy: while it is traced, a tensor" in str(caught.value.__notes__)
    assert "Write tf.cast(x, tf.float32)" in str(caught.value.__notes__)


def test_the_value_of_a_variable(tpu, threads):
    with tpu.scope():
        weight = tf.Variable(1.0)
    with pytest.raises(NotImplementedError) as caught:
        tpu.run(lambda x: x * weight.numpy(), args=(tf.constant(1.0),))
    assert "function or by TPUStrategy: while it is traced, no value of" in str(caught.value.__notes__)
    with threads.scope():
        weight = tf.Variable(1.0)
    with pytest.raises(NotImplementedError) as caught:
        tf.function(lambda x: threads.run(lambda part: part * np.exp(weight), args=(x,)))(tf.constant(1.0))
    assert "A NumPy function asks for the value of a variable" in str(caught.value.__notes__)


def test_arguments_of_another_kind():
    with pytest.raises(ReplicaValueError, match="The first argument must be the strategy that the replicas"):
        split_batch(["CPU:0", "CPU:1"], np.ones([8, 4], "float32"))
    with pytest.raises(ReplicaValueError, match="concurrent must be True or False"):
        MirroredStrategy(["CPU:0", "CPU:1"], concurrent="yes")
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
