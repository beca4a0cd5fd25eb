"""The platform to run on, and the workers of the job, as a cluster resolver of `tf.distribute`."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from replica_engine import workers
from replica_engine.errors import ClusterConfigError
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.pjrt.devices import device_group, group_of_job, platform_named
from replica_engine.pjrt.stablehlo.partition_local import ReplicaMesh
from replica_engine.upstream import versions
from replica_engine.workers import cluster as clusters
from replica_engine.workers.job import STRATEGY


class PjrtClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """The devices of one PJRT platform: on this machine, or in all processes of a job.

    Without the last three arguments, the job is read from the environment, as `docs/hosts/starting.md` says. Either all
    three are given or none.

    Args:
        platform: "tpu", "gpu" or "cpu"; None takes the first of these that the machine has.
        coordinator_address: "host:port" of the job's coordinator, a free port on the machine of process 0.
        num_processes: the number of processes of the job.
        process_id: the index of this process, from 0.

    Raises:
        DeviceError: the platform is unknown, or has no device here.
        ClusterConfigError: one of the last three arguments is missing or wrong, or the environment is.

    Example:
        >>> from replica_engine import xla
        >>> xla.PjrtClusterResolver("cpu").platform
        'cpu'
    """

    def __init__(
        self,
        platform: str | None = None,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ):
        self.cluster = _cluster(coordinator_address, num_processes, process_id)
        self._found: DeviceGroup | None = None
        self._asked = platform_named(platform)
        # With several processes the platform is not looked at yet: that would join the job, and wait for all of them.
        if self.cluster.num_processes > 1:
            self.task_type, self.task_id = "worker", self.cluster.process_id
        elif platform is not None:
            self._found = self.group(None)  # fails now if there is none

    @property
    def platform(self) -> str:
        """The platform: "tpu", "gpu" or "cpu"."""
        return self._asked or self.devices.platform

    @property
    def devices(self) -> DeviceGroup:
        """The devices, of all processes. On the CPU platform each has as many as cores.

        With several processes, the first use joins the job and waits for all.
        """
        # Not a cached_property: up to Python 3.11 all resolvers would share its lock, also while one waits for a job.
        if self._found is None:
            self._found = self.group(None)
        return self._found

    def group(self, count: int | None, mesh: ReplicaMesh | None = None) -> DeviceGroup:
        """The first `count` devices, of all processes; None takes all. With a mesh, each replica has several.

        Raises:
            DeviceError: there are fewer, or the processes cannot share them evenly.
            WorkersMissingError, WorkerVersionError or WorkerLostError: the job failed to start.
        """
        if self.cluster.num_processes == 1:
            return device_group(self._asked, count, mesh)
        own = {STRATEGY: "TPUStrategy", **versions.list_worker_versions()}
        return group_of_job(self.cluster, self._asked, count, own, mesh)

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """The cluster: empty, since no server of TensorFlow runs in it."""
        return tf.train.ClusterSpec({})

    def master(self, task_type: object = None, task_id: object = None, rpc_layer: object = None) -> str:
        """The address of the master: this process."""
        return ""

    def num_accelerators(
        self, task_type: object = None, task_id: object = None, config_proto: object = None
    ) -> dict[str, int]:
        """The number of this process' devices by kind: `{"CPU": 2}`."""
        return {self.platform.upper(): self.devices.size}

    @property
    def environment(self) -> str:
        """The environment: empty, since this is not Google's internal one."""
        return ""


class TPUSystemMetadata(NamedTuple):
    """The numbers and names of a platform's devices, as `get_tpu_system_metadata` returns them.

    Attributes:
        num_cores: the number of devices, of all processes.
        num_hosts: the number of processes.
        num_of_cores_per_host: the number of devices of each process.
        topology: None, since PJRT does not know it.
        devices: the names of this process' devices: "CPU:0", ...
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: list[str]


def get_tpu_system_metadata(resolver: PjrtClusterResolver | None = None) -> TPUSystemMetadata:
    """Counts the devices of a platform and of its processes, and names those of this one.

    Args:
        resolver: the resolver of the platform; None takes the best platform.

    Example:
        >>> from replica_engine import xla
        >>> metadata = xla.get_tpu_system_metadata(xla.PjrtClusterResolver("cpu"))
        >>> metadata.num_cores == len(metadata.devices), metadata.num_hosts
        (True, 1)
    """
    devices = (resolver or PjrtClusterResolver()).devices
    number = devices.replicas // devices.size
    return TPUSystemMetadata(devices.replicas, number, devices.size, None, list(devices.names))


_FIELDS = {
    "coordinator_address": clusters.COORDINATOR,
    "num_processes": clusters.NUM_PROCESSES,
    "process_id": clusters.PROCESS_ID,
}


def _cluster(address: str | None, size: int | None, index: int | None) -> workers.Cluster:
    given = dict(zip(_FIELDS, (address, size, index), strict=True))
    if all(value is None for value in given.values()):
        return workers.find_cluster()
    for name, value in given.items():
        if value is None:
            other = next(other for other, value in given.items() if value is not None)
            raise ClusterConfigError.missing(name, other, "given too: all three of them, or none")
    try:
        return workers.find_cluster({_FIELDS[name]: str(value) for name, value in given.items()})
    except ClusterConfigError as error:
        words, names = str(error), {field: name for name, field in _FIELDS.items()}
        # The user has passed arguments, and may not know the environment variables.
        for field, name in names.items():
            words = words.replace(field, name)
        error.args, error.field = (words,), names.get(error.field, error.field)
        raise
