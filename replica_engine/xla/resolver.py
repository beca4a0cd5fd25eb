"""Which platform to run on, in the form that `tf.distribute` has for it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine.pjrt.devices import device_group
from replica_engine.pjrt.group import DeviceGroup


class PjrtClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """The devices of one PJRT platform on this machine.

    Args:
        platform: "tpu", "gpu" or "cpu"; None takes the first of these that there is.

    Raises:
        DeviceError: no such platform, or no device of it.

    Example:
        >>> from replica_engine import xla
        >>> xla.PjrtClusterResolver("cpu").platform
        'cpu'
    """

    def __init__(self, platform: str | None = None):
        self._devices = device_group(platform)
        self.platform = self._devices.platform

    @property
    def devices(self) -> DeviceGroup:
        """The devices; of CPU devices as many as there are cores."""
        return self._devices

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Of one machine: empty."""
        return tf.train.ClusterSpec({})

    def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
        """The address of the master: this process."""
        return ""

    def num_accelerators(self, task_type: Any = None, task_id: Any = None, config_proto: Any = None) -> dict[str, int]:
        """The number of devices by kind: `{"CPU": 2}`."""
        return {self.platform.upper(): self._devices.size}

    @property
    def environment(self) -> str:
        """Empty: not Google's internal one."""
        return ""
