"""The data of a lowered body that the later stages need, made once when the body is lowered."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf.graphs import xla_ops
from replica_engine.pjrt.partitions.layout import WHOLE, Axes, Layout
from replica_engine.xla.body import Body
from replica_engine.xla.stages.body_graph import BodyGraph
from replica_engine.xla.stages.results import Shape

_MOST_SHOWN = 8  # arguments of a program, in words


@dataclasses.dataclass(frozen=True, eq=False)
class BodyProgram:
    """A lowered body, as its compilation and its launches see it.

    Attributes:
        traced: the body.
        name: the name of the function.
        body: the replicas it is for.
        donates: whether a launch gives the old values of variables to the program, which overwrites them with the new
            ones. False if a host call may fail, or if the caller may stop waiting: then a launch that does not end
            well must leave all variables as they were.
        slots: specs of the tensors among the arguments, with the shapes that it was lowered for.
        host_slots: indices of the slots that are not parameters, since no device can have their values.
        captured: indices of the captured tensors that are parameters; the others are compiled in.
        writes: for each variable that is written, its index among the captured variables and its index in `results`.
        results: shape and dtype of each result: first the results that the body returned, then values of variables.
        returned: how many results of the program the body returned.
        host_results: for each result of the body that stays on the host, its index and its number there.
        layout: how its values are divided over the devices of a replica; None if a replica has one device.
    """

    traced: BodyGraph
    name: str
    body: Body
    donates: bool
    slots: Sequence[tf.TensorSpec]
    host_slots: frozenset[int]
    captured: Sequence[int]
    writes: Sequence[tuple[int, int]]
    results: Sequence[tuple[Shape, np.dtype]]
    returned: int
    host_results: Mapping[int, int]
    layout: Layout | None

    @property
    def axes(self) -> Iterable[Axes]:
        """How each argument is divided over the devices of a replica."""
        return itertools.repeat(WHOLE) if self.layout is None else self.layout.arguments

    @property
    def takes(self) -> str:
        """The first tensors among the arguments, in words: workers whose batches differ see it here."""
        words = [
            f"{name} {slot.dtype.name}{list(slot.shape)}"
            for name, slot in zip(self.traced.slot_names, self.slots, strict=True)
        ]
        return ", ".join([*words[:_MOST_SHOWN], *(["..."] if len(words) > _MOST_SHOWN else [])])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes on each device: of the arguments, of the results, and of those results that replace arguments."""
        parameters = [slot for index, slot in enumerate(self.slots) if index not in self.host_slots]
        parameters += [self.traced.tensors[index] for index in self.captured]
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
