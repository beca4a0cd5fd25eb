"""Initial values that are made in parts: neither the host nor a device ever has a large variable whole.

Keras' own initializers are functions of a shape and a seed. So such a function becomes a program, whose result is
divided like the variable. Random numbers are those that TensorFlow draws on the host (`random_numbers`). All other
functions run on the host, once: they may have an effect, such as an item taken from an iterator, or need real values.
So does an initializer with a `SeedGenerator`, whose state counts the draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import subgraphs
from replica_engine.errors import CaptureError, LoweringError
from replica_engine.pjrt.group import Array
from replica_engine.pjrt.partitions.layout import Axes, ReplicaMesh, names
from replica_engine.process.freed_memory import freed_memory_returned
from replica_engine.xla.signature.arguments import Arguments
from replica_engine.xla.signature.function_spec import FunctionSpec
from replica_engine.xla.stages.launch import Launch
from replica_engine.xla.stages.program_table import ProgramTable
from replica_engine.xla.state.philox import Pieces, in_pieces

LARGE = 1 << 23
"""The bytes of a variable whose value is made in parts. A program for it takes about a tenth of a second to compile."""


class InitialValue:
    """The body of the program.

    Args:
        make: makes the value.
        shape: its shape.
        dtype: its dtype.
        axes: how it is divided.
        mesh: over which mesh.
    """

    _replica_engine_where = "the initial value of a variable"

    def __init__(self, make: Callable[[], Any], shape: tuple[int, ...], dtype: tf.DType, axes: Axes, mesh: ReplicaMesh):
        self._make = make
        self._dtype = dtype
        self.shape = shape
        self.result_axes = [axes]
        axes = (*axes, *[None] * (len(shape) - len(axes)))
        self._pieces = Pieces(shape, tuple(mesh.parts(axes)), tuple(map(names, axes)))

    def __call__(self) -> tf.Tensor:
        """Called by `trace`."""
        with in_pieces(self._pieces):
            return tf.convert_to_tensor(self._make(), self._dtype)


def made(programs: ProgramTable, value: InitialValue) -> Array | None:
    """The value on the devices; None if it must be made on the host."""
    try:
        entry = programs.trace(FunctionSpec(value, autograph=False), Arguments((), {}, programs.devices.size), ())
        graph, (output,) = entry.traced.graph, entry.traced.outputs
        has_state = entry.traced.handles or any(map(subgraphs.is_stateful, graph.get_operations()))
        if has_state or tuple(output.shape) != value.shape:
            return None
        compiled = programs.compiled(entry, [])
    except (LoweringError, CaptureError, tf.errors.OpError, TypeError, ValueError):
        return None  # the host makes it, or raises what the user should see
    # Returns when the program has run, on CPU devices.
    with freed_memory_returned() if programs.devices.platform == "cpu" else contextlib.nullcontext():
        return Launch(compiled)([]).results.pop()
