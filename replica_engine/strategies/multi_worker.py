"""MultiWorkerMirroredStrategy, and the job whose worker this process is.

Its replicas run on threads in several processes, and reduce over jaxlib's Gloo, or TensorFlow's NCCL on GPUs. The job
is one for the whole process: the first strategy joins it, and the later ones use what it has found. On GPUs NCCL needs
TensorFlow's server, one in each worker: what is said of a server here is about GPUs.

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
import dataclasses
import functools
import importlib
import itertools
import json
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from replica_engine import workers
from replica_engine.diagnostics.tracebacks import shortened
from replica_engine.errors import ClusterConfigError, ReplicaEngineError
from replica_engine.strategies import argument_checks, on_backend
from replica_engine.strategies.extended import ExtendedHooks, ReplicaThreads, by_dtype
from replica_engine.threads import all_reduce, merge_checks, replica_run
from replica_engine.upstream import distribute, host_datasets, thread_state, versions, worker_collectives
from replica_engine.values import variable_numbers
from replica_engine.values.table_rows import reduces_rows
from replica_engine.workers import joining, saving
from replica_engine.workers.cluster import COORDINATOR, check_free, held_address, split_address
from replica_engine.workers.job import DEVICES, STRATEGY

if TYPE_CHECKING:  # jax is an extra
    from replica_engine.pjrt.worker_sums import WorkerSums


__all__ = ["MultiWorkerExtended", "MultiWorkerMirroredStrategy"]


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

    cluster: workers.Cluster
    member: workers.Member
    resolver: tf.distribute.cluster_resolver.ClusterResolver
    port: int
    held: socket.socket | None = None
    sums: WorkerSums | None = None

    def begin(self) -> None:
        """Lets a failure of the job end all collectives from now on; called when TensorFlow's server runs, if any."""
        worker_collectives.translate_failures(self._find_failure)
        worker_collectives.on_left(self._tell_given_up)
        self.member.shorten = shortened  # TensorFlow's frames around a collective that has ended
        # TensorFlow's own collectives do not tell whether they wait: all in such a step count as waiting.
        self.member.tell_whether_in_step(worker_collectives.running, waits=self.sums is None)
        self.member.on_failure(lambda error: host_datasets.keep_iterators())
        if self.sums is not None:  # whose waits look for a failure of the job
            return
        if self.held is not None:
            # Only now, since the server runs: before, another process could have got the port.
            self.held.close()
        # TensorFlow logs the text several times; the exception says the rest once.
        self.member.on_failure(lambda error: worker_collectives.abort(f"the job has failed: {type(error).__name__}"))
        self.member.on_silence(lambda: outlast(self.port, 2 * self.member.heartbeat))

    def _tell_given_up(self, error: BaseException) -> None:
        if os.getpid() == self._process:
            self.member.tell_given_up(error, self.sums is not None and self.sums.is_running)

    def _find_failure(self, code: int, message: str) -> ReplicaEngineError | None:
        """The failure of the job that is the cause of an error of TensorFlow; None if there is none."""
        # A forked child has this hook, but is no worker of the job.
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
        cluster = workers.find_cluster() if resolver is None else _described_by(resolver)
        if cluster.num_processes == 1:
            return None
        if _joined:
            return _same(_joined[0], cluster)
        joining.check_joins_once(cluster)
        over_server = kind in OVER_SERVER
        if over_server and thread_state.started():  # then a server cannot be configured any more
            raise ClusterConfigError.about(
                "MultiWorkerMirroredStrategy",
                "TensorFlow has run an op in this process already, and cannot connect it to other workers any more. "
                "On GPUs make the MultiWorkerMirroredStrategy first, before any tensor, variable or dataset. Only "
                "replica_engine.logical_devices(n) may come before it.",
            )
        own = {DEVICES: kind, STRATEGY: "MultiWorkerMirroredStrategy", **versions.list_worker_versions()}
        own |= {} if over_server else _jax().versions_of_jax()
        member = workers.join(cluster, versions=own, replicas=replicas)
        try:
            if over_server:
                addresses, held = _addresses(cluster, member)
                sums = None
            else:
                from replica_engine.pjrt.worker_sums import WorkerSums  # not at module level: it needs jax

                # TensorFlow's resolver shows these, and nobody listens there.
                addresses = cluster.addresses or tuple(
                    f"worker-{each}.invalid:1" for each in range(cluster.num_processes)
                )
                held, sums = None, WorkerSums(_jax().cpu_of_each(cluster, member))
        except BaseException as error:  # also Ctrl-C: the others must learn of it, and not of a member that is gone
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
    return importlib.import_module("replica_engine.pjrt.job_devices")


def _same(job: StrategyJob, cluster: workers.Cluster) -> StrategyJob:
    """The job that was joined before, if it is the one that is asked for."""
    asked, joined = (f"worker {each.process_id} of {each.num_processes}" for each in (cluster, job.cluster))
    if asked != joined:
        wanted = f"that of the job that this process has joined, as {joined}"
        raise ClusterConfigError.bad_value("cluster_resolver", asked, wanted)
    job.member.check()
    return job


def _described_by(resolver: Any) -> workers.Cluster:
    """The cluster of a resolver of TensorFlow, read as TF_CONFIG is."""
    spec = tf.train.ClusterSpec(resolver.cluster_spec() or {}).as_dict()
    config = {"cluster": spec, "task": {"type": resolver.task_type, "index": resolver.task_id}}
    return workers.find_cluster({"TF_CONFIG": json.dumps(config), COORDINATOR: os.environ.get(COORDINATOR, "")})


def _addresses(cluster: workers.Cluster, member: workers.Member) -> tuple[tuple[str, ...], socket.socket | None]:
    """An address for TensorFlow's server in each worker, and what holds the port of this worker's.

    The workers exchange the addresses if the launcher has told none.
    """
    if cluster.addresses:
        check_free(cluster.addresses[cluster.process_id])
        return cluster.addresses, None
    address, held = held_address(cluster.coordinator, member.reached)
    try:
        return tuple(member.exchange("the addresses of TensorFlow's servers", address)), held
    except BaseException:  # also Ctrl-C: nobody else knows of the socket
        held.close()
        raise


def _spec(cluster: workers.Cluster, addresses: tuple[str, ...]) -> tuple[dict[str, list[str]], tuple[str, int]]:
    """The cluster as TensorFlow wants it: addresses by kind of task, and the kind and index of this worker's task."""
    spec: dict[str, list[str]] = {}
    tasks = _tasks(cluster)
    for (kind, _), address in zip(tasks, addresses, strict=True):
        spec.setdefault(kind, []).append(address)
    return spec, tasks[cluster.process_id]


def _tasks(cluster: workers.Cluster) -> list[tuple[str, int]]:
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


# Collective keys, as for MirroredStrategy, but with a counter of their own: keys must be equal on all workers, and a
# chief may have made other strategies too.
_COLLECTIVE_KEYS = itertools.count(500_000_000, 16)


class _Compared(distribute.MultiWorkerMirroredExtended):
    """TensorFlow's extended half, which tells the job which reduction a collective belongs to."""

    launches: merge_checks.Launches | None = None

    def _doing(
        self, operation: str, reduce_op: Any, value: Any = None, updated: Sequence[Any] = ()
    ) -> contextlib.AbstractContextManager[None]:
        if self.launches is None:
            return contextlib.nullcontext()
        what = f"{operation} {getattr(reduce_op, 'value', reduce_op)}"
        name = value.name if isinstance(value, distribute.DistributedVariable) else None
        return self.launches.doing(what, name, (value, *updated))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        with self._doing("reduce", reduce_op, value, [destinations]):
            return super()._reduce_to(reduce_op, value, destinations, options)

    @reduces_rows
    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        batch_reduce = super()._batch_reduce_to

        def reduce(batch: list[Any]) -> list[Any]:
            with self._doing("reduce", reduce_op, updated=[destination for _, destination in batch]):
                return batch_reduce(reduce_op, batch, options)

        return by_dtype(value_destination_pairs, reduce)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        with self._doing("gather along", axis):
            return super()._gather_to_implementation(value, destinations, axis, options)


class MultiWorkerExtended(ReplicaThreads, ExtendedHooks, _Compared):
    """The extended half of `MultiWorkerMirroredStrategy`: TensorFlow's own, on this library's replica threads."""

    _enable_check_health = False  # the job notices who is lost, and says it

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        communication_options: Any,
        replica_options: replica_run.ReplicaOptions,
    ):
        self._kind, self._count = _devices()
        self.job = join(cluster_resolver, self._kind, self._count)
        self.over_workers: all_reduce.OverWorkers | None = None
        if self.job is not None:
            if self.job.sums is None:
                worker_collectives.start_no_coordination_service()
            self.launches = merge_checks.Launches(self.job.member, replica_options.timeout, replica_options.warn_after)
            worker = self.job.cluster.process_id
            replica_options = dataclasses.replace(replica_options, merging=self.launches.merging, worker=worker)
        self.replica_options = replica_options
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        super().__init__(strategy, resolver if self.job is None else self.job.resolver, communication_options)
        if self.job is None and self._kind == "CPU":
            # TensorFlow's collectives would do; but one that fails ends all later ones, and graphs of v1 hang in them.
            self._cross_device_ops = self._host_cross_device_ops = all_reduce.CpuReduction()
        if self.job is not None:
            assert self.launches is not None
            if self.over_workers is not None:
                workers, own = self._num_workers, len(self.worker_devices)
                # The second is for values of which a worker has one, whatever the number of its replicas.
                self._cross_device_ops, self._host_cross_device_ops = (
                    all_reduce.WorkerReduction(self.over_workers, self.worker_devices[0], count * workers, workers)
                    for count in (own, 1)
                )
            self.backend.saving = saving.Saving(self.job.member, self.launches.meet)
            self.job.begin()
        for operations in {self._cross_device_ops, self._host_cross_device_ops}:
            worker_collectives.defer_in_branches(operations)
            if self.launches is not None and self.over_workers is None:
                worker_collectives.note_launches(operations, self.launches.describe)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        """The hook that makes variables. All workers make them together, and number them."""
        variable = super()._create_variable(next_creator, **kwargs)
        if self.launches is not None:
            variable_numbers.number(variable_numbers.handles(variable))
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if self.over_workers and isinstance(variable, distribute.SyncOnReadVariable) and variable.aggregation == first:
            # TensorFlow would read the first replica of each worker. Weakly: the variable holds the function.
            variable._get_cross_replica = functools.partial(self._first_value, weakref.ref(variable))
        return variable

    def _first_value(self, reference: weakref.ref[Any]) -> tf.Tensor:
        """The first replica's value of a variable, on all workers."""
        variable = reference()
        assert variable is not None, "a method of it"
        assert self.over_workers is not None, "asked before"
        with self._doing("read", "the first replica's value", variable):
            return self.over_workers.broadcast_from_chief(variable.values[0].read_value())

    def _initialize_multi_worker(self, cluster_resolver: Any) -> None:
        """The hook that connects this process to the others. On CPUs no server of TensorFlow is started for that."""
        assert self.job is not None, "there are several workers"
        assert self.launches is not None, "it was made before"
        if self.job.sums is None:
            super()._initialize_multi_worker(cluster_resolver)
            return
        self._initialize_local(cluster_resolver)
        self._local_or_standalone_client_mode = False
        self._cluster_spec = cluster_resolver.cluster_spec()
        self._task_type, self._task_id = cluster_resolver.task_type, cluster_resolver.task_id
        self._num_workers, self._id_in_cluster = self.job.cluster.num_processes, self.job.cluster.process_id
        self._is_chief = self._id_in_cluster == 0
        self.over_workers = all_reduce.OverWorkers(self.job.sums, self.launches, self.worker_devices[0])

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        """The hook that names the devices of this worker: all GPUs, or all logical CPUs on a machine without GPUs."""
        return tuple(f"{worker_device}/device:{self._kind}:{index}" for index in range(self._count)), self._kind

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """The hook of `experimental_distribute_dataset`."""
        distributed = super()._experimental_distribute_dataset(dataset, options)
        if isinstance(dataset, tf.data.Dataset):
            self._compare_batches(dataset)
        return distributed

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        """The hook of `distribute_datasets_from_function`."""

        def compared(context: Any) -> Any:
            dataset = dataset_fn(context)
            if isinstance(dataset, tf.data.Dataset):
                self._compare_batches(dataset)
            return dataset

        return super()._distribute_datasets_from_function(compared, options)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The hook that gives a value to all replicas: of a variable that takes the first replica's, the chief's."""
        if (
            self.over_workers is not None
            and isinstance(destinations, distribute.DistributedVariable)
            and destinations.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        ):
            value = tf.convert_to_tensor(tensor, destinations.dtype)
            with self._doing("assign", "the first replica's value", destinations):
                tensor = self.over_workers.broadcast_from_chief(value)
        return super()._broadcast_to(tensor, destinations)

    def _compare_batches(self, dataset: Any) -> None:
        """Tells the other workers how many rows the batches of a dataset have, if it tells."""
        if self.launches is not None and (rows := host_datasets.rows_of_batches(dataset)) is not None:
            self.launches.note(merge_checks.make_dataset_program(rows))

    def _get_variable_creator_initial_value(self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any) -> Any:
        """The hook that makes the initial value of a component: the chief's, on all workers."""
        launches = self.launches
        if launches is None:  # there is nobody to ask, so nothing is put around the user's function
            mirrored: Any = super(distribute.MultiWorkerMirroredExtended, self)
            return mirrored._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        if replica_id:  # TensorFlow takes it from the first component
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        merge_checks.check_mode()
        given, name, over_workers = kwargs["initial_value"], kwargs.get("name") or "Variable", self.over_workers

        def compared() -> Any:
            value = given() if callable(given) else given
            if tf.executing_eagerly():
                launches.launch(merge_checks.make_variable_program(name, value))
            return value

        def chiefs() -> Any:
            assert over_workers is not None
            with tf.device(device):
                value = given() if callable(given) else given
                value = tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype=kwargs.get("dtype"))
            return over_workers.broadcast_from_chief(value, merge_checks.make_variable_program(name, value))

        if over_workers is not None:
            return chiefs
        kwargs["initial_value"] = compared
        return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)

    @property
    def num_hosts(self) -> int:
        """The number of workers."""
        return int(self._num_workers)


class MultiWorkerMirroredStrategy(on_backend.OnReplicaThreads, tf.distribute.MultiWorkerMirroredStrategy):
    """Runs a function once per replica, with replicas on the devices of several processes, and keeps variables equal.

    This class is a drop-in replacement for `tf.distribute.MultiWorkerMirroredStrategy`, and a subclass of it. Each
    process is a worker; its replicas run on this library's threads. Sums over workers run over jaxlib's Gloo, or over
    TensorFlow's NCCL on GPUs. `docs/many_hosts.md` says how workers are started and what each one gets when another
    one fails.

    Without a launcher's variables in the environment, the strategy has the devices of this process alone.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` with the addresses of all workers. None
            reads the cluster from the environment: the variables of `replica-engine launch`, TF_CONFIG, Keras,
            jax, torchrun, Slurm or Open MPI, in this order.
        communication_options: `tf.distribute.experimental.CommunicationOptions` for collectives on GPUs.
        timeout: the seconds that a replica may take to reach its next sync point, that a merge function may take to
            return, and that other workers may take to come to a collective that is launched for the first time. None
            waits without a limit.
        warn_after: the seconds after which a warning is logged, with a table of where each replica stands; None takes
            the value of the environment variable REPLICA_ENGINE_WARN_AFTER, or 30 if it is not set.

    Raises:
        ClusterConfigError: the description of the cluster is wrong, or TensorFlow has run an op already on GPUs.
        WorkersMissingError: a worker did not join within the join limit.
        WorkerVersionError: workers have different versions of this library or TensorFlow, or numbers of replicas.
        WorkerLostError: a worker ended before all had joined.
        ValueError: `timeout` or `warn_after` is not positive.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.MultiWorkerMirroredStrategy()
        >>> strategy.num_hosts
        1
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        timeout: float | None = None,
        warn_after: float | None = None,
        **others: NoReturn,
    ):
        argument_checks.refuse(type(self), others)
        argument_checks.check_seconds(timeout=timeout, warn_after=warn_after)
        self._collective_key_base = next(_COLLECTIVE_KEYS)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        extended = MultiWorkerExtended(
            self, cluster_resolver, options, replica_run.ReplicaOptions(timeout=timeout, warn_after=warn_after)
        )
        # Not the parent's __init__: it would make TensorFlow's own extended half.
        tf.distribute.Strategy.__init__(self, extended)

    @property
    def num_hosts(self) -> int:
        """The number of workers: processes that run the replicas together."""
        return int(self.extended.num_hosts)


def _devices() -> tuple[str, int]:
    """The kind of the devices of this process and their number, found without starting TensorFlow."""
    for kind in ("GPU", "CPU"):
        physical = tf.config.get_visible_devices(kind)
        count = sum(len(tf.config.get_logical_device_configuration(each) or [None]) for each in physical)
        if count:
            return kind, count
    raise AssertionError("a process without a CPU")
