"""Which platform to run on, in the form that `tf.distribute` has for it."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class TPUSystemMetadata(NamedTuple):
    """What devices there are.

    Attributes:
        num_cores: how many devices.
        num_hosts: on how many machines.
        num_of_cores_per_host: how many devices each machine has.
        topology: None: PJRT has none to say.
        devices: their names: "CPU:0", ...
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: list[str]


def get_tpu_system_metadata(resolver: PjrtClusterResolver | None = None) -> TPUSystemMetadata:
    """What devices there are.

    Args:
        resolver: of which platform; None takes the best.

    Example:
        >>> from replica_engine import xla
        >>> metadata = xla.get_tpu_system_metadata(xla.PjrtClusterResolver("cpu"))
        >>> metadata.num_cores == len(metadata.devices), metadata.num_hosts
        (True, 1)
    """
    devices = (resolver or PjrtClusterResolver()).devices
    return TPUSystemMetadata(devices.size, 1, devices.size, None, list(devices.names))
