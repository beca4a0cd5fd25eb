"""The data of a lowered body that the later stages need, made once when the body is lowered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.user_frames import user_line
from replica_engine.errors import LoweringError
from replica_engine.pjrt.stablehlo.lowered_module import LoweredModule
from replica_engine.pjrt.stablehlo.partition_local import WHOLE, Axes, Layout
from replica_engine.upstream.graphs import xla_ops
from replica_engine.xla.stages.body_graph import BodyGraph, Shape
from replica_engine.xla.state.device_value import find_axes

_MOST_SHOWN = 8  # arguments of a program, in its text


class BodyProgram:
    """A lowered body, as its compilation and its launches see it.

    Args:
        traced: the body.
        slots: specs of the tensors among the arguments, with the shapes that it was lowered for.
        module: the program.
        host_results: the attribute.
        shares: the attribute.

    Raises:
        LoweringError: the shape of a result depends on data.

    Attributes:
        name: the name of the function.
        body: the replicas it is for.
        donates: whether a launch gives the old values of variables to the program, which overwrites them with the new
            ones. False if a host call may fail, or if the caller may stop waiting: then a launch that does not end
            well must leave all variables as they were.
        host_slots: indices of the slots that are not parameters, since no device can have their values.
        parameters: the specs of the other slots.
        captured: indices of the captured tensors that are parameters; the others are compiled in.
        writes: for each variable that is written, its index among the captured variables and its index in `results`.
        results: shape and dtype of each result: first the results that the body returned, then values of variables.
        returned: how many results of the program the body returned.
        host_results: for each result of the body that stays on the host, its index and its number there.
        shares: if each replica takes a branch for the shape of its share, the body lowered for each shape. Then this
            program has the largest shapes, and a device has all of what its replica is passed and returns.
        layout: how its values are divided over the devices of a replica; None if a replica has one device.
    """

    def __init__(
        self,
        traced: BodyGraph,
        slots: Sequence[tf.TensorSpec],
        module: LoweredModule,
        host_results: Mapping[int, int],
        shares: Sequence[BodyProgram] = (),
    ):
        self.traced = traced
        self.name = traced.name
        self.body = traced.body
        self.donates = traced.donates
        self.slots = slots
        self.host_slots = traced.host_slots
        self.parameters = [slot for index, slot in enumerate(slots) if index not in self.host_slots]
        self.captured = list(traced.captured)
        self.host_results = host_results
        self.returned = len(traced.outputs) - len(self.host_results)
        # The order of the parameters: slots, captured tensors, variables.
        first = len(self.parameters) + len(self.captured)
        self.writes = [(parameter - first, result) for parameter, result in module.writes]
        written = [variable for variable, _ in sorted(self.writes, key=itemgetter(1))]
        self.results = self._results(module, written)
        self.shares = shares
        self.layout = self._layout(written)

    def _results(self, module: LoweredModule, written: list[int]) -> list[tuple[Shape, np.dtype]]:
        traced = self.traced
        outputs = [index for index in range(len(traced.outputs)) if index not in self.host_results]
        dtypes = [traced.outputs[index].dtype for index in outputs]
        for variable in written:
            described = xla_ops.variable_dtype_and_shape(traced.handles[variable])
            assert described is not None, "checked when it was captured"
            dtypes.append(described[0])
        shapes: list[Shape] = []
        for index, sizes in enumerate(module.results):
            shapes.append(tuple(size for size in sizes if size is not None))
            if len(shapes[-1]) < len(sizes):
                output = outputs[index]
                raise LoweringError.dynamic_result(traced.name, output, user_line(traced.graph.outputs[output]))
        return [(shape, np.dtype(dtype.as_numpy_dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def _layout(self, written: list[int]) -> Layout | None:
        traced, mesh, size = self.traced, self.body.mesh, self.body.size
        if mesh is None:
            return None
        batches = [
            WHOLE if self.shares else mesh.choose_batch_axes(slot.shape, traced.stacked) for slot in self.parameters
        ]
        variables = [find_axes(handle, mesh) for handle in traced.handles]
        divided: list[Axes]
        if (chosen := traced.result_axes) is not None:
            divided = chosen
        elif self.shares or self.body.spans:  # each worker has what the body returned
            divided = [WHOLE] * self.returned
        else:
            divided = [mesh.choose_batch_axes(shape) for shape, _ in self.results[: self.returned]]
        # With shares, the last argument is the number of the branch.
        arguments = [*batches, *([WHOLE] * len(self.captured)), *variables, *([WHOLE] if self.shares else [])]
        results = (*divided, *(variables[variable] for variable in written))
        return Layout(mesh, size, size > 1, tuple(arguments), results)

    @property
    def axes(self) -> Iterable[Axes]:
        """How each argument is divided over the devices of a replica."""
        return itertools.repeat(WHOLE) if self.layout is None else self.layout.arguments

    @property
    def takes(self) -> str:
        """The first tensors among the arguments, as text: it shows workers that their batches differ."""
        pairs = zip(self.traced.slot_names, self.slots, strict=True)
        words = [f"{name} {slot.dtype.name}{list(slot.shape)}" for name, slot in pairs]
        return ", ".join([*words[:_MOST_SHOWN], *(["..."] if len(words) > _MOST_SHOWN else [])])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes on each device: of the arguments, of the results, and of those results that replace arguments."""
        parameters = [*self.parameters, *(self.traced.tensors[index] for index in self.captured)]
        values = [(tuple(each.shape), each.dtype.as_numpy_dtype) for each in parameters]
        described = filter(None, map(xla_ops.variable_dtype_and_shape, self.traced.handles))
        values += [(tuple(shape), dtype.as_numpy_dtype) for dtype, shape in described]
        arguments = map(self._bytes, values, self.axes)
        of_results = itertools.repeat(WHOLE) if self.layout is None else self.layout.results
        results = list(map(self._bytes, self.results, of_results))
        aliased = sum(results[result] for _, result in self.writes) if self.donates else 0
        return sum(arguments), sum(results), aliased

    def _bytes(self, value: tuple[Shape, Any], axes: Axes) -> int:
        """The bytes of a value on each device."""
        shape, dtype = value
        if self.layout is not None:
            shape = self.layout.mesh.on_each(shape, axes)
        return math.prod(shape) * np.dtype(dtype).itemsize

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the slots."""
        return tuple(tuple(slot.shape) for slot in self.slots)
