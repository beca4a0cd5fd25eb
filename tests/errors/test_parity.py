"""Parity checks: numbers that differ between one device and N replicas, and checks that cannot be made."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy
from replica_engine.errors import DeviceError, ParityArgumentError, ParityError
from replica_engine.testing import check_parity
from replica_engine.testing.parity import settings


@shows(ParityError.different)
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


@shows(ParityArgumentError.not_checkable)
def test_a_layer_to_check():
    check_parity(keras.layers.Dense(1, name="hidden"), np.ones([8, 4]))


@shows(ParityArgumentError.bad_number)
def test_no_steps():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]), steps=0)


@shows(ParityArgumentError.bad_tolerance)
def test_a_negative_tolerance():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]), rtol=-1e-4)


@shows(ParityArgumentError.bad_reduction)
def test_an_unknown_reduction_of_results():
    x = np.ones([8, 4])
    check_parity(tf.reduce_max, x, strategies="MirroredStrategy", reduction="max")


@shows(ParityArgumentError.unknown_strategy)
def test_an_unknown_strategy():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]), strategies=["OneDeviceStrategy"])


@shows(ParityArgumentError.other_size)
def test_a_strategy_of_another_size():
    strategy = MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]), strategies=[strategy])


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


@shows(ParityArgumentError.not_called_so)
def test_a_step_of_other_arguments():
    def step(x, y, z, weights):
        return x + y + z

    check_parity(step, (np.ones([8]), np.ones([8])), strategies="MirroredStrategy")


@shows(ParityArgumentError.not_called_so, "forgotten")
def test_a_part_of_the_batch_that_was_forgotten():
    w = tf.Variable([1.0], name="w")

    def step(w, x, y):
        return tf.reduce_mean((x * w - y) ** 2)

    check_parity(step, (np.ones([8]),), w, strategies="MirroredStrategy")


@shows(ParityArgumentError.bad_variables)
def test_targets_in_the_place_of_the_variables():
    """Written like `fit`."""

    def step(x, y):
        return tf.reduce_mean((x - y) ** 2)

    x, y = np.ones([8, 4], "float32"), np.ones([8, 4], "float32")
    check_parity(step, x, y, strategies="MirroredStrategy")


@shows(ParityArgumentError.bad_call)
def test_a_misspelt_argument():
    check_parity(lambda x: 2 * x, np.ones([8]), replica=2)


@shows(ParityArgumentError.bad_call, "missing")
def test_a_model_without_data():
    check_parity(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), replicas=2)


@shows(ParityArgumentError.bad_call, "other")
def test_an_argument_of_the_other_form():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_parity(model, np.ones([8, 4]), reduction="sum")


@shows(ParityArgumentError.no_targets)
def test_a_compiled_model_without_targets():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    check_parity(model, np.ones([8, 4]), strategies="MirroredStrategy")


@shows(ParityArgumentError.not_passed)
def test_variables_that_were_not_passed():
    w, count = tf.Variable(1.0, name="w"), tf.Variable(0, name="count")

    def step(x):
        w.assign_sub(0.1 * tf.reduce_mean(x))
        count.assign_add(1)

    check_parity(step, np.ones([8], "float32"), strategies="MirroredStrategy")


@shows(ParityArgumentError.bad_variables, "model")
def test_a_model_in_the_place_of_the_variables():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    check_parity(lambda model, x: model(x), np.ones([8, 4]), [model], strategies="MirroredStrategy")


@shows(ParityArgumentError.nothing_compared)
def test_a_step_without_numbers():
    def step(x):
        return None

    check_parity(step, np.ones([8]), strategies="MirroredStrategy")
