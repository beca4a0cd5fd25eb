"""The devices of all workers of a job: one PJRT client in each worker, which sees them all.

A process joins its job once. The first strategy of the process says how many devices each worker has; later ones may
use fewer.

On CPU the workers' collectives are Gloo's, on GPUs NCCL's, and TPUs have their own. The code makes the same calls for
GPUs and TPUs as for CPU devices, but it has never run on them.

What must never happen: jaxlib ends the process. So nothing connects to its service before all workers are there, the
service outlives them all (`jaxlib_service`), and the clients are never destroyed: at exit that would wait for programs
that wait for a lost worker.

jaxlib waits for a worker that dies while the job joins, for minutes and without Ctrl-C. So another thread calls jaxlib
then. If the job fails, that thread stays inside jaxlib, which the service keeps waiting until this process has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from replica_engine.errors import ClusterConfigError, DeviceError, WorkerVersionError
from replica_engine.pjrt import accelerators, agreement, jaxlib, jaxlib_service, partitioned_group
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.pjrt.stablehlo.partition_local import ReplicaMesh
from replica_engine.process import cores, interrupts, threads
from replica_engine.workers import Cluster, Member, join
from replica_engine.workers.cluster import own_host

T = TypeVar("T")

_SERVICE = "jaxlib's service"
_lock = threading.Lock()
_joined: list[_Workers] = []


class _Workers:
    """The job of this process, and the devices of all its workers.

    Attributes:
        cluster: the place of this process in the job.
        member: the connection to the coordinator.
        platform: the platform of the devices.
        devices: for each worker, its devices.
    """

    def __init__(self, cluster: Cluster, member: Member, platform: str | None, count: int | None):
        self.cluster = cluster
        self.member = member
        self._groups: dict[tuple[int, ReplicaMesh | None], DeviceGroup] = {}
        self._host = own_host(cluster.coordinator, member.reached)
        place = self._place()
        with raises_job_failure(member, (OSError,)):  # refused if worker 0 is lost
            jaxlib_service.hold(place)
        with raises_job_failure(member):
            self.platform, devices = _unless_it_fails(member, lambda: self._find(place, platform, count))
        self.devices = [
            # In one order on all workers.
            tuple(sorted((each for each in devices if each.process_index == worker), key=lambda device: device.id))
            for worker in range(cluster.num_processes)
        ]
        # A client that is destroyed at exit waits for its programs, and those for a worker that may be lost.
        _keep(self.devices[cluster.process_id][0].client)
        counts: dict[int, list[int]] = {}
        for worker, own in enumerate(self.devices):
            counts.setdefault(len(own), []).append(worker)
        if len(counts) > 1:  # known only now for GPUs and TPUs
            groups = [(each, str(number)) for number, each in sorted(counts.items())]
            raise WorkerVersionError.of_replicas(groups)
        self._agreement = agreement.Agreement(self.platform, tuple(own[0] for own in self.devices), member)

    def group(self, count: int, mesh: ReplicaMesh | None) -> DeviceGroup:
        """The first `count` devices of each worker; one program runs on them all."""
        group = self._groups.get((count, mesh))
        if group is None:
            everywhere = tuple(device for devices in self.devices for device in devices[:count])
            own = self.devices[self.cluster.process_id][:count]
            group = self._groups[count, mesh] = partitioned_group.make_device_group(
                self.platform, own, mesh, everywhere, self.member
            )
            group.agreement = group.flat.agreement = self._agreement
        return group

    def _place(self) -> dict[str, str]:
        """The place of the service that worker 0 starts."""
        if self.cluster.process_id == 0:
            place = jaxlib_service.start(self.cluster.num_processes, self._host)
            self.member.put(_SERVICE, place)
            return place
        return self.member.get(_SERVICE)

    def _find(
        self, place: dict[str, str], platform: str | None, count: int | None
    ) -> tuple[str, Sequence[jaxlib.jax.Device]]:
        """The platform, and its devices of all workers; waits inside jaxlib for the other workers."""
        client = jaxlib.get_distributed_runtime_client(
            place["address"],
            self.cluster.process_id,
            init_timeout=300,
            shutdown_timeout=5,
            heartbeat_timeout=jaxlib_service.NEVER,
            shutdown_on_destruction=False,
        )
        _keep(client)  # before it waits: it must not be destroyed where the thread is given up
        client.connect()
        found = () if platform == "cpu" else self._accelerators(client, platform)
        return (found[0].platform, found) if found else ("cpu", self._cpu_devices(client, count or cores()))

    def _cpu_devices(self, client: object, count: int) -> list[jaxlib.jax.Device]:
        collectives = jaxlib.make_gloo_tcp_collectives(client, hostname=self._host)
        made: Any = jaxlib.make_cpu_client(
            distributed_client=client,
            node_id=self.cluster.process_id,
            num_nodes=self.cluster.num_processes,
            collectives=collectives,
            num_devices=count,
        )
        return made.devices()

    def _accelerators(self, client: object, platform: str | None) -> tuple:
        """The GPUs or TPUs of all workers.

        jax makes the clients for them, and takes from its global state that there are other processes.
        """
        jaxlib.global_state.client = client
        jaxlib.global_state.process_id = self.cluster.process_id
        jaxlib.global_state.num_processes = self.cluster.num_processes
        for name in ("tpu", "gpu") if platform is None else (platform,):
            if found := accelerators.list_job_devices(name):
                return found
            if platform is not None:
                raise accelerators.make_missing_error(name, ["cpu"])
        for name in ("tpu", "gpu"):
            accelerators.warn_of_fallback(name, "cpu")
        return ()


def group_of_job(
    cluster: Cluster,
    platform: str | None,
    count: int | None,
    versions: dict[str, str],
    mesh: ReplicaMesh | None = None,
) -> DeviceGroup:
    """The devices of all workers of a job; joins it, if this process has not done so before.

    Args:
        cluster: the place of this process in the job.
        platform: "tpu", "gpu" or "cpu", the same on all workers; None takes the first that there is.
        count: the number of devices of each worker; None takes all, or those of the first strategy.
        versions: the versions of packages that must be equal on all workers, besides those of jax and jaxlib.
        mesh: the devices of each replica, if it has several.

    Raises:
        ClusterConfigError: this process has joined another job.
        DeviceError: the workers have fewer devices.
        WorkersMissingError: a worker did not join in time.
        WorkerVersionError: the workers differ in a version or in the number of replicas.
        WorkerLostError: a worker is lost.
    """
    with _lock:
        if not _joined:
            _joined.append(_join(cluster, platform, count, versions))
        workers = _joined[0]
        asked, joined = (f"worker {each.process_id} of {each.num_processes}" for each in (cluster, workers.cluster))
        if asked != joined:
            wanted = f"that of the job that this process has joined, as {joined}"
            raise ClusterConfigError.bad_value("tpu_cluster_resolver", asked, wanted)
        workers.member.check()
        there = min(map(len, workers.devices))
        if count is not None and count > there:
            total = there * cluster.num_processes
            raise DeviceError(
                f"{count * cluster.num_processes} {workers.platform.upper()} devices were asked for, and all "
                f"workers together have {total}. The first TPUStrategy of a process settles how many CPU devices "
                "each worker has: make the one with the most devices first."
            )
        return workers.group(count or there, mesh)


def versions_of_jax() -> dict[str, str]:
    """The versions of jax and jaxlib, which must be equal on all workers."""
    return {"jax": jaxlib.jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}


def cpu_of_each(cluster: Cluster, member: Member) -> DeviceGroup:
    """One CPU device of each worker of a job that this process has joined, for sums over the workers.

    Raises:
        WorkerLostError or another failure of the job.
    """
    return _Workers(cluster, member, "cpu", 1).group(1, None)


def _join(cluster: Cluster, platform: str | None, count: int | None, versions: dict[str, str]) -> _Workers:
    replicas = count or (cores() if platform == "cpu" else 0)  # jax must not look for others before all have joined
    member = join(cluster, versions={**versions, **versions_of_jax()}, replicas=replicas)
    try:
        return _Workers(cluster, member, platform, count)
    # Whatever it is, also Ctrl-C: the other workers wait for this one, and are told why it does not come.
    except BaseException as error:
        member.tell_exception(error)
        member.close()
        raise


def _unless_it_fails(member: Member, find: Callable[[], T]) -> T:
    """Calls a function that may wait inside jaxlib for a worker that never comes; a failure of the job ends the wait.

    Raises:
        WorkerLostError or another failure of the job.
        Exception: what the function raised.
    """
    over, what = threading.Event(), "the devices of the job"
    thread = threads.LeftCall(find, what, over.set)
    with member.watched(what):
        thread.start()
        interrupts.wait_for_ever(lambda seconds: over.wait(seconds) or member.failed.is_set())
    if not thread.has_result:
        member.check()
    return thread.result()


@contextlib.contextmanager
def raises_job_failure(
    member: Member, errors: tuple[type[BaseException], ...] = jaxlib.RUNTIME_ERRORS
) -> Iterator[None]:
    """Inside, an error of the runtime becomes the failure of the job that is its cause, if there is one.

    Raises:
        WorkerLostError or another failure of the job.
    """
    try:
        yield
    except errors as error:
        member.explain(error)
        raise


def _keep(thing: object) -> None:
    """Keeps an object of jaxlib from being destroyed, at exit too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
