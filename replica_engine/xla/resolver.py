"""The platform to run on, as a cluster resolver of `tf.distribute`."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.pjrt.devices import device_group
from replica_engine.pjrt.group import DeviceGroup


class PjrtClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """The devices of one PJRT platform on this machine.

    Args:
        platform: "tpu", "gpu" or "cpu"; None takes the first of these that the machine has.

    Raises:
        DeviceError: the platform is unknown, or has no device here.

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
        """The devices. On the CPU platform there are as many as cores."""
        return self._devices

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """The cluster: empty, since there is only this machine."""
        return tf.train.ClusterSpec({})

    def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
        """The address of the master: this process."""
        return ""

    def num_accelerators(self, task_type: Any = None, task_id: Any = None, config_proto: Any = None) -> dict[str, int]:
        """The number of devices by kind: `{"CPU": 2}`."""
        return {self.platform.upper(): self._devices.size}

    @property
    def environment(self) -> str:
        """The environment: empty, since this is not Google's internal one."""
        return ""


class TPUSystemMetadata(NamedTuple):
    """The devices of a platform.

    Attributes:
        num_cores: the number of devices.
        num_hosts: the number of machines.
        num_of_cores_per_host: the number of devices of each machine.
        topology: None, since PJRT does not know it.
        devices: the names of the devices: "CPU:0", ...
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: list[str]


def get_tpu_system_metadata(resolver: PjrtClusterResolver | None = None) -> TPUSystemMetadata:
    """The devices of a platform.

    Args:
        resolver: the resolver of the platform; None takes the best platform.

    Example:
        >>> from replica_engine import xla
        >>> metadata = xla.get_tpu_system_metadata(xla.PjrtClusterResolver("cpu"))
        >>> metadata.num_cores == len(metadata.devices), metadata.num_hosts
        (True, 1)
    """
    devices = (resolver or PjrtClusterResolver()).devices
    return TPUSystemMetadata(devices.size, 1, devices.size, None, list(devices.names))
