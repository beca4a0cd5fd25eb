"""The data of a lowered body that the later stages need, made once when the body is lowered."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf.graphs import xla_ops
from replica_engine.diagnostics.flight_record import CollectiveCall
from replica_engine.errors.base import at
from replica_engine.pjrt.partitions import Axes, Layout
from replica_engine.xla.analysis.meetings import Apart
from replica_engine.xla.body import Body
from replica_engine.xla.host_calls.call import HostCalls

Shape = tuple[int, ...]

_MOST_SHOWN = 8  # arguments of a program, in words


@dataclasses.dataclass(frozen=True, eq=False)
class BodyProgram:
    """A lowered body, as its compilation and its launches see it.

    Attributes:
        name: the name of the function.
        body: the replicas it is for.
        host_calls: its calls to the host.
        collectives: its cross-replica operations.
        is_users: whether it is the user's function, and not work of the library between steps.
        apart: the cross-replica operations that perhaps not all replicas reach.
        donates: whether a launch gives the old values of variables to the program, which overwrites them with the new
            ones. False if a host call may fail, or if the caller may stop waiting: then a launch that does not end
            well must leave all variables as they were.
        key: the key of the arguments that it serves.
        slots: specs of the tensors among the arguments, with the shapes that it was lowered for.
        slot_names: the names of the slots in messages.
        host_slots: indices of the slots that are not parameters, since no device can have their values.
        tensors: captured tensors, eager or of an outer graph.
        captured: indices of the captured tensors that are parameters; the others are compiled in.
        handles: handles of captured variables.
        writes: for each variable that is written, its index in `handles` and its index in `results`.
        results: shape and dtype of each result: first the results that the body returned, then values of variables.
        returned: how many results of the program the body returned.
        host_results: for each result of the body that stays on the host, its index and its number there.
        layout: how its values are divided over the devices of a replica; None if a replica has one device.
        replicas_results: takes, for each result, the values of all replicas; returns what each replica returned.
    """

    name: str
    body: Body
    host_calls: HostCalls
    collectives: list[CollectiveCall]
    is_users: bool
    apart: list[Apart]
    donates: bool
    key: Any
    slots: Sequence[tf.TensorSpec]
    slot_names: Sequence[str]
    host_slots: frozenset[int]
    tensors: Sequence[Any]
    captured: Sequence[int]
    handles: Sequence[tf.Tensor]
    writes: Sequence[tuple[int, int]]
    results: Sequence[tuple[Shape, np.dtype]]
    returned: int
    host_results: Mapping[int, int]
    layout: Layout | None
    replicas_results: Callable[[Sequence[Any]], list[Any]]

    @property
    def meetings(self) -> list[str]:
        """Its cross-replica operations as text, with their lines, those first that perhaps not all replicas reach."""
        suspects = dict.fromkeys(f"{each.name}{at(each.where)}" for each in self.apart)
        times = collections.Counter(f"{each.kind}{at(each.where)}" for each in self.collectives)
        rows = [f"{suspect} (perhaps not all replicas reach it)" for suspect in suspects]
        return rows + [
            each if count == 1 else f"{each}, {count} times" for each, count in times.items() if each not in suspects
        ]

    @property
    def takes(self) -> str:
        """The first tensors among the arguments, in words: workers whose batches differ see it here."""
        words = [
            f"{name} {slot.dtype.name}{list(slot.shape)}"
            for name, slot in zip(self.slot_names, self.slots, strict=True)
        ]
        return ", ".join([*words[:_MOST_SHOWN], *(["..."] if len(words) > _MOST_SHOWN else [])])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes on each device: of the arguments, of the results, and of those results that replace arguments."""
        parameters = [slot for index, slot in enumerate(self.slots) if index not in self.host_slots]
        parameters += [self.tensors[index] for index in self.captured]
        values = [(tuple(each.shape), each.dtype.as_numpy_dtype) for each in parameters]
        described = filter(None, map(xla_ops.variable_dtype_and_shape, self.handles))
        values += [(tuple(shape), dtype.as_numpy_dtype) for dtype, shape in described]
        arguments = map(self._bytes, values, itertools.repeat(()) if self.layout is None else self.layout.arguments)
        results = list(
            map(self._bytes, self.results, itertools.repeat(()) if self.layout is None else self.layout.results)
        )
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
