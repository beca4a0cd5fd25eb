"""The job that this process is a worker of, as MultiWorkerMirroredStrategy needs it: one for the whole process.

The first strategy joins the job, and the later ones use what it has found. On CPUs the workers sum over jaxlib's Gloo.
On GPUs NCCL needs TensorFlow's server, one in each worker: what is said of a server here is about GPUs.

What it guarantees:

- When the job fails, every collective of this process ends at once, and the exception that comes out of TensorFlow is
  the failure of the job: WorkerLostError and its like. Nothing waits for a worker that is lost.
- When TensorFlow notices first that a connection broke, its error waits until it is known whose connection that was. If
  no worker is lost, the failure of the job names the two workers between which it broke.
- A step that ends early in this process alone, by Ctrl-C or another exception that its program catches, ends in the
  others too. TensorFlow cancels the collectives of such a step here, and tells nobody.
- A network that is down for less than the heartbeat limit breaks no connection of the server (`outlast`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import socket
import threading
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from replica_engine import hosts
from replica_engine._tf import collectives, thread_state, versions
from replica_engine.diagnostics.tracebacks import shortened
from replica_engine.errors import ClusterConfigError, ReplicaEngineError
from replica_engine.hosts.addresses import check_free, held_address
from replica_engine.hosts.cluster import COORDINATOR, split_address
from replica_engine.hosts.job import DEVICES
from replica_engine.hosts.joining import check_joins_once

if TYPE_CHECKING:  # jax is an extra
    from replica_engine.pjrt.worker_sums import WorkerSums

LOGGER = logging.getLogger("replica_engine")

_OWN = "/proc/self/fd"
_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
_KINDS = {"chief": "chief", "master": "chief"}  # of tasks in TF_CONFIG; every other task is a worker for TensorFlow
_BROKEN = (
    tf.errors.UNAVAILABLE,
    tf.errors.CANCELLED,
    tf.errors.ABORTED,
    tf.errors.INTERNAL,
    tf.errors.DEADLINE_EXCEEDED,
    tf.errors.FAILED_PRECONDITION,
    tf.errors.INVALID_ARGUMENT,
)
"""What a collective ends with when another worker is lost, or brings something else."""


OVER_SERVER = ("GPU",)
"""The kinds of devices whose collectives are TensorFlow's, and need its server."""

_PATIENCE = 2.0  # seconds until a failure of the job is known that explains another error
_LONGEST_REASON = 200  # characters
_REMOTE = re.compile(r"remote target /job:(\w+)/replica:0/task:(\d+)")
_BROKE = re.compile(r"aborted by: (.*)")


@dataclass
class StrategyJob:
    """The job of this process.

    Attributes:
        cluster: the place of this process in it.
        member: the connection to its coordinator.
        resolver: the cluster in the form that TensorFlow takes, with the addresses of the workers.
        port: the port of this worker's server.
        held: keeps the port of this worker's server until that runs; None if the launcher tells the addresses.
        sums: the sums over the workers; None if those are collectives of TensorFlow, which has a server then.
    """

    cluster: hosts.Cluster
    member: hosts.Member
    resolver: tf.distribute.cluster_resolver.ClusterResolver
    port: int
    held: socket.socket | None = None
    sums: WorkerSums | None = None

    def begin(self) -> None:
        """Lets a failure of the job end all collectives from now on; called when TensorFlow's server runs, if any."""
        collectives.explain_failures(self._explain)
        collectives.on_left(self._tell_given_up)
        self.member.shorten = shortened  # TensorFlow's frames around a collective that has ended
        self.member.tell_whether_in_step(collectives.running)
        if self.sums is not None:  # whose waits look for a failure of the job
            return
        if self.held is not None:
            self.held.close()
        # TensorFlow logs the text several times; the exception says the rest once.
        self.member.on_failure(lambda error: collectives.abort(f"the job has failed: {type(error).__name__}"))
        self.member.on_silence(lambda: outlast(self.port, 2 * self.member.heartbeat))

    def _tell_given_up(self, error: BaseException) -> None:
        if os.getpid() == self._process:
            self.member.tell_given_up(error, self.sums is not None and self.sums.is_running)

    def _explain(self, code: int, message: str) -> ReplicaEngineError | None:
        """The failure of the job that is the cause of an error of TensorFlow; None if there is none."""
        if os.getpid() != self._process:
            return None
        if self.sums is not None:  # a host op has raised it
            failures = self.member.failure, self.sums.failed
            return next((each for each in failures if each and f"{type(each).__name__}: " in message), None)
        if code not in _BROKEN or "ollective" not in message:
            return None
        # UNAVAILABLE: a connection broke. Other codes may have other causes.
        try:
            self.member.explain(ConnectionError(message), _PATIENCE)
            if code == tf.errors.UNAVAILABLE:
                self._tell_broken(message)
                self.member.explain(ConnectionError(message))
        except ReplicaEngineError:
            return self.member.failure  # without the frames of this lookup in its traceback
        return None

    def _tell_broken(self, message: str) -> None:
        """Tells the job that the connection to a worker broke, as TensorFlow's text has it, though none is lost."""
        remote, broke = _REMOTE.search(message), _BROKE.search(message)
        task = None if remote is None else (remote[1], int(remote[2]))
        tasks = _tasks(self.cluster)
        if task in tasks:
            reason = broke[1] if broke is not None else message.splitlines()[0]
            self.member.tell_parted(tasks.index(task), f"their connection broke ({reason[:_LONGEST_REASON]})")

    _process: int = field(default_factory=os.getpid)


def join(
    resolver: tf.distribute.cluster_resolver.ClusterResolver | None, kind: str, replicas: int
) -> StrategyJob | None:
    """Takes this process into its job, if it has not joined already.

    Args:
        resolver: describes the cluster; None reads it from the environment.
        kind: "GPU" or "CPU": the devices that replicas run on.
        replicas: the number of replicas of this worker.

    Returns:
        The job; None if this process is the only one.

    Raises:
        ClusterConfigError: the description of the cluster is wrong, TensorFlow has started already or the port of its
            server is taken where one is needed, or the process has joined the job for a strategy of another kind.
        WorkersMissingError: a worker did not join in time.
        WorkerVersionError: the workers differ in a version or in the number of replicas.
        WorkerLostError: a worker ended before all had joined.
        BackendMissingError: the replicas run on CPUs, and jax is not installed.
    """
    with _lock:
        cluster = hosts.find_cluster() if resolver is None else _described_by(resolver)
        if cluster.num_processes == 1:
            return None
        if _joined:
            return _same(_joined[0], cluster)
        check_joins_once(cluster)
        over_server = kind in OVER_SERVER
        if over_server and thread_state.started():  # then a server cannot be configured any more
            raise ClusterConfigError.about(
                "MultiWorkerMirroredStrategy",
                "TensorFlow has run an op in this process already, and cannot connect it to other workers any more. "
                "On GPUs make the MultiWorkerMirroredStrategy first, before any tensor, variable or dataset. Only "
                "replica_engine.logical_devices(n) may come before it.",
            )
        own = {DEVICES: kind, **versions.of_worker(), **({} if over_server else _jax().versions_of_jax())}
        member = hosts.join(cluster, versions=own, replicas=replicas)
        try:
            addresses, held = _addresses(cluster, member) if over_server else (_unreached(cluster), None)
            sums = None if over_server else _sums(cluster, member)
        except BaseException as error:
            member.tell_exception(error)
            member.close()
            raise
        spec, task = _spec(cluster, addresses)
        simple = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type=task[0], task_id=task[1], num_accelerators={kind: replicas}
        )
        _, port = split_address(addresses[cluster.process_id])
        if over_server:
            LOGGER.warning(
                f"TensorFlow's server of this worker listens at port {port} of all addresses of this machine, without "
                "a password: NCCL needs it. Who reaches the port can run operations of TensorFlow here, which read and "
                "write files as you. Let only the workers of the job reach it (a firewall, or a private network)."
            )
        _joined.append(StrategyJob(cluster, member, simple, port, held, sums))
        return _joined[0]


def _jax() -> ModuleType:
    """The module that needs jax, which is an extra.

    Raises:
        BackendMissingError: jax is not installed.
    """
    return importlib.import_module("replica_engine.pjrt.workers")


def _sums(cluster: hosts.Cluster, member: hosts.Member) -> WorkerSums:
    from replica_engine.pjrt.worker_sums import WorkerSums

    return WorkerSums(_jax().cpu_of_each(cluster, member))


def _same(job: StrategyJob, cluster: hosts.Cluster) -> StrategyJob:
    """The job that was joined before, if it is the one that is asked for."""
    asked, joined = (f"worker {each.process_id} of {each.num_processes}" for each in (cluster, job.cluster))
    if asked != joined:
        wanted = f"that of the job that this process has joined, as {joined}"
        raise ClusterConfigError.bad_value("cluster_resolver", asked, wanted)
    job.member.check()
    return job


def _described_by(resolver: Any) -> hosts.Cluster:
    """The cluster of a resolver of TensorFlow, read as TF_CONFIG is."""
    spec = tf.train.ClusterSpec(resolver.cluster_spec() or {}).as_dict()
    config = {"cluster": spec, "task": {"type": resolver.task_type, "index": resolver.task_id}}
    return hosts.find_cluster({"TF_CONFIG": json.dumps(config), COORDINATOR: os.environ.get(COORDINATOR, "")})


def _addresses(cluster: hosts.Cluster, member: hosts.Member) -> tuple[tuple[str, ...], socket.socket | None]:
    """An address for TensorFlow's server in each worker, and what holds the port of this worker's.

    The workers exchange the addresses if the launcher has told none.
    """
    if cluster.addresses:
        check_free(cluster.addresses[cluster.process_id])
        return cluster.addresses, None
    address, held = held_address(cluster.coordinator, member.reached)
    try:
        return tuple(member.exchange("the addresses of TensorFlow's servers", address)), held
    except BaseException:
        held.close()
        raise


def _unreached(cluster: hosts.Cluster) -> tuple[str, ...]:
    """The addresses of the workers that TensorFlow's resolver shows; nobody listens there."""
    return cluster.addresses or tuple(f"worker-{worker}.invalid:1" for worker in range(cluster.num_processes))


def _spec(cluster: hosts.Cluster, addresses: tuple[str, ...]) -> tuple[dict[str, list[str]], tuple[str, int]]:
    """The cluster as TensorFlow wants it: addresses by kind of task, and the kind and index of this worker's task."""
    spec: dict[str, list[str]] = {}
    tasks = _tasks(cluster)
    for (kind, _), address in zip(tasks, addresses, strict=True):
        spec.setdefault(kind, []).append(address)
    return spec, tasks[cluster.process_id]


def _tasks(cluster: hosts.Cluster) -> list[tuple[str, int]]:
    """The kind and the index of each worker's task, as TensorFlow calls it."""
    kinds = [_KINDS.get(name.split()[0], "worker") for name in cluster.tasks]
    return [(kind, kinds[:worker].count(kind)) for worker, kind in enumerate(kinds)]


_lock = threading.Lock()
_joined: list[StrategyJob] = []


def outlast(port: int, seconds: float) -> None:
    """Gives the connections that came to a port of this process at least so many seconds without a confirmation.

    gRPC has the system end each connection of TensorFlow's server on which nothing was confirmed for 20 seconds. The
    other side may not notice, and waits for ever. So while a machine does not answer, the connections of this process'
    server get more time: if the network comes back within the heartbeat limit, the collectives go on where they were.
    A longer outage is a failure of the job. Only Linux tells a process its connections.

    Args:
        port: the port of a server in this process that sets a limit of its own for them.
        seconds: how many.
    """
    if _TIMEOUT is None or not os.path.isdir(_OWN):
        return
    for name in os.listdir(_OWN):
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            _outlast(int(name), port, _TIMEOUT, int(1000 * seconds))


def _outlast(descriptor: int, port: int, option: int, milliseconds: int) -> None:
    """As `outlast`, for one descriptor, through a copy: the descriptor stays its owner's.

    Raises:
        OSError: the descriptor is no socket.
    """
    copy = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != port:
            return
        if 0 < sock.getsockopt(socket.IPPROTO_TCP, option) < milliseconds:
            sock.setsockopt(socket.IPPROTO_TCP, option, milliseconds)
