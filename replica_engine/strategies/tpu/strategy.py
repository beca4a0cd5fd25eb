"""TPUStrategy: the replica body compiled to one program that runs on N devices of any PJRT platform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine import xla
from replica_engine._tf import distribute
from replica_engine._tf.graphs import autograph
from replica_engine._tf.host_datasets import HostDatasets
from replica_engine._tf.keras import hooks as keras_hooks
from replica_engine._tf.reduction import QuietReduction
from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.diagnostics.misuse import explained
from replica_engine.diagnostics.tracebacks import as_raised, shortened
from replica_engine.errors.base import positive_int, shown
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.pjrt.plans.plan import DeviceMemory, Plan
from replica_engine.process import pool, shutdown
from replica_engine.process.fork import check_not_forked
from replica_engine.strategies import accumulation
from replica_engine.strategies.backend import HostSide, OnBackend, has_backend
from replica_engine.strategies.devices import described
from replica_engine.strategies.multi_step import MultiStepContext
from replica_engine.strategies.reductions import Reductions
from replica_engine.strategies.tpu import keras_steps, variables
from replica_engine.strategies.tpu.api import LogicalDevices, TPUFacts
from replica_engine.strategies.tpu.device_loops import LoopSettings, run_steps
from replica_engine.strategies.tpu.distribution import Distribution, assigned, read
from replica_engine.strategies.tpu.planning import Planning
from replica_engine.strategies.tpu.variable_table import VariableTable
from replica_engine.strategies.tpu.workers import ModelsOverWorkers, OverWorkers, explain_failures, saving_on
from replica_engine.strategies.validation import check_flags, check_seconds, check_updated, names_keywords
from replica_engine.values.regroup import spread
from replica_engine.xla import own_values, shared_sums
from replica_engine.xla.analysis.differences import is_equal_everywhere
from replica_engine.xla.body import LaunchLimits, check_mode, in_body
from replica_engine.xla.context import BodyReplicaContext, gather_leaf, reduce_leaf, use_own_values
from replica_engine.xla.graph_op import call_with_numbers
from replica_engine.xla.graph_op import plan as plan_call
from replica_engine.xla.resolver import PjrtClusterResolver
from replica_engine.xla.signature.function_spec import FunctionSpec
from replica_engine.xla.stages.launch import Launch
from replica_engine.xla.stages.program_table import ProgramTable
from replica_engine.xla.state.host_variable import handles_compared


class TPUExtended(TPUFacts, Reductions, HostDatasets, OverWorkers, distribute.MirroredExtended):
    """The extended half of `TPUStrategy`.

    Before and after a run, values are on the host. In cross-replica context, TensorFlow's own code
    (`MirroredExtended`, with the host as the device of every replica) works on them there. Inside a body, every
    operation of a merge function becomes an op of the compiled program.

    Attributes:
        device_group: the devices that the replicas run on.
        limits: how long a launch, or a wait for other workers, may take.
        distribution: how variables are divided over the devices of a replica; None if it has one.
        variable_table: the variables of the strategy.
        initial_programs: the programs that make initial values of variables in parts.
    """

    compiles = True

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: DeviceGroup,
        same_random: bool,
        limits: LaunchLimits,
        soft_placement: bool | None = None,
        distribution: Distribution | None = None,
    ):
        use_own_values()
        self.device_group = devices
        self.distribution = distribution
        self.limits = limits
        self.saving = saving_on(devices, limits)
        if devices.member is not None:
            explain_failures(devices.member)
        self._same_random = same_random
        self.variable_table = VariableTable(devices.mesh.axes if devices.mesh else ())
        name = type(strategy).__name__
        self._programs = ProgramTable(
            devices, self._in_replica_context, same_random, name=name, limits=limits, soft_placement=soft_placement
        )
        self.initial_programs = self._programs.for_owner()
        self.random_numbers = self._programs.body.random  # for checkpoints
        host = distribute.resolve("CPU:0")
        super().__init__(strategy, [host] * devices.size, QuietReduction())

    def _initialize_strategy(self, devices: list[str]) -> None:
        """The hook that sets up devices; TensorFlow's own hook requires a different device for each replica."""
        self._initialize_single_worker(tuple(devices))

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The hook that runs `fn` on the replicas."""
        if in_body() is not None:  # called by a merge function, or by strategy.reduce(axis=...) in one
            with BodyReplicaContext(self._container_strategy()):
                return fn(*args, **kwargs)
        check_not_forked()
        return self.run_of(self._programs, fn, args, kwargs)

    def run_of(self, programs: ProgramTable, fn: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        """Like `strategy.run`, with a table of programs of the caller (see `own_programs`)."""
        source, size = FunctionSpec.of(fn), self.device_group.size
        # In eager mode no code below needs the scope; a trace enters it.
        with contextlib.nullcontext() if tf.executing_eagerly() else self._container_strategy().scope():
            args, kwargs = spread(args, size, "args"), spread(kwargs or {}, size, "kwargs")
            return call_with_numbers(programs, source, args, kwargs)

    def result_specs(self, programs: ProgramTable, fn: Callable[..., Any], args: Any) -> list[tf.TensorSpec]:
        """The specs of the tensors that `run_of` would return on a replica; the function is traced and does not run."""
        source, size = FunctionSpec.of(fn), self.device_group.size
        with self._container_strategy().scope():
            arguments, shapes = source.arguments(spread(args, size, "args"), {}, size)
            return list(programs.trace(source, arguments, shapes).traced.outputs)

    def run_again(self, fn: Callable[..., Any], args: Any, programs: ProgramTable | None = None) -> tuple[Any] | None:
        """Runs a function in eager mode, outside all scopes, whose last call was like this one.

        What is checked in every other call was checked in that one. A subclass may run functions in another way.
        With a table of programs of the caller, this is the quick half of `run_of`.
        """
        if type(self) is not TPUExtended or not tf.executing_eagerly() or in_body() is not None:
            return None
        if not distribute.is_outside_scopes():
            return None
        if not isinstance(args, (list, tuple)):
            return None  # nothing has checked them yet
        check_not_forked()
        found = (programs or self._programs).last(fn, args)
        if found is None:
            return None
        compiled, slots = found
        with shutdown.running():
            columns = Launch(compiled)(slots).columns()
        return (compiled.program.traced.grouped_results(columns),)

    @contextlib.contextmanager
    def _in_replica_context(self) -> Iterator[None]:
        strategy = self._container_strategy()
        layouts = contextlib.nullcontext() if self.distribution is None else self.distribution.while_traced(strategy)
        with strategy.scope(), BodyReplicaContext(strategy), layouts:
            yield

    def call_for_each_replica(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Same as in every strategy; in a step of `run_steps`, which is in replica context, it calls `fn` directly."""
        if distribute.is_outside_scopes() and tf.executing_eagerly():  # the usual case: nothing is around the call
            return self._call_for_each_replica(fn, args, kwargs or {})
        context = tf.distribute.get_replica_context()
        if isinstance(context, BodyReplicaContext) and context.is_step:
            return fn(*args, **kwargs or {})
        if in_body() is not None or not tf.executing_eagerly():
            return super().call_for_each_replica(fn, args, kwargs)
        distribute.check_cross_replica(self)
        return self._call_for_each_replica(fn, args, kwargs or {})

    def plan(self, fn: Callable[..., Any], args: Any, kwargs: Any, topology: str | None) -> Plan:
        """Same as `TPUStrategy.plan`."""
        size = self.device_group.size
        args, kwargs = spread(args, size, "args"), spread(kwargs, size, "kwargs")
        return plan_call(self._programs, FunctionSpec.of(fn), args, kwargs, topology)

    def memory(self) -> DeviceMemory:
        """Same as `TPUStrategy.memory`."""
        names = self.device_group.device_names
        return DeviceMemory([self.variable_table.bytes] * len(names), self._programs.last_memory(), names)

    def sync_points(self) -> list[SyncPointRecord]:
        """Same as `TPUStrategy.sync_points`."""
        return self._programs.sync_points()

    def host_side_of(self, variable: Any) -> HostSide | None:
        """The host's side of a variable whose value lives on devices; None if the variable itself holds the value."""
        return variables.host_side_of(variable)

    def own_programs(self) -> ProgramTable:
        """A new table of programs for `run_of` or `run_steps`, which the strategy does not keep alive."""
        return self._programs.for_owner()

    def experimental_run_steps_on_iterator(
        self, fn: Callable[..., Any], iterator: Any, iterations: int | None = None, initial_loop_values: Any = None
    ) -> MultiStepContext:
        """Runs steps in cross-replica context, as in every strategy; `iterations` defaults to `steps_per_run`."""
        settings = LoopSettings(iterations, initial_loop_values, in_replica=False, spread=False)
        return self.run_steps(fn, iterator, settings)

    def run_steps(self, fn: Callable[..., Any], iterator: Any, settings: LoopSettings) -> Any:
        """Same as `TPUStrategy.run_steps`, with all settings of a device loop."""
        return run_steps(self._container_strategy(), self._programs, fn, iterator, settings)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The hook that makes variables. It extends Keras' optimizers, before they make their accumulators."""
        accumulation.extend_keras(has_backend)
        colocate_with = kwargs.pop("colocate_with", None)
        if colocate_with is not None and not isinstance(colocate_with, (tf.Variable, list, tuple)):
            return next_creator(**kwargs)
        return variables.create(self._container_strategy(), next_creator, kwargs, self._same_random, self.distribution)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce` and `reduce_to`."""
        if in_body() is None or isinstance(value, (int, float)):
            return super()._reduce_to(reduce_op, value, destinations, options)
        if reduce_op == tf.distribute.ReduceOp.SUM:
            for leaf in tf.nest.flatten(value):
                shared_sums.note(leaf)
        return tf.nest.map_structure(lambda leaf: reduce_leaf(reduce_op, _own(own_values.own_values(leaf))), value)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook of `batch_reduce_to`."""
        return [self._reduce_to(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        """The hook of `gather`."""
        if in_body() is None:
            return super()._gather_to_implementation(value, destinations, axis, options)
        return gather_leaf(value, axis)

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
        if not tf.is_symbolic_tensor(value) or is_equal_everywhere(value):
            return (value,) * self.device_group.replicas
        return tuple(tf.unstack(xla.all_gather(value[tf.newaxis], axis=0)))

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """The hook of `update`: one call if all replicas share one value, one call per component of on-read ones."""
        check_updated(var)
        components = list({id(component): component for component in var._values}.values())
        if in_body() is not None:
            with distribute.UpdateContext(0), tf.name_scope("update_0"):
                args, kwargs = distribute.first_values(own_values.own_values((args, kwargs)))
                result = fn(components[0], *args, **kwargs)
            if group:
                return tf.nest.map_structure(_as_value, result)
            return tf.nest.map_structure(lambda leaf: (leaf,) * self.device_group.replicas, result)
        if len(components) < self.device_group.size and own_values.has_several((args, kwargs)):
            if not tf.executing_eagerly():
                args, kwargs = own_values.check_equal((args, kwargs))
            elif own_values.differ((args, kwargs)):
                rows = [distribute.select_replica(index, (args, kwargs)) for index in range(self.device_group.size)]
                return self._updated(own_values.update_each(components[0], fn, rows), group)
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
        with handles_compared():
            return distribute.update_regroup(self, updates * (size // len(updates)), group)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """The hook of the all-reduces that TensorFlow itself makes in replica context."""
        return tf.nest.map_structure(lambda leaf: reduce_leaf(reduce_op, leaf), value)

    def _use_merge_call(self) -> bool:
        """The hook that says whether replicas must meet to update a variable."""
        return not distribute.is_merged()


def _own(value: Any) -> Any:
    """In a body, each replica's own value of a variable; reading the distributed variable would reduce it first."""
    return value._values[0] if isinstance(value, distribute.DistributedVariable) else value


def _as_value(result: Any) -> Any:
    return tf.identity(result) if isinstance(result, tf.Variable) else result


class TPUStrategy(LogicalDevices, Planning, ModelsOverWorkers, OnBackend, tf.distribute.TPUStrategy):
    """Runs a function on N devices as one compiled program: on TPUs, on GPUs, or on the CPU devices of a laptop.

    This class is a subclass of `tf.distribute.TPUStrategy`, so libraries that check for that class take the branch that
    they take on TPUs; `docs/libraries.md` lists them.

    The function is traced once, whatever N is. XLA compiles it for N replicas, and PJRT runs it. `scope`, `run`,
    `reduce`, datasets, Keras `fit`, checkpoints and `extended` work as TensorFlow documents them for strategies.
    Variables live on the devices between steps. Reading a variable on the host returns its value after the last step.

    `run` compiles without a `tf.function`; inside a `tf.function`, the run is a part of that function's graph. As in a
    `tf.function`, Python code runs only while tracing, arguments that are not tensors become constants of the program,
    and a change of shapes causes another compilation.

    Args:
        tpu_cluster_resolver: a `replica_engine.xla.PjrtClusterResolver` that names the platform to run on, and perhaps
            the job. None takes the first of TPUs, GPUs and CPU devices that the machine has, and the job that the
            environment describes, as `docs/hosts/tpu_strategy.md` says: the devices of all workers then run it.
        steps_per_run: how many steps one launch of a device loop runs if the call of `run_steps` does not say.
        num_cores: the number of devices, of all workers together; each gets equally many. None takes all TPUs or GPUs;
            CPU devices are made on request, so None makes one for each core that the process may use.
        same_random_numbers: let random ops draw the same numbers on all replicas. By default each replica draws
            different numbers.
        soft_placement: let ops that XLA cannot compile (strings, tables, summaries, `tf.print`, `tf.py_function`,
            assertions) run on the host, between the ops that run on the devices. False makes them a LoweringError.
            None follows `tf.config.set_soft_device_placement`, which is True by default.
        timeout: the seconds that a launch may take without a sign of life (a host call that starts or returns, a batch
            that is taken) before it raises ReplicaTimeoutError. None waits without a limit. The time to compile does
            not count.
        warn_after: the seconds after which a warning is logged, with a table of where each replica stands; the
            warning repeats at the same interval. None takes the value of the environment variable
            REPLICA_ENGINE_WARN_AFTER, or 30 if it is not set.
        distribution: how a replica with several devices divides its variables and its batch over them. "fsdp" divides
            each variable, gradient and optimizer slot along its largest dimension that divides evenly; "zero1" the
            slots alone; a `keras.distribution.ModelParallel` or `DataParallel` says it by layouts, and its mesh has the
            devices of one replica. None divides nothing. `docs/sharding.md` has more.
        cores_per_replica: the number of devices of each replica; the number of replicas is `num_cores` divided by it.
            None is all devices, or those of the mesh, with a `distribution`, and 1 without.
        experimental_device_assignment: a `tf.tpu.experimental.DeviceAssignment`, or another object with the attributes
            `num_cores_per_replica` and `num_replicas`, in the place of `num_cores` and `cores_per_replica`. The devices
            themselves are the first ones in any case.
        experimental_spmd_xla_partitioning: refuse `experimental_assign_to_logical_device`, as TensorFlow does with it.
            XLA's partitioner divides a replica of several devices in any case.

    Raises:
        BackendMissingError: jax is not installed, or its version does not work. The message names the command to run.
        DeviceError: the platform has fewer devices than `num_cores`, or none; or the workers cannot share them evenly.
        DistributionError: `distribution` is none of these, or does not fit the number of devices.
        ClusterConfigError: the description of the job is wrong.
        WorkersMissingError, WorkerVersionError or WorkerLostError: the job failed to start.
        ValueError: `steps_per_run`, `timeout` or `warn_after` is not positive.
        TypeError: `tpu_cluster_resolver` is not a `replica_engine.xla.PjrtClusterResolver`.
        ReplicaValueError: `same_random_numbers` or `soft_placement` is not True or False.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> strategy.num_hosts, strategy.num_replicas_in_sync
        (1, 2)
        >>> with strategy.scope():
        ...     total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        >>> def fn(x):
        ...     total.assign_add(2 * x)
        ...     return tf.distribute.get_replica_context().all_reduce("SUM", x)
        >>> result = strategy.run(fn, args=(tf.constant(3.0),))
        >>> [float(each) for each in strategy.experimental_local_results(result)], float(total.numpy())
        ([6.0, 6.0], 12.0)
    """

    _collective_key_base = 0  # TensorFlow's extended class asks for a key; no collective of TensorFlow is used

    @names_keywords("TPUStrategy")
    def __init__(
        self,
        tpu_cluster_resolver: PjrtClusterResolver | None = None,
        steps_per_run: int = 1,
        num_cores: int | None = None,
        *,
        same_random_numbers: bool = False,
        soft_placement: bool | None = None,
        timeout: float | None = None,
        warn_after: float | None = None,
        distribution: Any = None,
        cores_per_replica: int | None = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
    ):
        check_flags(experimental_spmd_xla_partitioning=experimental_spmd_xla_partitioning)
        if experimental_device_assignment is not None:
            num_cores, cores_per_replica = assigned(experimental_device_assignment, num_cores, cores_per_replica)
        check_seconds(timeout=timeout, warn_after=warn_after)
        check_flags(same_random_numbers=same_random_numbers)
        if soft_placement is not None:
            check_flags(soft_placement=soft_placement)
        steps = positive_int(steps_per_run)
        if steps is None:
            raise ValueError(f"steps_per_run must be a positive int; got {shown(steps_per_run)}.")
        if tpu_cluster_resolver is not None and not isinstance(tpu_cluster_resolver, PjrtClusterResolver):
            raise TypeError(
                f"tpu_cluster_resolver must be a replica_engine.xla.PjrtClusterResolver or None, got "
                f"{shown(tpu_cluster_resolver)}. For a platform write TPUStrategy(PjrtClusterResolver('gpu')), for a "
                "number of devices TPUStrategy(num_cores=4)."
            )
        resolver = tpu_cluster_resolver or PjrtClusterResolver()
        divided = read(distribution, num_cores, cores_per_replica, lambda: resolver.devices.replicas)
        devices = resolver.group(num_cores) if divided is None else resolver.group(divided.cores, divided.mesh)
        pool.make_room(pool.FOR_LAUNCHES)
        limits = LaunchLimits(timeout, warn_after)
        # Not the parent's __init__: it would connect to TensorFlow's TPU system.
        extended = TPUExtended(self, devices, same_random_numbers, limits, soft_placement, divided)
        extended.steps_per_run = steps
        extended.only_splits = experimental_spmd_xla_partitioning
        tf.distribute.Strategy.__init__(self, extended)
        self._resolver = tpu_cluster_resolver

    def __repr__(self) -> str:
        return described(self, self._compiled_half.device_group.names)

    @property
    def _extended(self) -> TPUExtended:
        """The extended half. Every use of the strategy asks for it, and in a graph of tf.compat.v1 there is none."""
        check_mode()
        return self._compiled_half

    @_extended.setter
    def _extended(self, extended: TPUExtended) -> None:
        self._compiled_half = extended

    def scope(self) -> Any:
        """Like the scope of every strategy. Keras models built in it run `steps_per_execution` steps in one launch."""
        keras_hooks.extend_trainer(keras_steps.device_loop)
        return super().scope()

    @autograph.artifact
    @names_keywords("strategy.run_steps")
    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int | None = None,
        *,
        initial_loop_values: Any = None,
        prefetch: int | None = None,
    ) -> MultiStepContext:
        """Runs `fn` `iterations` times on each replica, many times in a launch: a loop on the devices.

        A thread fetches batches from `iterator` while steps run. All batches must have the structure and shapes of the
        first batch. A launch takes about a second at most; a step that calls the host is a launch of its own.

        Args:
            fn: a step, `def step(context, batch)`. Its first argument is the context, a `MultiStepContext`. If a batch
                is a tuple, its parts may be arguments: `def step(context, x, y)`. The step is called in replica context
                and traced once, or twice if it calls the host; what it returns is ignored. `run`, `reduce` and
                `experimental_local_results` of the strategy also work in it.
            iterator: an iterator of a dataset, or any iterable. An iterator of a distributed dataset gives each replica
                its shard of a batch; any other iterator gives all replicas the same batch, and a warning comes if it is
                one of a plain dataset. `run_steps` takes at most `iterations` batches from it.
            iterations: how many steps to run; None takes `steps_per_run`.
            initial_loop_values: by name, the content of `last_step_outputs` if the iterator yields no batch.
            prefetch: the largest number of batches to fetch ahead. None means two, or more if batches are small: up to
                256, as long as they take no more than half a megabyte on a replica. On TPUs and GPUs it means
                three, or up to 384 that take no more than 12 MiB.

        Returns:
            The context, with the values that the last step passed out.

        Raises:
            tf.errors.OutOfRangeError: the iterator ended early. The results of the steps that ran are kept. The error's
                attribute `context` has the number of these steps (`steps`) and the outputs of the last one.
            InputsError: `fn` does not take a context and the batch; then no step runs. Or a batch is unlike the first
                one; the steps before it are kept, as above.
            Exception: what the iterator, or a host call in `fn`, raised (the steps before are kept, as above), or what
                `fn` raised while it was traced.

        Example:
            >>> import tensorflow as tf, replica_engine
            >>> strategy = replica_engine.TPUStrategy(num_cores=2)
            >>> with strategy.scope():
            ...     total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
            >>> def step(context, x):
            ...     total.assign_add(tf.reduce_sum(x))
            ...     context.set_last_step_output("mean", tf.reduce_mean(x), "MEAN")
            >>> data = tf.data.Dataset.range(8).map(lambda i: tf.cast(i, tf.float32))
            >>> data = data.batch(2, drop_remainder=True)
            >>> batches = iter(strategy.experimental_distribute_dataset(data))
            >>> context = strategy.run_steps(step, batches, iterations=3)
            >>> float(total.numpy()), float(context.last_step_outputs["mean"]), context.steps
            (15.0, 4.5, 3)
        """
        settings = LoopSettings(iterations, initial_loop_values, prefetch=prefetch)
        try:
            return self.extended.run_steps(fn, iterator, settings)
        except Exception as error:
            raise shortened(explained(error))
        except KeyboardInterrupt as interrupt:
            raise shortened(as_raised(interrupt))

    @autograph.artifact
    @names_keywords("strategy.reduce")
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces values over replicas, like every strategy; works in steps of `run_steps`. Takes Python numbers."""
        context = tf.distribute.get_replica_context()
        if isinstance(context, BodyReplicaContext) and context.is_step:
            return context.merge_call(
                lambda _, value: super(TPUStrategy, self).reduce(reduce_op, value, axis), (value,)
            )
        return super().reduce(reduce_op, value, axis)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers."""
        return self._compiled_half.device_group.replicas

    @property
    def num_hosts(self) -> int:
        """The number of workers: processes that run the replicas together."""
        return self.extended.num_hosts

    @property
    def steps_per_run(self) -> int:
        """How many steps one launch of a device loop runs if the call of `run_steps` does not say."""
        return self.extended.steps_per_run

    @property
    def cluster_resolver(self) -> PjrtClusterResolver | None:
        """The resolver that was passed to the constructor; None if none was passed."""
        return self._resolver
