"""Initial values of variables that are large enough to be made in parts."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import made, on_two_axes, peak_of_random_numbers

import replica_engine
from replica_engine.strategies import device_variables

SHAPES = [(2048, 1024), (512, 4096)]  # 8 MiB: divided by rows, by columns


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("initializer", ["ones", "glorot_uniform", "he_normal", "random_normal"])
def test_they_are_those_of_one_device(shape, initializer):
    one = made(replica_engine.TPUStrategy(num_cores=1), shape, initializer)
    for how in ({"num_cores": 4}, {"num_cores": 4, "cores_per_replica": 2}):
        strategy = replica_engine.TPUStrategy(distribution="fsdp", **how)
        before = replica_engine.xla.counts()
        variable = made(strategy, shape, initializer)
        assert (replica_engine.xla.counts() - before).launches == 1  # no value of the host was sent
        parts = how.get("cores_per_replica", 4)
        assert strategy.memory().variables == [variable.numpy().nbytes // parts] * 4
        np.testing.assert_allclose(variable.numpy(), one.numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 250_002), (20_002, 50)])
def test_pieces_need_not_divide_evenly_nor_groups_of_four_numbers(shape, monkeypatch):
    """Philox gives four numbers at a time: a piece of rows has no whole number of groups of 50."""
    monkeypatch.setattr(device_variables, "LARGE", 1)
    for initializer in ("glorot_uniform", "he_normal"):
        one = made(replica_engine.TPUStrategy(num_cores=1), shape, initializer)
        divided = made(replica_engine.TPUStrategy(num_cores=2, distribution="fsdp"), shape, initializer)
        np.testing.assert_allclose(divided.numpy(), one.numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", [(512, 4096), (2048, 16, 64), (1022, 2052)])
@pytest.mark.parametrize("initializer", ["glorot_uniform", "he_normal"])
def test_they_are_divided_over_two_axes(shape, initializer):
    one = made(replica_engine.TPUStrategy(num_cores=1), shape, initializer)
    divided = made(on_two_axes("model", *[None] * (len(shape) - 2), "batch"), shape, initializer)
    np.testing.assert_allclose(divided.numpy(), one.numpy(), atol=1e-6)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak of a process")
@pytest.mark.parametrize(
    ("shape", "divided", "most"),
    [((8192, 4096), "rows", 1.4), ((4096, 8192), "columns", 1.4), ((8192, 4096), "both", 2.2)],
)
def test_random_numbers_take_the_memory_of_the_variable_once(shape, divided, most, programs):
    """Twice, if both dimensions are divided."""
    assert programs.value(peak_of_random_numbers, shape, divided == "both") < most


def test_what_cannot_be_made_in_parts_is_made_on_the_host():
    """A value with a state, and one of which the shape is not known before."""
    strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
    numbers = iter([3.0])
    with strategy.scope():
        drawn = tf.Variable(lambda: tf.random.normal([2048, 1024]))
        seeded = made(strategy, SHAPES[0], keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1)))
        once = tf.Variable(lambda: tf.fill([2048, 1024], next(numbers)))
    assert 0.9 < float(tf.math.reduce_std(drawn)) < 1.1
    assert 0.04 < float(tf.math.reduce_std(seeded)) < 0.06
    assert float(once[0, 0]) == 3.0
    assert len(set(strategy.memory().variables)) == 1


def test_a_large_variable_that_is_read_whole_is_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr("replica_engine.xla.state.device_value._WORTH_A_WORD", 1 << 23)
    strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")
    variable = made(strategy, SHAPES[0], "ones")
    assert "is read whole" not in caplog.text
    for _ in range(2):
        strategy.run(lambda: variable.assign_add(tf.ones(SHAPES[0])))
        variable.numpy()
    assert caplog.text.count("is read whole") == 1
