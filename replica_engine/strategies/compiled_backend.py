"""The backend of TPUStrategy and its hooks of `tf.distribute`: one program that runs on all devices.

`CompiledBackend` compiles the replica body to that program. `TPUExtended` has the hooks, on the host and in a compiled
body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replica_engine import xla
from replica_engine.backend import Arguments, Backend, HostSide, Keywords
from replica_engine.diagnostics import flight_record, user_frames
from replica_engine.pjrt.device_group import DeviceGroup, is_needed_by_a_program
from replica_engine.pjrt.plan import DeviceMemory, Plan
from replica_engine.process import setup, shutdown
from replica_engine.strategies import argument_checks, device_variables, keras_scopes, multi_step, worker_values
from replica_engine.strategies.device_loops import LoopSettings, run_steps
from replica_engine.strategies.extended import ExtendedHooks, as_tensors
from replica_engine.strategies.variable_layouts import Distribution, VariableTable
from replica_engine.upstream import distribute, eager
from replica_engine.values import variable_numbers
from replica_engine.values.regroup import spread
from replica_engine.xla import body_context, collectives, constraints
from replica_engine.xla.body import LaunchLimits, in_body
from replica_engine.xla.calls import body_calls
from replica_engine.xla.calls.program_table import ProgramTable
from replica_engine.xla.function_spec import FunctionSpec
from replica_engine.xla.stages import collective_meetings, launch
from replica_engine.xla.state.host_variable import handles_compared


class CompiledBackend(Backend):
    """Compiles what the replicas of a `TPUStrategy` run, and runs it on their devices.

    Args:
        strategy: the strategy.
        devices: the devices that the replicas run on.
        same_random: whether random ops draw the same numbers on all replicas.
        limits: how long a launch, or a wait for other workers, may take.
        soft_placement: whether ops that XLA cannot compile run on the host; None follows TensorFlow's setting.
        distribution: how variables are divided over the devices of a replica; None if it has one.

    Attributes:
        device_group, same_random, limits, distribution: as above.
        variable_table: the variables of the strategy.
        initial_programs: the programs that make initial values of variables in parts.
        random_numbers: what the replicas draw from, for checkpoints.
    """

    compiles = True

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: DeviceGroup,
        same_random: bool,
        limits: LaunchLimits,
        soft_placement: bool | None,
        distribution: Distribution | None,
    ):
        super().__init__(strategy)
        body_context.use_own_values()
        if devices.member is not None:
            worker_values.raise_job_failures(devices.member)  # before the first op, which may fail
        self.device_group, self.same_random = devices, same_random
        self.limits, self.distribution = limits, distribution
        self.saving = worker_values.saving_on(devices, limits)
        self.variable_table = VariableTable(devices.mesh.axes if devices.mesh else ())
        name = type(strategy).__name__
        self._programs = ProgramTable(
            devices, self._in_replica_context, same_random, name=name, limits=limits, soft_placement=soft_placement
        )
        self.initial_programs = self._programs.for_owner()
        self._reductions = self._programs.for_owner()  # each shape of `over_workers` is a trace
        self.random_numbers = self._programs.body.random

    def run(
        self,
        fn: Callable[..., Any],
        args: Arguments = (),
        kwargs: Keywords = None,
        programs: ProgramTable | None = None,
    ) -> Any:
        """Same as in every backend, also with a table of programs of the caller (see `own_programs`)."""
        setup.check_not_forked()
        source, size = FunctionSpec.from_callable(fn), self.device_group.size
        # In eager mode no code below needs the scope; a trace enters it.
        with contextlib.nullcontext() if tf.executing_eagerly() else self.strategy.scope():
            args, kwargs = spread(args, size, "args"), spread(kwargs or {}, size, "kwargs")
            return body_calls.call_with_numbers(programs or self._programs, source, args, kwargs)

    def run_again(
        self, fn: Callable[..., Any], args: Sequence[Any], programs: ProgramTable | None = None
    ) -> tuple[Any] | None:
        """Runs a function in eager mode, outside all scopes, whose last call was like this one.

        What is checked in every other call was checked in that one. With a table of programs of the caller, this is the
        quick half of `run`.
        """
        if not tf.executing_eagerly() or in_body() is not None or not distribute.is_outside_scopes():
            return None
        if not isinstance(args, (list, tuple)):
            return None  # nothing has checked them yet
        setup.check_not_forked()
        found = (programs or self._programs).last(fn, args)
        if found is None:
            return None
        compiled, slots = found
        # Once Python exits, a thread other than the main one must launch nothing: it waits here until the process ends.
        with shutdown.running():
            columns = launch.Launch(compiled)(slots).columns()
        return (compiled.program.traced.grouped_results(columns),)

    def result_specs(self, programs: ProgramTable, fn: Callable[..., Any], args: Sequence[Any]) -> list[tf.TensorSpec]:
        """The specs of the tensors that `run` would return on a replica; the function is traced and does not run."""
        source, size = FunctionSpec.from_callable(fn), self.device_group.size
        with self.strategy.scope():
            arguments, shapes = source.arguments(spread(args, size, "args"), {}, size)
            return list(programs.trace(source, arguments, shapes).traced.outputs)

    def run_steps(self, fn: Callable[..., Any], iterator: Any, settings: LoopSettings) -> multi_step.MultiStepContext:
        """Same as `TPUStrategy.run_steps`, with all settings of a device loop."""
        return run_steps(self.strategy, self._programs, fn, iterator, settings)

    def own_programs(self) -> ProgramTable:
        """A new table of programs for `run` or `run_steps`, which the strategy does not keep alive."""
        return self._programs.for_owner()

    def plan(self, fn: Callable[..., Any], args: Any, kwargs: Any, topology: str | None) -> Plan:
        """Same as `TPUStrategy.plan`."""
        size = self.device_group.size
        args, kwargs = spread(args, size, "args"), spread(kwargs, size, "kwargs")
        return body_calls.plan(self._programs, FunctionSpec.from_callable(fn), args, kwargs, topology)

    def memory(self) -> DeviceMemory:
        """Same as `TPUStrategy.memory`."""
        names = self.device_group.device_names
        return DeviceMemory([self.variable_table.bytes] * len(names), self._programs.last_memory(), names)

    def over_workers(self, reduction: Any, value: Any) -> Any:
        """Reduces a value of each replica over the replicas of all workers.

        Args:
            reduction: a `tf.distribute.ReduceOp` or its name, `worker_values.FIRST`, or ("gather", axis).
            value: a distributed value or an ON_READ variable.
        """
        lines = ", ".join(user_frames.calling_lines(None))
        compared = lines
        if isinstance(value, distribute.DistributedVariable):  # the chief may read it in another line
            (number,) = variable_numbers.numbers(map(eager.raw_handle, value._values)) or ("?",)
            compared = f"variable {number}"
            lines = f"{lines} ({compared})"
            # The components: reading the variable itself would come back to this method to aggregate them.
            value = distribute.PerReplica(tuple(component.read_value() for component in value._values))
        elif not isinstance(value, distribute.DistributedValues):
            value = distribute.PerReplica((value,))
        reducer = worker_values.reducer(reduction, lines, compared)
        value = as_tensors(value, self.strategy.extended.worker_devices)
        return distribute.select_replica(0, self.run(reducer, (value,), programs=self._reductions))

    def sync_points(self) -> list[flight_record.SyncPointRecord]:
        """The last sync points of each replica, in the order of time."""
        return self._programs.body.records()

    def find_host_side(self, variable: tf.Variable) -> HostSide | None:
        """The host's side of a variable whose value lives on devices; None if the variable itself holds the value."""
        return device_variables.find_host_side(variable)

    @contextlib.contextmanager
    def _in_replica_context(self) -> Iterator[None]:
        strategy = self.strategy
        layouts = contextlib.nullcontext() if self.distribution is None else self.distribution.while_traced(strategy)
        with strategy.scope(), body_context.BodyReplicaContext(strategy), layouts:
            yield


class _OverWorkers(distribute.MirroredExtended):
    """TensorFlow's extended half, with the hooks that concern the replicas of all workers.

    Those that `TPUExtended` has too come after `ExtendedHooks`, which takes structures apart, and after `HostDatasets`.
    """

    backend: CompiledBackend
    device_group: DeviceGroup

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce` and `reduce_to`, for one value in cross-replica context."""
        if self.device_group.member is None or not self._has_parts(value):
            return super()._reduce_to(reduce_op, value, destinations, options)
        return self.backend.over_workers(reduce_op, value)

    def _has_parts(self, value: Any) -> bool:
        """Whether a value may differ by replica. What `run` returns is not wrapped where a worker has one replica."""
        if isinstance(value, distribute.DistributedVariable):
            return isinstance(value, distribute.SyncOnReadVariable)
        if isinstance(value, (distribute.DistributedValues, tf.Variable)):
            return isinstance(value, distribute.PerReplica)
        return self.device_group.size == 1

    def _make_input_context(self) -> tf.distribute.InputContext:
        """The hook of TensorFlow's code for several workers."""
        devices = self.device_group
        return tf.distribute.InputContext(
            devices.replicas // devices.size, devices.first // devices.size, devices.replicas
        )

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """The hook of `experimental_distribute_dataset`: this worker's part of the dataset."""
        if self.device_group.member is None:
            return super()._experimental_distribute_dataset(dataset, options)
        return distribute.MultiWorkerMirroredExtended._experimental_distribute_dataset(self, dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        """The hook of `distribute_datasets_from_function`."""
        if self.device_group.member is None:
            return super()._distribute_datasets_from_function(dataset_fn, options)
        return distribute.MultiWorkerMirroredExtended._distribute_datasets_from_function(self, dataset_fn, options)

    def have_batches(self) -> Callable[[Any], Any] | None:
        """How the workers agree whether there is a batch; see `HostDatasets`."""
        return None if self.device_group.member is None else self._all_have_batch

    def _all_have_batch(self, has: Any) -> Any:
        """Like `all_have`; but batches that are fetched for a running program are agreed on by that program."""
        if not tf.executing_eagerly():
            mine = tf.cast(has, tf.int32)
            return self.backend.over_workers("MIN", distribute.PerReplica((mine,) * self.device_group.size)) > 0
        # A launch here would wait for that program, which waits for this thread.
        if is_needed_by_a_program():
            return has
        return worker_values.all_have(self.device_group, bool(has), self.backend.limits)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        """The hook of `experimental_distribute_values_from_function`: the values of this worker's replicas."""
        devices = self.device_group
        if devices.member is None:
            return super()._experimental_distribute_values_from_function(value_fn)
        ids = range(devices.first, devices.first + devices.size)
        contexts = [tf.distribute.experimental.ValueContext(id, devices.replicas) for id in ids]
        return distribute.regroup([value_fn(context) for context in contexts], always_wrap=True)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.device_group.replicas

    @property
    def experimental_should_init(self) -> bool:
        """Whether this worker is the chief, who writes checkpoints and summaries too."""
        return self.device_group.is_chiefs

    should_checkpoint = should_save_summary = experimental_should_init


class TPUExtended(ExtendedHooks, _OverWorkers):
    """The extended half of `TPUStrategy`.

    Before and after a run, values are on the host. In cross-replica context, TensorFlow's own code
    (`MirroredExtended`, with the host as the device of every replica) works on them there. Inside a body, every
    operation of a merge function becomes an op of the compiled program.

    Attributes:
        backend: compiles and runs functions.
        device_group: the devices that the replicas run on.
        steps_per_run: how many steps one launch of a device loop runs if the call does not say.
    """

    def __init__(self, strategy: tf.distribute.Strategy, backend: CompiledBackend, steps_per_run: int):
        self.backend, self.device_group, self.steps_per_run = backend, backend.device_group, steps_per_run
        super().__init__(strategy, [distribute.resolve("CPU:0")] * self.device_group.size, distribute.QuietReduction())

    def _initialize_strategy(self, devices: list[str]) -> None:
        """The hook that sets up devices; TensorFlow's own hook requires a different device for each replica."""
        self._initialize_single_worker(tuple(devices))

    def sync_points(self) -> list[flight_record.SyncPointRecord]:
        """Same as `TPUStrategy.sync_points`."""
        return self.backend.sync_points()

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The hook that runs `fn` on the replicas."""
        if in_body() is not None:  # called by a merge function, or by strategy.reduce(axis=...) in one
            with body_context.BodyReplicaContext(self._container_strategy()):
                return fn(*args, **kwargs)
        return self.backend.run(fn, args, kwargs)

    def call_for_each_replica(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Same as in every strategy; in a step of `run_steps`, which is in replica context, it calls `fn` directly."""
        if distribute.is_outside_scopes() and tf.executing_eagerly():  # the usual case: nothing is around the call
            return self._call_for_each_replica(fn, args, kwargs or {})
        context = tf.distribute.get_replica_context()
        if isinstance(context, body_context.BodyReplicaContext) and context.is_step:
            return fn(*args, **kwargs or {})
        if in_body() is not None or not tf.executing_eagerly():
            return super().call_for_each_replica(fn, args, kwargs)
        distribute.check_cross_replica(self)
        return self._call_for_each_replica(fn, args, kwargs or {})

    def experimental_run_steps_on_iterator(
        self, fn: Callable[..., Any], iterator: Any, iterations: int | None = None, initial_loop_values: Any = None
    ) -> multi_step.MultiStepContext:
        """Runs steps in cross-replica context, as in every strategy; `iterations` defaults to `steps_per_run`."""
        settings = LoopSettings(iterations, initial_loop_values, in_replica=False, spread=False)
        return self.backend.run_steps(fn, iterator, settings)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The hook that makes variables. It extends Keras' optimizers, before they make their accumulators."""
        keras_scopes.extend_optimizers()
        colocate_with = kwargs.pop("colocate_with", None)
        if colocate_with is not None and not isinstance(colocate_with, (tf.Variable, list, tuple)):
            return next_creator(**kwargs)
        return device_variables.create(self._container_strategy(), next_creator, kwargs)

    @property
    def num_hosts(self) -> int:
        """The number of workers: processes with devices."""
        return self.device_group.workers

    @property
    def num_replicas_per_host(self) -> int:
        """The number of replicas of each worker."""
        return self.device_group.size

    @property
    def tpu_hardware_feature(self) -> Any:
        """A `tf.tpu.experimental.HardwareFeature` that has no embedding accelerator."""
        return distribute.hardware_without_embeddings()

    def experimental_logical_device(self, logical_device_id: int) -> contextlib.AbstractContextManager[None]:
        """Names a device of each replica for variables and ops. XLA's partitioner chooses the devices of both.

        Raises:
            DeviceError: a replica has no device of this number.
        """
        return constraints.logical_device(logical_device_id, self.device_group.devices_each)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce` and `reduce_to`."""
        if in_body() is None or isinstance(value, (int, float)):
            return super()._reduce_to(reduce_op, value, destinations, options)
        # Only sums: the mean of a value that all replicas share is that value, but its sum is an error, as on threads.
        if reduce_op == tf.distribute.ReduceOp.SUM:
            for leaf in tf.nest.flatten(value):
                collectives.note(leaf)
        return tf.nest.map_structure(
            lambda leaf: body_context.reduce_leaf(reduce_op, _own(body_context.own_values(leaf))), value
        )

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook of `batch_reduce_to`."""
        return [self._reduce_to(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        """The hook of `gather`."""
        if in_body() is not None:
            return body_context.gather_leaf(value, axis)
        if self.device_group.member is None or not self._has_parts(value):
            return super()._gather_to_implementation(value, destinations, axis, options)
        return self.backend.over_workers(("gather", axis), value)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The hook of `broadcast_to`."""
        return super()._broadcast_to(tensor, destinations) if in_body() is None else tensor

    def _local_results(self, value: Any) -> tuple:
        """The hook of `experimental_local_results`; for a tensor in a body, the values of all replicas."""
        if isinstance(value, distribute.DistributedVariable):
            return value.values
        if in_body() is None or isinstance(value, (distribute.DistributedValues, tf.Variable)):
            return super()._local_results(value)
        if isinstance(value, tf.__internal__.CompositeTensor):  # such as the rows that a variable is updated with
            columns = map(self._local_results, tf.nest.flatten(value, expand_composites=True))
            rows = zip(*columns, strict=True)
            return tuple(tf.nest.pack_sequence_as(value, row, expand_composites=True) for row in rows)
        if not tf.is_symbolic_tensor(value) or collective_meetings.is_equal_everywhere(value):
            return (value,) * self.device_group.replicas
        return tuple(tf.unstack(xla.all_gather(value[tf.newaxis], axis=0)))

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """The hook of `update`: one call if all replicas share one value, one call per component of on-read ones."""
        argument_checks.check_updated(var, args)
        # By identity: one variable on the host may stand for all replicas, and is updated once.
        components = list({id(component): component for component in var._values}.values())
        if in_body() is not None:
            with distribute.UpdateContext(0), tf.name_scope("update_0"):
                args, kwargs = distribute.first_values(body_context.own_values((args, kwargs)))
                result = fn(components[0], *args, **kwargs)
            if group:
                return tf.nest.map_structure(_as_value, result)
            return tf.nest.map_structure(lambda leaf: (leaf,) * self.device_group.replicas, result)
        # One variable gets a value of each replica. Otherwise that of replica 0 would count for all, without a word.
        if len(components) < self.device_group.size and body_context.has_several((args, kwargs)):
            if not tf.executing_eagerly():
                args, kwargs = body_context.check_equal((args, kwargs))
            elif body_context.differ((args, kwargs)):
                rows = [distribute.select_replica(index, (args, kwargs)) for index in range(self.device_group.size)]
                return self._updated(body_context.update_each(components[0], fn, rows), group)
        updates = []
        for index, component in enumerate(components):
            with tf.device(component.device), distribute.UpdateContext(index), tf.name_scope(f"update_{index}"):
                updates.append(
                    fn(component, *distribute.select_replica(index, args), **distribute.select_replica(index, kwargs))
                )
        return self._updated(updates, group)

    def _update_non_slot(self, colocate_with: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """The hook of `update_non_slot`: one call, because all replicas share one variable on the host."""
        with distribute.UpdateContext(0), tf.name_scope("update_0"):
            result = fn(*distribute.select_replica(0, args), **distribute.select_replica(0, kwargs))
        return self._updated([result], group)

    def _updated(self, updates: list[Any], group: bool) -> Any:
        """The return value of an update: from one result for all replicas, or from one result per replica."""
        size = self.device_group.size
        if len(updates) == 1 and not group:
            return tf.nest.map_structure(lambda leaf: (leaf,) * size, updates[0])
        # TensorFlow regroups by handles, and only compares them. The values stay on the devices.
        with handles_compared():
            return distribute.update_regroup(self, updates * (size // len(updates)), group)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """The hook of the all-reduces that TensorFlow itself makes in replica context."""
        return tf.nest.map_structure(lambda leaf: body_context.reduce_leaf(reduce_op, leaf), value)

    def _use_merge_call(self) -> bool:
        """The hook that says whether replicas must meet to update a variable."""
        return not distribute.is_merged()


def _own(value: Any) -> Any:
    """In a body, each replica's own value of a variable; reading the distributed variable would reduce it first."""
    return value._values[0] if isinstance(value, distribute.DistributedVariable) else value


def _as_value(result: Any) -> Any:
    return tf.identity(result) if isinstance(result, tf.Variable) else result
