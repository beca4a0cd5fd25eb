"""Devices that are not there, or cannot be used together."""

import pytest
import tensorflow as tf
from helpers.golden import shows

import replica_engine
from replica_engine import MirroredStrategy, logical_devices
from replica_engine._tf import thread_state
from replica_engine.errors import DeviceError


@shows(DeviceError.missing)
def test_more_devices_than_there_are():
    """On 8 CPU devices."""
    MirroredStrategy(["CPU:0", "CPU:1", "CPU:98", "CPU:99"])


@shows(DeviceError.missing, "gpu")
def test_gpus_where_there_are_none():
    """On a machine without GPUs."""
    MirroredStrategy(["GPU:0", "GPU:1"])


@shows(DeviceError.duplicated)
def test_a_device_twice():
    MirroredStrategy(["CPU:0", "CPU:1", "/device:CPU:0"])


@shows(DeviceError.mixed)
def test_a_cpu_and_a_gpu():
    MirroredStrategy(["CPU:0", "GPU:0"])


@shows(DeviceError.unreadable)
def test_a_number_of_devices():
    MirroredStrategy(2)


@shows(DeviceError.unreadable, "in_a_list")
def test_numbers_of_devices():
    MirroredStrategy(["CPU:0", "all"])


@shows(DeviceError.too_late)
def test_devices_asked_for_too_late():
    """TensorFlow has started with 8 CPU devices."""
    x = tf.ones([4])
    MirroredStrategy(replica_engine.logical_devices(16)).run(tf.square, args=(x,))


@pytest.fixture
def _before_the_start(monkeypatch):
    monkeypatch.setattr(thread_state, "started", lambda: False)


@pytest.mark.usefixtures("_before_the_start")
@shows(DeviceError.none_of_kind)
def test_logical_gpus_of_no_gpu():
    """On a machine without GPUs."""
    MirroredStrategy(logical_devices(2, "GPU"))


@shows(DeviceError.bad_kind)
def test_logical_tpus():
    logical_devices(2, kind="TPU")


@shows(DeviceError.no_cross_device_ops)
def test_the_name_of_a_library():
    MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops="nccl")
