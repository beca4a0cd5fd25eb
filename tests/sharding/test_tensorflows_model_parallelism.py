"""What TensorFlow documents of model parallelism in `tf.distribute.TPUStrategy`, as its own tests use it."""

import types

import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla

ASSIGNMENT = types.SimpleNamespace(num_cores_per_replica=2, num_replicas=2)


@pytest.fixture
def spmd():
    return replica_engine.TPUStrategy(
        experimental_device_assignment=ASSIGNMENT, experimental_spmd_xla_partitioning=True
    )


def sum_of(strategy, value):
    return strategy.reduce("SUM", value, axis=None)


def test_variables_and_ops_name_logical_devices():
    strategy = replica_engine.TPUStrategy(experimental_device_assignment=ASSIGNMENT)
    with strategy.scope():
        v = tf.Variable(2.0)
        with strategy.extended.experimental_logical_device(1):
            w = tf.Variable(3.0)

    @tf.function
    def f(x):
        context = tf.distribute.get_replica_context()
        with context.experimental_logical_device(0):
            y = v * x
        with context.experimental_logical_device(1):
            return w * y

    assert len(strategy.experimental_local_results(v)) == len(strategy.experimental_local_results(w)) == 2
    assert float(sum_of(strategy, strategy.run(f, args=(5.0,)))) == 60.0


def test_tensors_are_not_assigned_to_one_device_where_all_are_split(spmd):
    with pytest.raises(ValueError, match="experimental_spmd_xla_partitioning"):
        spmd.experimental_assign_to_logical_device(tf.constant([0, 1]), 0)


def test_a_split_input_and_checkpoints(spmd, tmp_path):
    rng = np.random.default_rng(0)
    one, two = (rng.normal(size=(16, 8)).astype("f") for _ in range(2))
    x = tf.constant(rng.normal(size=(32, 16)), tf.float32)
    with spmd.scope():
        w = tf.Variable(one)

    @tf.function
    def step(x):
        return spmd.experimental_split_to_logical_devices(x, [1, 2]) @ w

    checkpoint = tf.train.Checkpoint(w=w)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    w.assign(two)
    np.testing.assert_allclose(sum_of(spmd, spmd.run(step, args=(x,))), 2 * (x @ two), atol=1e-4)
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_allclose(sum_of(spmd, spmd.run(step, args=(x,))), 2 * (x @ one), atol=1e-4)


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_a_method_of_a_variable_is_a_step(spmd, method):
    with spmd.scope():
        w = tf.Variable(tf.ones([8, 4]))
    result = tf.function(lambda x: spmd.run(getattr(w, method), args=(x,)))(tf.fill([8, 4], 3.0))
    wanted = {"assign": 3.0, "assign_add": 4.0, "assign_sub": -2.0}[method]
    np.testing.assert_array_equal(sum_of(spmd, result), np.full([8, 4], 2 * wanted))
    np.testing.assert_array_equal(w.numpy(), np.full([8, 4], wanted))


def test_a_replicas_variable_has_one_for_each_logical_device(spmd):
    with spmd.scope():
        w = tf.Variable(lambda: tf.random.normal([4, 4]))
    assert [len(each.variables) for each in w.values] == [2, 2]
    for each in w.values[0].variables:
        np.testing.assert_array_equal(each, w.numpy())


def test_a_variable_is_read_outside_the_graph_of_a_step(spmd):
    with spmd.scope():
        v = tf.Variable(tf.ones([4, 4]))

    @tf.function
    def read():
        with tf.init_scope():
            return v.read_value()

    np.testing.assert_array_equal(spmd.reduce("MEAN", spmd.run(read), axis=None), np.ones([4, 4]))


@pytest.mark.parametrize("split", [False, True])
def test_the_host_gets_whole_values_once_a_replica(spmd, split):
    shapes = []

    @xla.returns(tf.TensorSpec([2, 2], tf.int64))
    def increment(x):
        shapes.append(tuple(x.shape))
        return x + 1

    @tf.function
    def step(x):
        if split:
            x = spmd.experimental_split_to_logical_devices(x, [1, 2])
        return xla.outside_compilation(increment, x + 1) + 1

    result = sum_of(spmd, spmd.run(step, args=(tf.zeros([2, 2], tf.int64),)))
    np.testing.assert_array_equal(result, np.full([2, 2], 6))
    assert shapes == [(2, 2), (2, 2)]
