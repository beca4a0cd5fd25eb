"""The backend of TPUStrategy: the replica body compiled to one program that runs on all devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.backend import Arguments, Backend, HostSide, Keywords
from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.diagnostics.user_frames import calling_line
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.pjrt.plans.plan import DeviceMemory, Plan
from replica_engine.process import shutdown
from replica_engine.process.fork import check_not_forked
from replica_engine.strategies.extended import as_tensors
from replica_engine.strategies.multi_step import MultiStepContext
from replica_engine.strategies.tpu import variables, workers
from replica_engine.strategies.tpu.device_loops import LoopSettings, run_steps
from replica_engine.strategies.tpu.distribution import Distribution
from replica_engine.strategies.tpu.variable_table import VariableTable
from replica_engine.values.regroup import spread
from replica_engine.xla.body import LaunchLimits, in_body
from replica_engine.xla.context import BodyReplicaContext, use_own_values
from replica_engine.xla.graph_op import call_with_numbers
from replica_engine.xla.graph_op import plan as plan_call
from replica_engine.xla.signature.function_spec import FunctionSpec
from replica_engine.xla.stages.launch import Launch
from replica_engine.xla.stages.program_table import ProgramTable


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
        use_own_values()
        if devices.member is not None:
            workers.explain_failures(devices.member)  # before the first op, which may fail
        self.device_group, self.same_random = devices, same_random
        self.limits, self.distribution = limits, distribution
        self.saving = workers.saving_on(devices, limits)
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
        check_not_forked()
        source, size = FunctionSpec.of(fn), self.device_group.size
        # In eager mode no code below needs the scope; a trace enters it.
        with contextlib.nullcontext() if tf.executing_eagerly() else self.strategy.scope():
            args, kwargs = spread(args, size, "args"), spread(kwargs or {}, size, "kwargs")
            return call_with_numbers(programs or self._programs, source, args, kwargs)

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
        check_not_forked()
        found = (programs or self._programs).last(fn, args)
        if found is None:
            return None
        compiled, slots = found
        with shutdown.running():
            columns = Launch(compiled)(slots).columns()
        return (compiled.program.traced.grouped_results(columns),)

    def result_specs(self, programs: ProgramTable, fn: Callable[..., Any], args: Sequence[Any]) -> list[tf.TensorSpec]:
        """The specs of the tensors that `run` would return on a replica; the function is traced and does not run."""
        source, size = FunctionSpec.of(fn), self.device_group.size
        with self.strategy.scope():
            arguments, shapes = source.arguments(spread(args, size, "args"), {}, size)
            return list(programs.trace(source, arguments, shapes).traced.outputs)

    def run_steps(self, fn: Callable[..., Any], iterator: Any, settings: LoopSettings) -> MultiStepContext:
        """Same as `TPUStrategy.run_steps`, with all settings of a device loop."""
        return run_steps(self.strategy, self._programs, fn, iterator, settings)

    def own_programs(self) -> ProgramTable:
        """A new table of programs for `run` or `run_steps`, which the strategy does not keep alive."""
        return self._programs.for_owner()

    def plan(self, fn: Callable[..., Any], args: Any, kwargs: Any, topology: str | None) -> Plan:
        """Same as `TPUStrategy.plan`."""
        size = self.device_group.size
        args, kwargs = spread(args, size, "args"), spread(kwargs, size, "kwargs")
        return plan_call(self._programs, FunctionSpec.of(fn), args, kwargs, topology)

    def memory(self) -> DeviceMemory:
        """Same as `TPUStrategy.memory`."""
        names = self.device_group.device_names
        return DeviceMemory([self.variable_table.bytes] * len(names), self._programs.last_memory(), names)

    def over_workers(self, reduction: Any, value: Any) -> Any:
        """Reduces a value of each replica over the replicas of all workers.

        Args:
            reduction: a `tf.distribute.ReduceOp` or its name, `workers.FIRST`, or ("gather", axis).
            value: a distributed value or an ON_READ variable.
        """
        reducer = workers.reducer(reduction, calling_line()[0])
        if isinstance(value, distribute.DistributedVariable):
            value = distribute.PerReplica(tuple(component.read_value() for component in value._values))
        elif not isinstance(value, distribute.DistributedValues):
            value = distribute.PerReplica((value,))
        value = as_tensors(value, self.strategy.extended.worker_devices)
        return distribute.select_replica(0, self.run(reducer, (value,), programs=self._reductions))

    def sync_points(self) -> list[SyncPointRecord]:
        """The last sync points of each replica, in the order of time."""
        return self._programs.body.records()

    def host_side_of(self, variable: tf.Variable) -> HostSide | None:
        """The host's side of a variable whose value lives on devices; None if the variable itself holds the value."""
        return variables.host_side_of(variable)

    @contextlib.contextmanager
    def _in_replica_context(self) -> Iterator[None]:
        strategy = self.strategy
        layouts = contextlib.nullcontext() if self.distribution is None else self.distribution.while_traced(strategy)
        with strategy.scope(), BodyReplicaContext(strategy), layouts:
            yield
