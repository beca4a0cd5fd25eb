"""The data of a lowered body that the later stages need, made once when the body is lowered.

Here are also the results of a launch as tensors, and the counts of all stages.

On CPU devices a result stays where the program left it until somebody looks at it, since making a tensor takes about as
long as a small program. Then small values become views of the device's memory, which no later program writes: only
values of variables are donated. Large values are copied, as jaxlib may free the memory of a view late. On other devices
the values are fetched at once, as the program may still run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import eager
from replica_engine._tf.graphs import xla_ops
from replica_engine.diagnostics.flight_record import CollectiveCall
from replica_engine.errors.base import at
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.pjrt.partitions import Axes, Layout
from replica_engine.process import shutdown
from replica_engine.xla.analysis.meetings import Apart
from replica_engine.xla.body import Body
from replica_engine.xla.host_calls.call import HostCalls

Shape = tuple[int, ...]
Column = Sequence[Any] | Callable[[], list[tf.Tensor]]
"""One result: the values of the replicas, or a function that makes a tensor of each."""

_MOST_SHOWN = 8  # arguments of a program, in words
_MOST_BYTES = 1 << 14  # of a view
_VIEWED = frozenset(map(np.dtype, "?bBhHiIqQefdFD"))  # dtypes that DLPack and TensorFlow know
_counts_lock = threading.Lock()


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


def column(shape: tuple[int, ...], dtype: np.dtype) -> Callable[[Array], Column]:
    """How to make a column of an array with this shape and dtype on CPU devices."""
    is_viewed = dtype in _VIEWED and 0 < np.prod(shape, dtype=int) * dtype.itemsize <= _MOST_BYTES
    return functools.partial(functools.partial, _views if is_viewed else _copies)


def tensors_of(column: Column) -> list[tf.Tensor]:
    """The tensors of a column, one for each replica."""
    return column() if callable(column) else list(map(_as_tensor, column))


def _views(array: Array) -> list[tf.Tensor]:
    with shutdown.running():  # who looks at a result late may be a daemon thread
        return list(map(eager.of_capsule, DeviceGroup.views(array)))


def _copies(array: Array) -> list[tf.Tensor]:
    with shutdown.running():
        return list(map(_as_tensor, DeviceGroup.shards(array)))


def _as_tensor(value: Any) -> tf.Tensor:
    return eager.tensor(value) if isinstance(value, np.ndarray) and value.dtype != object else tf.constant(value)


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often this process has traced, lowered, compiled and launched, as `counts` returns it.

    Attributes:
        traces: how many times a Python function became a graph; twice for a function that creates variables.
        lowerings: how many times a graph became a program.
        compiles: how many times a program became an executable.
        launches: how many times an executable ran.
        cache_hits: how many executables were read from the cache folder (`set_cache_dir`) instead of compiled.
    """

    traces: int = 0
    lowerings: int = 0
    compiles: int = 0
    launches: int = 0
    cache_hits: int = 0

    def __sub__(self, other: Counts) -> Counts:
        """The counts between two moments."""
        return Counts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


_now = {field.name: 0 for field in dataclasses.fields(Counts)}


def counts() -> Counts:
    """Returns how often this process has traced, lowered, compiled and launched so far.

    Example:
        >>> from replica_engine import xla
        >>> before = xla.counts()
        >>> program = xla.lower(lambda x: x + 1, [[1.0], [2.0]])
        >>> xla.counts() - before
        Counts(traces=1, lowerings=1, compiles=0, launches=0, cache_hits=0)
    """
    with _counts_lock:
        return Counts(**_now)


def count(what: str) -> None:
    """Adds one to the count with this name."""
    with _counts_lock:
        _now[what] += 1
