"""Devices that are not there, or cannot be used together."""

import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy
from replica_engine.errors import DeviceError
from replica_engine.errors.device_errors import warn_one_replica


@pytest.fixture
def _one_cpu(monkeypatch):
    every = tf.config.list_logical_devices
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: every(kind)[: kind != "GPU"])


@shows(DeviceError, "missing")
def test_more_devices_than_there_are():
    """On 8 CPU devices."""
    MirroredStrategy(["CPU:0", "CPU:1", "CPU:98", "CPU:99"])


@shows(warn_one_replica)
@pytest.mark.usefixtures("_one_cpu")
def test_a_strategy_without_devices_on_one_cpu():
    strategy = MirroredStrategy()
    print(strategy)
