"""Devices that are not there, or cannot be used together."""

from helpers.golden import shows

from replica_engine import MirroredStrategy
from replica_engine.errors import DeviceError


@shows(DeviceError.missing)
def test_more_devices_than_there_are():
    """On 8 CPU devices."""
    MirroredStrategy(["CPU:0", "CPU:1", "CPU:98", "CPU:99"])
