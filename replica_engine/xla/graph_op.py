"""Calling a body: at once in eager mode, as one stateful op in the graph of a tf.function.

The op hands its inputs to the compiled program and returns when the program is done. It may be in a loop, in
a branch and in nested functions. TensorFlow keeps ops in order that share a variable, so the op is given the
handles of all variables of the body, though their values are on the devices, and one more that all runs share,
and counts as writing to each.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import function, thread_state, variables
from replica_engine.errors import add_note
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.process import shutdown
from replica_engine.xla import soft_placement
from replica_engine.xla.graph_mode import check_mode
from replica_engine.xla.signature.arguments import Arguments, Shapes
from replica_engine.xla.signature.function_spec import FunctionSpec
from replica_engine.xla.stages.program_cache import ProgramCache, TracedProgram
from replica_engine.xla.state import host_functions
from replica_engine.xla.state.device_value import Borrowed, DeviceValue, device_value_of


def call_with_numbers(
    programs: ProgramCache, source: FunctionSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """As `call`, with arguments that are Python floats as tensors, or compiled in where the body needs them so.

    As tensors they have gradients, a loop on one is a loop of the program, and one program serves all values. But a
    body may want a number: for `math.sqrt(rate)`, or to multiply tensors of any dtype. So a body that cannot be traced
    or compiled with tensors is traced once more, with the numbers; an error is then that of the second trace. Integers
    are often shapes, axes and bounds, and numbers inside of structures are settings: these are compiled in.
    """
    size = programs.devices.size
    has_floats = any(type(value) is float for value in (*args, *kwargs.values()))
    if not has_floats or source.signature is not None or programs.wants_numbers(source):
        return call(programs, source, *source.arguments(args, kwargs, size))
    with _running():
        try:
            tensors = [_as_tensor(value) for value in args], {name: _as_tensor(kwargs[name]) for name in kwargs}
            run = _prepared(programs, source, *source.arguments(*tensors, size))
        except Exception:
            run = None
        if run is None:
            run = _prepared(programs, source, *source.arguments(args, kwargs, size))
            programs.note_numbers(source)
        return run()


def call(programs: ProgramCache, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> list[Any]:
    """Runs a function on all replicas, here and now or when the graph under construction runs.

    Returns:
        For each replica what the function returned.
    """
    if not tf.executing_eagerly():
        return _in_graph(programs, source, arguments, shapes)
    with shutdown.running():
        shapes = soft_placement.add_caller(arguments, shapes)
        program = programs.find(source, arguments, shapes)
        return program.traced.replicas_results(program.run(arguments.numpy()))


def _running() -> contextlib.AbstractContextManager[None]:
    return shutdown.running() if tf.executing_eagerly() else contextlib.nullcontext()


def _as_tensor(value: Any) -> Any:
    return tf.constant(value) if type(value) is float else value


def _prepared(
    programs: ProgramCache, source: FunctionSpec, arguments: Arguments, shapes: Shapes
) -> Callable[[], list[Any]]:
    """As `call`, up to where the body runs."""
    if tf.executing_eagerly():
        shapes = soft_placement.add_caller(arguments, shapes)
        program = programs.find(source, arguments, shapes)
        launch = program.ready(arguments.numpy())
        return lambda: program.traced.replicas_results(launch())
    results = _in_graph(programs, source, arguments, shapes)
    return lambda: results


def _in_graph(programs: ProgramCache, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> list[Any]:
    check_mode()
    program = programs.trace(source, arguments, shapes)
    traced = program.traced
    step = _Step(
        programs.devices, program, [len(slot.values) for slot in arguments.slots], host_functions.host_program()
    )
    if all(slot.shape.is_fully_defined() for slot in arguments.slots) and all(
        tensor.shape.is_fully_defined() for tensor in traced.tensors
    ):
        # Where all shapes are known, so that errors come before anything runs.
        program.find(
            [tuple(slot.shape) for slot in arguments.slots], [tuple(tensor.shape) for tensor in traced.tensors]
        )
    size = programs.devices.size
    inputs = [tensor for slot in arguments.slots for tensor in slot.values] + traced.tensors
    flat = _add_op(step, inputs, [spec for spec in traced.outputs for _ in range(size)])
    columns = [flat[index * size : (index + 1) * size] for index in range(len(traced.outputs))]
    return [traced.rebuild([column[replica] for column in columns]) for replica in range(size)]


class _Step:
    """What the op runs: a traced body, compiled for the shapes that come.

    Args:
        devices: where it runs.
        program: the body.
        counts: how many values, one or N, each slot has.
        around: the host function that the op is in.
    """

    def __init__(
        self, devices: DeviceGroup, program: TracedProgram, counts: list[int], around: host_functions.HostProgram
    ):
        self.devices = devices
        self.traced = program.traced
        self._program = program
        held = [device_value_of(handle, devices) for handle in program.traced.handles]
        self.device_values = [each for each in held if isinstance(each, DeviceValue)]
        self._counts = counts
        # What host calls take over, such as the summary writer: it is traced in, as in any tf.function.
        self._locals = thread_state.locals_of_thread() if self.traced.host_calls.can_fail else None
        self._around = around

    def run(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """Runs the program on concrete inputs."""
        rest = [np.asarray(each, object) if isinstance(each, bytes) else each for each in inputs]  # a single string
        slots = []
        for number in self._counts:
            slots.append(rest[:number])
            del rest[:number]
        launch = self._program.ready(slots, rest)
        with self.devices.in_flight:
            self._around.before_run(self.device_values)
            if self._locals is None:
                columns = launch()
            else:
                with thread_state.enter_locals(self._locals):
                    columns = launch()
            self._around.after_run(self.device_values)
        return [value for column in columns for value in column]


class InvalidArgumentError(ValueError):
    """What TensorFlow raises again, out of the graph, as a `tf.errors.InvalidArgumentError`: it looks for ValueError.

    Of what a failed assertion or `tf.debugging.check_numerics` raises it would make a `tf.errors.UnknownError`.
    """

    @classmethod
    def of(cls, error: tf.errors.InvalidArgumentError) -> InvalidArgumentError:
        """With the message and the notes of the error."""
        again = cls(error.message)
        for note in getattr(error, "__notes__", ()):
            add_note(again, note)
        return again


def _add_op(step: _Step, inputs: list[tf.Tensor], outputs: list[tf.TensorSpec]) -> list[tf.Tensor]:
    """The op in the graph: a function call, so that it can be given variables, around a Python op."""
    function.leave_uncompiled()  # XLA would have to compile the op that launches what is compiled already
    handles = [
        host_functions.token(),
        *(handle for handle in step.traced.handles if isinstance(device_value_of(handle, step.devices), Borrowed)),
        *(
            host_functions.handle(device_value, replica, on_host=False)
            for device_value in step.device_values
            for replica in range(len(device_value.handles))
        ),
    ]
    # TensorFlow keeps the Python function of an op for ever, and the step holds the strategy.
    host_functions.host_program().kept.append(step)
    launch = weakref.WeakMethod(step.run)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        alive = launch()
        assert alive is not None, "kept by the graph that the op is in"
        try:
            return alive(*arrays) or [np.array(True)]
        except tf.errors.InvalidArgumentError as error:
            raise InvalidArgumentError.of(error) from error

    @tf.function(autograph=False)
    def replicated(handles: list[tf.Tensor], inputs: list[tf.Tensor]) -> tuple:
        # At least one result, by which the op can be found.
        results = tf.numpy_function(run, inputs, [spec.dtype for spec in outputs] or [tf.bool], stateful=True)
        for result, spec in zip(results, outputs, strict=False):
            result.set_shape(spec.shape)
        return tuple(results)

    with variables.no_tape():
        results = replicated(handles, inputs)
    host_functions.ran(results[0].op)
    return list(results[: len(outputs)])
