"""Parity checks: numbers that differ between one device and N replicas, and checks that cannot be made."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine.errors import DeviceError, ParityArgumentError, ParityError
from replica_engine.testing import check_parity, parity


@shows(ParityError)
def test_a_loss_that_is_no_mean():
    """Replicas average the largest errors of their rows."""

    def largest(y, outputs):
        return tf.reduce_max(tf.abs(y - outputs))

    ones = keras.layers.Dense(1, kernel_initializer="ones", name="out")
    model = keras.Sequential([keras.Input((2,)), ones], name="small")
    model.compile("sgd", largest)
    x = np.arange(16, dtype="float32").reshape(8, 2)
    report = check_parity(model, x, np.zeros([8, 1]), steps=1, strategies="MirroredStrategy")
    report.raise_if_different()


@shows(ParityArgumentError, "unknown_strategy")
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

    monkeypatch.setattr(parity, "logical_devices", none)
    monkeypatch.setattr(parity, "compiled_strategy", none)


@pytest.mark.usefixtures("_one_device_without_jax")
@shows(ParityArgumentError, "nothing_to_compare")
def test_no_strategy_can_run():
    """Where TensorFlow has started with one device, and so has jax."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]))


@shows(ParityArgumentError, "no_rows")
def test_data_without_rows():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([0, 4]), strategies="MirroredStrategy")


@shows(ParityArgumentError, "no_model")
def test_a_step_of_ones_own():
    def step(x, y):
        return tf.reduce_mean((x - y) ** 2)

    check_parity(step, (np.ones([8]), np.ones([8])), strategies="MirroredStrategy")


@shows(ParityArgumentError)
def test_a_number_of_steps_that_is_none():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]), steps=0)
