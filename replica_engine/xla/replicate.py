"""Runs a function on N replicas, without a strategy; or lowers it for specs of tensors."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.tracebacks import shortened
from replica_engine.errors import DeviceError, InputsError, base
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.pjrt.devices import device_group
from replica_engine.process.setup import check_not_forked
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import autograph
from replica_engine.xla import body, function_spec
from replica_engine.xla.arguments import Arguments
from replica_engine.xla.calls import body_calls, program_table
from replica_engine.xla.stages.lowered import Lowered

_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap.MAP_NORESERVE of Python 3.13


def with_values(arguments: object, caller: str) -> Any:
    """A structure of arguments with zeros for each `tf.TensorSpec`, and for the specs of a distributed dataset.

    For a body that is compiled and does not run.

    Args:
        arguments: the structure.
        caller: the name of the function that was called, for errors.

    Raises:
        InputsError: a spec does not say the whole shape, or is of another kind than tensors.
    """
    try:
        return tf.nest.map_structure(lambda value: _value(value, caller), arguments)
    except RecursionError:  # a structure that contains itself: who takes it apart next says so
        return arguments


def _value(value: object, caller: str) -> object:
    if not isinstance(value, tf.TypeSpec):
        return value
    if (specs := distribute.specs_of_replicas(value)) is not None:
        return distribute.PerReplica([_value(each, caller) for each in specs])
    if not isinstance(value, tf.TensorSpec):
        raise InputsError(
            f"{caller} was called with {value!r}. Only a tf.TensorSpec stands for a value: pass a "
            f"{value.value_type.__name__} like those that the step will get."
        )
    if not value.shape.is_fully_defined():
        raise InputsError(
            f"{caller} was called with {value}. XLA compiles for fixed shapes: give every dimension a size. Batches "
            "have one size with dataset.batch(n, drop_remainder=True)."
        )
    if value.dtype == tf.string:
        return tf.constant("", shape=value.shape)
    dtype = np.dtype(value.dtype.as_numpy_dtype)
    bytes_ = value.shape.num_elements() * dtype.itemsize
    if bytes_ < mmap.PAGESIZE:
        return tf.zeros(value.shape, value.dtype)
    # Nobody looks at the zeros. Pages that nobody looks at take no memory, so the spec may be larger than this machine.
    pages = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return eager.tensor_from_memory(np.frombuffer(pages, dtype).reshape(value.shape))


Inputs = Sequence[Sequence[Any]]
"""A list over replicas of lists of arguments."""


@autograph.artifact
def replicate(fn: Callable[..., Any], inputs: Inputs | None = None, num_replicas: int | None = None) -> list[Any]:
    """Runs `fn` once on each of N replicas, compiled to one program.

    `fn` is traced once for all replicas, as a `tf.function` is. Later calls of the same function, with arguments of the
    same shapes and dtypes, run the compiled program. It can be called inside a `tf.function`.

    A variable that `fn` uses and that belongs to no strategy has one value for all replicas. The value is sent to the
    devices before the run. After the run the variable has the value that replica 0 wrote.

    Args:
        fn: the function. Inside it, `replica_id()` tells replicas apart, and `cross_replica_sum` and the other
            cross-replica operations combine their values.
        inputs: a list over replicas of lists of arguments: tensors (of the same shapes and dtypes on all replicas),
            and nested structures of tensors. Anything else must be the same on all replicas. None if `fn` takes no
            arguments.
        num_replicas: N; None takes the length of `inputs`, or the number of all devices.

    Returns:
        A list over replicas of what `fn` returned.

    Raises:
        InputsError: `inputs` is not a list over `num_replicas` replicas.
        ReplicaMismatchError: replicas have tensors of different shapes or dtypes.
        StructureMismatchError: replicas have different structures.
        DeviceError: there are fewer devices than replicas.
        LoweringError: `fn` has an op that XLA cannot compile, or a shape that is not static.
        BackendMissingError: jax is not installed.
        Exception: `fn` raised it while it was traced.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine import xla
        >>> def fn(x):
        ...     return x / xla.cross_replica_sum(x)
        >>> [float(part) for part in xla.replicate(fn, inputs=[[1.0], [3.0]])]
        [0.25, 0.75]
    """
    check_not_forked()
    arguments, programs = _prepare(inputs, num_replicas)
    try:
        return body_calls.call(programs, function_spec.FunctionSpec.from_callable(fn), arguments, arguments.shapes)
    # Errors of the user's function too: all are cut to the user's frames, and none is kept.
    except Exception as error:
        raise shortened(error)


@autograph.artifact
def lower(fn: Callable[..., Any], inputs: Inputs | None = None, num_replicas: int | None = None) -> Lowered:
    """Traces and lowers `fn` without running it: to read the program, or to compile it ahead of time.

    Args:
        fn: as for `replicate`.
        inputs: as for `replicate`; only the shapes and dtypes of tensors matter. A `tf.TensorSpec` can stand for one.
        num_replicas: as for `replicate`.

    Raises:
        Exception: as `replicate`.

    Example:
        >>> from replica_engine import xla
        >>> lowered = xla.lower(lambda x: x + 1.0, [[1.0], [2.0]])
        >>> compiled = lowered.compile()
        >>> [float(result) for result in compiled([[10.0], [20.0]])]
        [11.0, 21.0]
        >>> import tensorflow as tf
        >>> xla.lower(lambda x: x + 1.0, [[tf.TensorSpec([1000])]] * 2).compile().plan().memory.arguments
        4000
    """
    arguments, programs = _prepare(with_values(inputs, "lower"), num_replicas)
    return programs.trace(function_spec.FunctionSpec.from_callable(fn), arguments, arguments.shapes).traced.lower()


def _prepare(inputs: Inputs | None, size: int | None) -> tuple[Arguments, program_table.ProgramTable]:
    if body.in_body() is not None:
        raise InputsError(
            "A replicated body cannot be replicated again. Call the function directly. To combine values of only "
            "some replicas, pass `groups` to xla.cross_replica_sum or another cross-replica operation."
        )
    body.check_mode()  # before anything is made that would belong to the graph, and be found again in eager mode
    if size is not None:
        size, given = base.positive_int(size), size
        if size is None:
            raise DeviceError.bad_count(given)
    if inputs is not None:
        arguments = Arguments.from_inputs(inputs, size)
        return arguments, _programs(device_group(count=arguments.size))
    devices = device_group(count=size)
    return Arguments.from_inputs(None, devices.size), _programs(devices)


def _programs(devices: DeviceGroup) -> program_table.ProgramTable:
    if devices.programs is None:
        devices.programs = program_table.ProgramTable(devices)
    return devices.programs
