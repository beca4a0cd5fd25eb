"""The `TPUStrategy` of TensorFlow's contrib package of 2018: its old names, on today's `TPUStrategy`.

In 2018 a replica was called a tower, and a `tf.VariableAggregation` named a reduction. Everything here is a method of
today under its old name; `docs/from_contrib.md` has the table. Methods that returned ops for a session in 2018 do their
work in eager mode before they return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import ContribError
from replica_engine.strategies.device_loops import LoopSettings
from replica_engine.strategies.multi_step import MultiStepContext as _MultiStepContext
from replica_engine.strategies.tpu import TPUStrategy as _TPUStrategy
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import autograph
from replica_engine.values.regroup import regroup
from replica_engine.xla.body import check_mode, in_body
from replica_engine.xla.cluster_resolver import PjrtClusterResolver, TPUSystemMetadata, get_tpu_system_metadata

__all__ = ["MapOutput", "MultiStepContext", "TPUStrategy", "TPUSystemMetadata", "TowerContext"]
__all__ += ["get_distribution_strategy", "get_tower_context", "get_tpu_system_metadata"]
__all__ += ["has_distribution_strategy", "in_cross_tower_context"]

Result = TypeVar("Result")
Aggregation: TypeAlias = tf.VariableAggregation | tf.distribute.ReduceOp | str
_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
_NOT_GIVEN = object()
_AGGREGATIONS = ("SUM", "MEAN", "ONLY_FIRST_TOWER", "NONE")


class TPUStrategy(_TPUStrategy):
    """Today's `TPUStrategy` that also has the methods and properties of 2018.

    Args:
        tpu_cluster_resolver: a `replica_engine.xla.PjrtClusterResolver`; None takes the first of TPUs, GPUs and CPU
            devices that the machine has.
        steps_per_run: how many steps one launch of a device loop runs.
        num_cores: the number of devices; None takes all.

    Raises:
        Exception: the exceptions of today's `TPUStrategy`.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine.compat import contrib
        >>> distribution = contrib.TPUStrategy(None, steps_per_run=1, num_cores=2)
        >>> def tower_fn(x):
        ...     merge = lambda distribution, value: sum(distribution.unwrap(value))
        ...     return contrib.get_tower_context().merge_call(merge, x * 2.0)
        >>> with distribution.scope():
        ...     total = distribution.call_for_each_tower(tower_fn, tf.constant(1.0))
        >>> [float(each) for each in distribution.unwrap(total)]
        [4.0, 4.0]
    """

    def __init__(
        self,
        tpu_cluster_resolver: PjrtClusterResolver | None = None,
        steps_per_run: int = 1,
        num_cores: int | None = None,
    ):
        super().__init__(tpu_cluster_resolver, steps_per_run, num_cores)

    # Running.

    @autograph.artifact
    def call_for_each_tower(self, fn: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Runs `fn` on each tower; `run` today. Ignores the option `run_concurrently`: all towers run at once."""
        kwargs.pop("run_concurrently", None)
        return self.run(fn, args, kwargs)

    @autograph.artifact
    def run_steps_on_dataset(
        self,
        fn: Callable[..., object],
        iterator: object,
        iterations: int = 1,
        initial_loop_values: Mapping[str, object] | None = None,
    ) -> MultiStepContext:
        """Runs `fn(context, *inputs)` `iterations` times in one launch, in cross-tower context; `run_steps` today."""
        settings = LoopSettings(iterations, initial_loop_values, in_replica=False, context_class=MultiStepContext)
        return self.extended.backend.run_steps(fn, iterator, settings)

    @autograph.artifact
    def map(self, map_over: Iterable[object], fn: Callable[..., object], *args: object, **kwargs: object) -> MapOutput:
        """Calls `fn(element, *args, **kwargs)` for each element, on the host. `unwrap` and `reduce` take the result."""
        check_mode()
        with tf.device(_HOST):
            return MapOutput([fn(element, *args, **kwargs) for element in map_over])

    # Values.

    @autograph.artifact
    def reduce(  # type: ignore[override]
        self,
        reduce_op: Aggregation | None = None,
        value: Any = None,
        destinations: object = None,
        *,
        axis: object = _NOT_GIVEN,
        aggregation: Aggregation | None = None,
    ) -> Any:
        """Reduces a value over towers with SUM, MEAN or ONLY_FIRST_TOWER; the result is on `destinations`.

        The call is one of today's `reduce` in two cases: with an axis, by name or as the third argument; and with a
        `tf.distribute.ReduceOp` and no third argument.

        Args:
            reduce_op: a `tf.VariableAggregation` or its name; this argument was called `aggregation` in 2018.
            value: one value per tower, a list over towers, or a `MapOutput`.
            destinations: the host, or a variable of this strategy; in a body, any destination.
            axis: the axis of today's `reduce`.
            aggregation: another name of `reduce_op`.

        Raises:
            ContribError: the aggregation does not exist, or the result cannot be on `destinations`.
        """
        how = reduce_op if aggregation is None else aggregation
        is_todays = isinstance(how, tf.distribute.ReduceOp) and destinations is None
        if axis is _NOT_GIVEN and (is_todays or isinstance(destinations, int)):
            axis = destinations
        if axis is not _NOT_GIVEN:
            return super().reduce(how, value, axis)
        name = _aggregation(how)
        self._check_destinations(destinations)
        if self._is_over_towers(value):
            return tf.nest.map_structure(lambda *each: self._reduce_leaf(name, MapOutput(list(each))), *value)
        return tf.nest.map_structure(lambda leaf: self._reduce_leaf(name, leaf), value)

    @autograph.artifact
    def batch_reduce(
        self, aggregation: Aggregation, value_destination_pairs: Sequence[tuple[object, object]]
    ) -> list[Any]:
        """Calls `reduce` for each pair of a value and its destination."""
        return [self.reduce(aggregation, value, destinations) for value, destinations in value_destination_pairs]

    @autograph.artifact
    def broadcast(self, tensor: object, destinations: object = None) -> Any:
        """Copies a tensor to every tower; `extended.broadcast_to` today."""
        check_mode()
        self._check_destinations(destinations)
        if in_body() is not None:
            return tensor
        return distribute.PerReplica((tf.convert_to_tensor(tensor),) * self.num_towers)

    @autograph.artifact
    def unwrap(self, value: object) -> list[Any]:
        """The value of each tower; `experimental_local_results` today. A list counts as a list over towers already."""
        if isinstance(value, MapOutput):
            return value.get()
        return value if isinstance(value, list) else list(self.experimental_local_results(value))

    def value_container(self, value: object) -> Any:
        """The variable that a tower's component belongs to; any other value itself."""
        return self.extended.value_container(value)

    @autograph.artifact
    def group(self, value: object, name: str | None = None) -> Any:
        """`tf.group` of all towers' values; in eager mode the ops have already run."""
        values = self.unwrap(value)
        return values[0] if len(values) == 1 and name is None else tf.group(values, name=name)

    # Variables.

    def read_var(self, v: tf.Variable) -> tf.Tensor:
        """The value of a variable; if each tower has a value, their aggregate. `extended.read_var` today."""
        return self.extended.read_var(v)

    @autograph.artifact
    def update(self, var: tf.Variable, fn: Callable[..., object], *args: object, **kwargs: Any) -> Any:
        """Calls `fn(var, *args, **kwargs)` in cross-tower context; `extended.update` today.

        The option `grouped=False` returns the results of `fn` as a list over towers.
        """
        grouped = kwargs.pop("grouped", True)
        return _listed(self.extended.update(var, fn, args, kwargs, group=grouped), grouped)

    @autograph.artifact
    def update_non_slot(self, colocate_with: object, fn: Callable[..., object], *args: object, **kwargs: Any) -> Any:
        """Calls `fn(*args, **kwargs)` on the devices of `non_slot_devices`; `extended.update_non_slot` today."""
        grouped = kwargs.pop("grouped", True)
        return _listed(self.extended.update_non_slot(colocate_with, fn, args, kwargs, group=grouped), grouped)

    def non_slot_devices(self, var_list: Sequence[tf.Variable]) -> Any:
        """The devices of variables that belong to no other variable, such as an optimizer's step count."""
        return self.extended.non_slot_devices(var_list)

    def colocate_vars_with(self, colocate_with_variable: object) -> contextlib.AbstractContextManager[None]:
        """Keeps new variables where the given variable is; does nothing for the devices of `non_slot_devices`."""
        if isinstance(colocate_with_variable, (list, tuple)):
            return contextlib.nullcontext()
        return self.extended.colocate_vars_with(colocate_with_variable)

    # Input.

    def distribute_dataset(self, dataset_fn: Callable[[], tf.data.Dataset]) -> _DatasetOf2018:
        """Distributes a dataset so that each tower gets another batch; `distribute_datasets_from_function` today.

        As in 2018, a batch of the dataset is for one tower, so a step takes as many batches as there are towers.

        Args:
            dataset_fn: makes the dataset.
        """
        return _DatasetOf2018(self.distribute_datasets_from_function(lambda _: dataset_fn()))

    # The system.

    def initialize(self) -> list[tf.Operation]:
        """Does nothing: devices are ready when the strategy is made. Returns an empty list of ops."""
        return []

    def finalize(self) -> list[tf.Operation]:
        """Does nothing: devices become free when the strategy is freed. Returns an empty list of ops."""
        return []

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: object = None,
        task_id: object = None,
    ) -> None:
        """Does nothing, because no session exists to configure."""

    def get_host_cpu_device(self, host_id: int) -> str:
        """The CPU device of a host.

        Raises:
            ContribError: `host_id` is out of range.
        """
        if not 0 <= host_id < self.num_hosts:
            raise ContribError(f"There is no host {host_id}; hosts are numbered from 0 to {self.num_hosts - 1}.")
        return _HOST

    @property
    def num_towers(self) -> int:
        """The number of replicas; `num_replicas_in_sync` today."""
        return self.num_replicas_in_sync

    @property
    def num_towers_per_host(self) -> int:
        """The number of replicas that each machine runs."""
        return self.num_towers // self.num_hosts

    @property
    def is_single_tower(self) -> bool:
        """Whether there is only one replica."""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> list[str]:
        """For each tower, the TensorFlow device that has its values before and after a run."""
        return list(self.extended.worker_devices)

    @property
    def worker_device_index(self) -> distribute.PerReplica:
        """Each tower's index, to pass to `call_for_each_tower`."""
        return regroup([tf.constant(tower) for tower in range(self.num_towers)], what="The numbers of the towers")

    @property
    def parameter_devices(self) -> list[str]:
        """The host devices of variables."""
        return list(self.extended.parameter_devices)

    @property
    def between_graph(self) -> bool:
        """Always False: all towers are in one program."""
        return False

    @property
    def should_init(self) -> bool:
        """Whether this process initializes variables: worker 0 does, and its values count on all workers."""
        return self.extended.experimental_should_init

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: worker 0 does."""
        return self.extended.should_checkpoint

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: worker 0 does."""
        return self.extended.should_save_summary

    def _is_over_towers(self, value: object) -> bool:
        """Whether `value` is a list with one element per tower, and not a list of distributed values."""
        if not isinstance(value, list) or len(value) != self.num_towers or in_body() is not None:
            return False
        return not any(isinstance(leaf, distribute.DistributedValues) for leaf in tf.nest.flatten(value))

    def _reduce_leaf(self, how: str, value: object) -> tf.Tensor:
        if how == "NONE":
            raise ContribError.bad_aggregation("NONE", _AGGREGATIONS[:3])
        if isinstance(value, MapOutput):
            first, *rest = value.get()
            if how == "ONLY_FIRST_TOWER":
                return first
            values = [tf.convert_to_tensor(each) for each in (first, *rest)]
            return distribute.total(values, len(values) if how == "MEAN" else 1)
        if how != "ONLY_FIRST_TOWER":
            return self.extended.reduce_to(tf.distribute.ReduceOp[how], value, _HOST)
        if in_body() is None:
            return self.unwrap(value)[0]
        return _broadcast_first_tower(value)

    def _check_destinations(self, destinations: object) -> None:
        """Raises for a device that results cannot be on. In a body, every device has all results."""
        if destinations is None or in_body() is not None:
            return
        several = destinations if isinstance(destinations, (list, tuple)) else [destinations]
        for each in several:
            if isinstance(each, str) and distribute.resolve(each) != _HOST:
                raise ContribError(
                    f"A reduced value cannot be put on {each!r}: outside a step all values are on the host. Pass "
                    f"{_HOST!r}, distribution.get_host_cpu_device(0), or a variable of this strategy as the "
                    "destination."
                )


class MapOutput:
    """The result of `map`: a list of values that has nothing to do with towers."""

    def __init__(self, values: list[object]):
        self._values = values

    def get(self) -> list[Any]:
        """The values, as a list."""
        return list(self._values)


class MultiStepContext(_MultiStepContext):
    """Today's context of a device loop, with aggregations; outputs without aggregation are lists over towers."""

    @autograph.artifact
    def set_last_step_output(
        self, name: str, output: object, aggregation: Aggregation = tf.VariableAggregation.NONE
    ) -> None:
        """Passes a value out of the last step.

        Args:
            name: the key of the value in `last_step_outputs`.
            output: a tensor, or a structure of tensors.
            aggregation: SUM, MEAN or ONLY_FIRST_TOWER for one value, NONE for a list over towers. In tower context it
                must not be NONE.

        Raises:
            ContribError: the aggregation does not exist, or is NONE in tower context.
        """
        how = _aggregation(aggregation)
        if how == "NONE":
            if not tf.distribute.in_cross_replica_context():
                raise ContribError(
                    f"The output {name!r} is set in tower context and needs an aggregation: SUM, MEAN or "
                    "ONLY_FIRST_TOWER. To keep the value of each tower, set the output in the step function "
                    "itself, which runs in cross-tower context."
                )
            super().set_last_step_output(name, output)
        elif how == "ONLY_FIRST_TOWER":
            self._pass_out(name, output, lambda _, leaf: _broadcast_first_tower(leaf))
        else:
            super().set_last_step_output(name, output, how)

    @staticmethod
    def of_replicas(name: str, values: list[object]) -> list[object]:
        """The entry of `last_step_outputs` for an output that is not aggregated: a list over towers."""
        return list(values)


class TowerContext:
    """A replica context with the names of 2018."""

    def __init__(self, context: tf.distribute.ReplicaContext):
        self._context = context

    @autograph.artifact
    def merge_call(self, merge_fn: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Calls `merge_fn(distribution, *args, **kwargs)` in cross-tower context."""
        return self._context.merge_call(merge_fn, args, kwargs)

    @property
    def num_towers(self) -> int:
        """The number of towers."""
        return self._context.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is only one tower."""
        return self.num_towers == 1

    @property
    def tower_id(self) -> int | tf.Tensor:
        """The index of this tower; a tensor in a compiled body."""
        return self._context.replica_id_in_sync_group

    @property
    def distribution_strategy(self) -> tf.distribute.Strategy:
        """The strategy."""
        return self._context.strategy

    @property
    def device(self) -> str:
        """The device of this tower's values on the host."""
        return self._context.devices[0]


class _DatasetOf2018:
    """A distributed dataset with the iterators of 2018."""

    def __init__(self, dataset: tf.distribute.DistributedDataset):
        self._dataset = dataset

    def make_one_shot_iterator(self) -> _Iterator:
        """Makes an iterator that starts now."""
        return _Iterator(self._dataset)

    def make_initializable_iterator(self) -> _Iterator:
        """Makes an iterator that starts now, and starts again with `initialize`."""
        return _Iterator(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


class _Iterator:
    """An iterator with `get_next`."""

    def __init__(self, dataset: tf.distribute.DistributedDataset):
        self._dataset = dataset
        self._iterator = iter(dataset)

    @property
    def initializer(self) -> None:
        """Starts the iterator again and returns None: in eager mode a session has nothing left to run."""
        self.initialize()

    def initialize(self) -> None:
        """Starts the iterator again."""
        self._iterator = iter(self._dataset)

    def get_next(self) -> Any:
        """The next batches, one per tower.

        Raises:
            tf.errors.OutOfRangeError: the dataset has ended.
        """
        try:
            return next(self._iterator)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __next__(self) -> Any:
        return next(self._iterator)


def get_tower_context() -> TowerContext | None:
    """The context of the tower that runs this code; None in cross-tower context."""
    context = tf.distribute.get_replica_context()
    return None if context is None else TowerContext(context)


def in_cross_tower_context() -> bool:
    """Whether this code runs in cross-tower context."""
    return tf.distribute.in_cross_replica_context()


def get_distribution_strategy() -> tf.distribute.Strategy:
    """The strategy whose scope is current."""
    return tf.distribute.get_strategy()


def has_distribution_strategy() -> bool:
    """Whether a strategy's scope is current."""
    return tf.distribute.has_strategy()


def _aggregation(given: Aggregation | None) -> str:
    name = str(getattr(given, "name", given)).upper().replace("ONLY_FIRST_REPLICA", "ONLY_FIRST_TOWER")
    if name not in _AGGREGATIONS:
        raise ContribError.bad_aggregation(given, _AGGREGATIONS[:3])
    return name


def _broadcast_first_tower(value: object) -> tf.Tensor:
    """In a body: returns the first tower's value on all towers."""
    return xla.all_gather(tf.convert_to_tensor(value)[tf.newaxis])[0]


def _listed(result: object, grouped: bool) -> Any:
    """Replaces tuples over towers by lists, unless `grouped`."""
    if grouped:
        return result
    if type(result) is tuple:
        inner = [_listed(each, False) for each in result]
        return tuple(inner) if any(type(each) in (tuple, dict, list) for each in result) else inner
    return {name: _listed(each, False) for name, each in result.items()} if type(result) is dict else result
