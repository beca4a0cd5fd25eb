"""Parity checks: numbers that differ between one device and N replicas, and checks that cannot be made."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine.errors import DeviceError, ParityArgumentError, ParityError
from replica_engine.testing import check_parity
from replica_engine.testing.parity import settings


@shows(ParityError)
def test_gradients_that_are_summed():
    """The step sums over replicas the gradients of means."""
    w = tf.Variable([1.0, 2.0], name="w")

    def step(variables, x):
        (w,) = variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x * w - 3.0) ** 2)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * tf.distribute.get_replica_context().all_reduce("SUM", gradient))
        return loss

    x = np.ones([8, 2], "float32")
    report = check_parity(step, x, [w], replicas=2, steps=1, strategies="MirroredStrategy")
    report.raise_if_different()


@shows(ParityArgumentError.unknown_strategy)
def test_an_unknown_strategy():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]), strategies=["OneDeviceStrategy"])


@pytest.fixture
def _one_device_without_jax(monkeypatch):
    def none(replicas):
        raise DeviceError(
            f"{replicas} logical CPU devices were requested, but TensorFlow has already started with 1. Logical "
            "devices must be made before TensorFlow runs anything: call replica_engine.logical_devices"
            f"({replicas}) at the top of the program, before a strategy is made."
        )

    monkeypatch.setattr(settings, "_mirrored", none)
    monkeypatch.setattr(settings, "compiled_strategy", none)


@pytest.mark.usefixtures("_one_device_without_jax")
@shows(ParityArgumentError.nothing_to_compare)
def test_no_strategy_can_run():
    """Where TensorFlow has started with one device, and so has jax."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]))


@shows(ParityArgumentError.no_rows)
def test_data_without_rows():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([0, 4]), strategies="MirroredStrategy")


@shows(ParityArgumentError)
def test_a_step_of_other_arguments():
    def step(x, y, z, weights):
        return x + y + z

    check_parity(step, (np.ones([8]), np.ones([8])), strategies="MirroredStrategy")


@shows(ParityArgumentError.bad_variables)
def test_targets_in_the_place_of_the_variables():
    """Written like `fit`."""

    def step(x, y):
        return tf.reduce_mean((x - y) ** 2)

    x, y = np.ones([8, 4], "float32"), np.ones([8, 4], "float32")
    check_parity(step, x, y, strategies="MirroredStrategy")


@shows(ParityArgumentError.bad_variables, "model")
def test_a_model_in_the_place_of_the_variables():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    check_parity(lambda model, x: model(x), np.ones([8, 4]), [model], strategies="MirroredStrategy")
