"""MultiWorkerMirroredStrategy: synchronous training on the devices of several processes, on one machine or on many."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any, NoReturn

import tensorflow as tf

from replica_engine._tf import collectives, distribute
from replica_engine._tf.host_datasets import rows_of_batches
from replica_engine.hosts.saving import Saving
from replica_engine.strategies.backend import OnReplicaThreads
from replica_engine.strategies.extended import ExtendedHooks, ReplicaThreads, by_dtype
from replica_engine.strategies.multi_worker import job
from replica_engine.strategies.multi_worker.launches import Launches, check_mode, of_batches, of_variable
from replica_engine.strategies.multi_worker.reduction import OverWorkers, WorkerReduction
from replica_engine.strategies.validation import check_seconds, refuse
from replica_engine.threads.call import ReplicaOptions
from replica_engine.threads.cpu_reduction import CpuReduction
from replica_engine.values.rows import reduces_rows

# Collective keys, as for MirroredStrategy, but with a counter of their own: keys must be equal on all workers, and a
# chief may have made other strategies too.
_COLLECTIVE_KEYS = itertools.count(500_000_000, 16)


class _Compared(distribute.MultiWorkerMirroredExtended):
    """TensorFlow's extended half, which tells the job which reduction a collective belongs to."""

    launches: Launches | None = None

    def _doing(self, operation: str, reduce_op: Any, value: Any = None) -> contextlib.AbstractContextManager[None]:
        if self.launches is None:
            return contextlib.nullcontext()
        what = f"{operation} {getattr(reduce_op, 'value', reduce_op)}"
        name = value.name if isinstance(value, distribute.DistributedVariable) else None
        return self.launches.doing(what, name)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        with self._doing("reduce", reduce_op, value):
            return super()._reduce_to(reduce_op, value, destinations, options)

    @reduces_rows
    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        batch_reduce = super()._batch_reduce_to

        def reduce(batch: list[Any]) -> list[Any]:
            with self._doing("reduce", reduce_op):
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
        replica_options: ReplicaOptions,
    ):
        self._kind, self._count = _devices()
        self.job = job.join(cluster_resolver, self._kind, self._count)
        self.over_workers: OverWorkers | None = None
        if self.job is not None:
            if self.job.sums is None:
                collectives.start_no_coordination_service()
            self.launches = Launches(self.job.member, replica_options.timeout, replica_options.warn_after)
            worker = self.job.cluster.process_id
            replica_options = dataclasses.replace(replica_options, merging=self.launches.merging, worker=worker)
        self.replica_options = replica_options
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        super().__init__(strategy, resolver if self.job is None else self.job.resolver, communication_options)
        if self.job is None and self._kind == "CPU":
            # TensorFlow's collectives would do; but one that fails ends all later ones, and graphs of v1 hang in them.
            self._cross_device_ops = self._host_cross_device_ops = CpuReduction()
        if self.job is not None:
            assert self.launches is not None
            if self.over_workers is not None:
                workers, own = self._num_workers, len(self.worker_devices)
                # The second is for values of which a worker has one, whatever the number of its replicas.
                self._cross_device_ops, self._host_cross_device_ops = (
                    WorkerReduction(self.over_workers, self.worker_devices[0], count * workers, workers)
                    for count in (own, 1)
                )
            self.backend.saving = Saving(self.job.member, self.launches.meet)
            self.job.begin()
        for operations in {self._cross_device_ops, self._host_cross_device_ops}:
            collectives.defer_in_branches(operations)
            if self.launches is not None and self.over_workers is None:
                collectives.note_launches(operations, self.launches.describe)

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
        self.over_workers = OverWorkers(self.job.sums, self.launches, self.worker_devices[0])

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
                tensor = self.over_workers.of_chief(value)
        return super()._broadcast_to(tensor, destinations)

    def _compare_batches(self, dataset: Any) -> None:
        """Tells the other workers how many rows the batches of a dataset have, if it tells."""
        if self.launches is not None and (rows := rows_of_batches(dataset)) is not None:
            self.launches.note(of_batches(rows))

    def _get_variable_creator_initial_value(self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any) -> Any:
        """The hook that makes the initial value of a component: the chief's, on all workers."""
        launches = self.launches
        if launches is None:  # there is nobody to ask, so nothing is put around the user's function
            mirrored: Any = super(distribute.MultiWorkerMirroredExtended, self)
            return mirrored._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        if replica_id:  # TensorFlow takes it from the first component
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        check_mode()
        given, name, over_workers = kwargs["initial_value"], kwargs.get("name") or "Variable", self.over_workers

        def compared() -> Any:
            value = given() if callable(given) else given
            if tf.executing_eagerly():
                launches.launch(of_variable(name, value))
            return value

        def chiefs() -> Any:
            assert over_workers is not None
            with tf.device(device):
                value = given() if callable(given) else given
                value = tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype=kwargs.get("dtype"))
            return over_workers.of_chief(value, of_variable(name, value))

        if over_workers is not None:
            return chiefs
        kwargs["initial_value"] = compared
        return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)

    @property
    def num_hosts(self) -> int:
        """The number of workers."""
        return int(self._num_workers)


class MultiWorkerMirroredStrategy(OnReplicaThreads, tf.distribute.MultiWorkerMirroredStrategy):
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
        refuse(type(self), others)
        check_seconds(timeout=timeout, warn_after=warn_after)
        self._collective_key_base = next(_COLLECTIVE_KEYS)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        extended = MultiWorkerExtended(
            self, cluster_resolver, options, ReplicaOptions(timeout=timeout, warn_after=warn_after)
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
