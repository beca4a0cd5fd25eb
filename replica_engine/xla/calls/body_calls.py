"""Calls of a body: at once in eager mode, or as one stateful op in the graph of a tf.function.

The op hands its inputs to the compiled program and returns when the program is done. It may be in a loop, in a branch
and in nested functions. TensorFlow keeps ops that share a variable in order. So the op gets the handles of all
variables of the body, though their values are on the devices, and one more handle that all runs share. It counts as
writing to each of these variables.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from replica_engine import errors
from replica_engine.errors import base, worker_errors
from replica_engine.pjrt.absent_chips import check_absent
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS
from replica_engine.pjrt.plan import Plan
from replica_engine.process import interrupts, shutdown, threads
from replica_engine.traced_steps.supervised_call import TracedRun, supervise
from replica_engine.upstream import eager, thread_state
from replica_engine.upstream.graphs import function_calls, function_graphs
from replica_engine.values.regroup import regroup
from replica_engine.xla.arguments import Arguments, Shapes
from replica_engine.xla.body import check_mode, tracing_for
from replica_engine.xla.calls.program_table import Entry, ProgramTable
from replica_engine.xla.function_spec import FunctionSpec
from replica_engine.xla.soft_placement.host_op_kinds import add_caller
from replica_engine.xla.stages import body_graph
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.launch import Launch
from replica_engine.xla.state import host_handles
from replica_engine.xla.state.device_value import Borrowed, DeviceValue, find_launch_value

T = TypeVar("T")
Prepare = Callable[[Arguments, Shapes], T]
"""Does the work of a call except for running the body."""

_RESULTS = "The results of the replicas"

_OF_NO_BODY = (
    MemoryError,
    errors.BackendMissingError,
    errors.DeviceError,
    tf.errors.ResourceExhaustedError,
    errors.ForkedError,
    errors.LostVariableError,
    errors.ProgramError,
    errors.ReplicaTimeoutError,
    errors.StuckProgramError,
    *worker_errors.JOB_FAILURES,
    *RUNTIME_ERRORS,
)
"""Failures of the machine, of its memory or of the job, of which a body is not the cause."""


def call_with_numbers(
    programs: ProgramTable, source: FunctionSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs a function on all replicas, and regroups the results. Python floats among the arguments become tensors.

    If the body needs numbers, they are compiled in.

    As a tensor a float has a gradient, a loop that depends on it is a loop of the program, and one program serves all
    its values. But a body may need a number: for `math.sqrt(rate)`, or to multiply tensors of any dtype. So if a body
    cannot be traced or compiled with tensors, it is traced once more, with the numbers. An error is then the error of
    the second trace; failures of the machine and of the job are raised at once. Integers are often shapes, axes and
    bounds, and numbers inside structures are settings: these are always compiled in.
    """
    with shutdown.running() if tf.executing_eagerly() else contextlib.nullcontext():
        prepare = functools.partial(_prepared, programs, source, args=None if kwargs else args)
        return _with_numbers(programs, source, args, kwargs, prepare)()


def plan(
    programs: ProgramTable, source: FunctionSpec, args: Sequence[Any], kwargs: Mapping[str, Any], topology: str | None
) -> Plan:
    """What the program of such a call needs on each device; see `TPUStrategy.plan`. The program does not run."""

    def planned(arguments: Arguments, shapes: Shapes) -> Plan:
        shapes = add_caller(arguments, shapes)
        for slot in arguments.slots:
            if not slot.shape.is_fully_defined():  # in eager mode the shapes of a slot are known
                raise errors.ReplicaMismatchError(
                    f"{slot.name} has other shapes on some replicas. A plan is for one program: give every replica a "
                    "batch of the same size."
                )
        entry = programs.entry(source, arguments, shapes)
        static = [tuple(slot.shape) for slot in arguments.slots]
        if topology is None:
            try:
                return _compiled_here(programs, entry, static).plan()
            except errors.ProgramError as error:
                if error.plan is None:
                    raise
                return error.plan
        return programs.lowered(entry, static).compile(topology=topology)

    with contextlib.ExitStack() as stack:
        if topology is not None:
            # Before anything is traced: attention depends on the chips.
            slice_, _ = check_absent(topology, len(programs.devices.everywhere))
            stack.enter_context(tracing_for(slice_.chip))
        stack.enter_context(shutdown.running())
        return _with_numbers(programs, source, args, kwargs, planned)


def _compiled_here(programs: ProgramTable, entry: Entry, static: Sequence[body_graph.Shape]) -> Compiled:
    """The program, compiled for the devices that are there; with a limit, on another thread.

    Nothing can end a compile: after the limit it continues, and a later call finds its result.
    """
    limit = programs.body.limits.timeout
    name = programs.lowered(entry, static).program.name  # on this thread, on which the body is traced
    if limit is None:
        return programs.compiled(entry, static)
    ended = threading.Event()
    thread = threads.LeftCall(functools.partial(programs.compiled, entry, static), f"compile of {name}", ended.set)
    threads.start(thread)
    if not interrupts.wait_within(limit, ended.wait):
        raise errors.ReplicaTimeoutError.not_planned(name, programs.devices.platform.upper(), limit)
    return thread.result()


def call(programs: ProgramTable, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> list[Any]:
    """Runs a function on all replicas: now, or whenever the graph under construction runs.

    Args:
        programs: the programs.
        source: the function.
        arguments: its arguments.
        shapes: the shapes to trace it for.

    Returns:
        For each replica, what the function returned.
    """
    with shutdown.running() if tf.executing_eagerly() else contextlib.nullcontext():
        return _prepared(programs, source, arguments, shapes, grouped=False)()


def _with_numbers(
    programs: ProgramTable, source: FunctionSpec, args: Sequence[Any], kwargs: Mapping[str, Any], prepare: Prepare[T]
) -> T:
    """Prepares a call with floats, if there are any, as tensors, and if that fails, with numbers; see above."""
    size, given = programs.devices.size, (*args, *kwargs.values())
    prepared: T | None = None
    has_floats = source.signature is None and any(type(value) is float for value in given)
    if try_tensors := has_floats and not programs.function(source).wants_numbers:
        try:
            tensors = [_as_tensor(value) for value in args], {name: _as_tensor(kwargs[name]) for name in kwargs}
            arguments, shapes = source.arguments(*tensors, size)
            passed = (*tensors[0], *tensors[1].values())
            numbers = [new for old, new in zip(given, passed, strict=True) if new is not old]
            for slot in arguments.slots:
                slot.is_shared = slot.is_shared and not any(slot.values[0] is number for number in numbers)
            prepared = prepare(arguments, shapes)
        except _OF_NO_BODY:
            raise
        except Exception:  # the user's function may raise anything where it gets a tensor and needs a number
            prepared = None  # so its Python code runs a second time, and an error of that trace is the one to raise
    if prepared is None:
        prepared = prepare(*source.arguments(args, kwargs, size))
        if try_tensors:
            programs.function(source).wants_numbers = True
    return prepared


def _as_tensor(value: Any) -> Any:
    # Neither bool nor int, which are often settings and shapes, nor NumPy's floats, which `Arguments` makes tensors.
    return tf.constant(value) if type(value) is float else value


def _prepared(
    programs: ProgramTable,
    source: FunctionSpec,
    arguments: Arguments,
    shapes: Shapes,
    grouped: bool = True,
    args: Sequence[Any] | None = None,
) -> Callable[[], Any]:
    """Does the work of a call except for running the body, which the returned function does. For `args` see `entry`."""
    if not tf.executing_eagerly():
        results = _in_graph(programs, source, arguments, shapes)
        return lambda: regroup(results, _RESULTS) if grouped else results
    shapes = add_caller(arguments, shapes)
    entry = programs.entry(source, arguments, shapes, args)
    slots = arguments.numpy()
    compiled = programs.ready(entry, slots)
    take_results = entry.traced.grouped_results if grouped else entry.traced.replicas_results
    at_once = compiled.is_queued and not grouped  # one wait for all
    return lambda: take_results(Launch(compiled)(slots).columns(as_arrays=at_once))


def _in_graph(programs: ProgramTable, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> list[Any]:
    check_mode()
    graph = tf.compat.v1.get_default_graph()
    run = TracedRun(None, None, None, function_calls.is_in_loop(graph), launches=True)
    function_calls.choose(graph, None, run, supervise)  # first: errors of the trace are those of replicas too
    entry = programs.trace(source, arguments, shapes)
    traced = entry.traced
    traced.sums.check(arguments)
    own, captured = arguments.shapes, [tensor.shape for tensor in traced.tensors]
    if all(shape.is_fully_defined() for shape in (*own, *captured)):
        # All shapes are known: compiled now, so that errors come before anything runs.
        programs.compiled(entry, list(map(tuple, own)), list(map(tuple, captured)))
    size = programs.devices.size
    inputs = [tensor for slot in arguments.slots for tensor in slot.values] + traced.tensors
    flat = _add_op(programs, entry, [len(slot.values) for slot in arguments.slots], inputs)
    return [traced.rebuild(flat[replica::size]) for replica in range(size)]


class InvalidArgumentError(ValueError):
    """Carries the message of a `tf.errors.InvalidArgumentError` out of a graph.

    TensorFlow turns a ValueError of a Python op into a `tf.errors.InvalidArgumentError`. It would turn the error of a
    failed assertion or of `tf.debugging.check_numerics` into a `tf.errors.UnknownError`.
    """


def _add_op(programs: ProgramTable, entry: Entry, counts: list[int], inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Adds the op to the graph: a Python op inside a function call, which can be given variables.

    Its work is a traced body, compiled for each combination of shapes when it first occurs.

    Args:
        programs: what compiles it.
        entry: the body.
        counts: for each slot, how many values it has: one, or N.
        inputs: these values, and those of the captured tensors.

    Returns:
        For each result of the body, those of the replicas.
    """
    devices, traced = programs.devices, entry.traced
    outputs = [spec for spec in traced.outputs for _ in range(devices.size)]
    held = [find_launch_value(handle, devices) for handle in traced.handles]
    device_values = [each for each in held if isinstance(each, DeviceValue)]
    around = host_handles.host_program()  # the host function that the op is in
    # The state that host calls inherit, such as the summary writer: it is traced in, as in any tf.function.
    inherited = thread_state.locals_of_thread() if traced.host_calls.can_fail else None

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        """Runs the program on concrete inputs. Returns at least one result, by which the op can be found."""
        rest = [np.asarray(each, object) if isinstance(each, bytes) else each for each in inputs]  # a single string
        slots = []
        for number in counts:
            slots.append(rest[:number])
            del rest[:number]
        try:
            launch = Launch(programs.ready(entry, slots, rest))
            with devices.in_flight:
                around.before_run(device_values)
                with contextlib.nullcontext() if inherited is None else thread_state.enter_locals(inherited):
                    columns: Any = launch(slots, rest).columns(as_arrays=True)
                around.after_run(device_values)
        except tf.errors.InvalidArgumentError as error:
            again = InvalidArgumentError(error.message)
            for note in getattr(error, "__notes__", ()):
                base.add_note(again, note)
            raise again from error
        return [value for column in columns for value in column] or [np.array(True)]

    function_graphs.leave_uncompiled()  # otherwise XLA would have to compile the op that launches a compiled program
    handles = [
        host_handles.token(),
        *(handle for handle, each in zip(traced.handles, held, strict=True) if isinstance(each, Borrowed)),
        *(
            host_handles.handle(device_value, replica, on_host=False)
            for device_value in device_values
            for replica in range(len(device_value.handles))
        ),
    ]

    @tf.function(autograph=False)
    def replicated(handles: list[tf.Tensor], inputs: list[tf.Tensor]) -> tuple:
        results = function_graphs.python_op(run, inputs, [spec.dtype for spec in outputs] or [tf.bool])
        # A body without results has one here all the same; see `run`.
        for result, spec in zip(results, outputs, strict=False):
            result.set_shape(spec.shape)
        return tuple(results)

    with eager.no_tape():
        results = replicated(handles, inputs)
    host_handles.ran(results[0].op)
    return list(results[: len(outputs)])
