"""Functions and their compiled programs: what is traced, lowered and compiled once is found again here."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from typing import Any

import tensorflow as tf

from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.xla.arguments import Arguments, Shapes
from replica_engine.xla.body import Body
from replica_engine.xla.compiled import Compiled
from replica_engine.xla.lower import Lowered
from replica_engine.xla.random_numbers import RandomState
from replica_engine.xla.source import Source
from replica_engine.xla.trace import Enter, Traced, trace

MOST_PROGRAMS = 256
"""How many traces, and how many executables, a cache keeps: those used last."""


class Programs:
    """The programs for one group of devices.

    A trace is found by its function (`Source.key`) and by all of its arguments that is no tensor's value.
    Executables are found by the text of the program, so that functions that come to the same program share
    one.

    Args:
        devices: what to compile for.
        enter: what to put around a body while it is traced.
        same_random: whether random ops draw the same numbers on all replicas.
        most: how many to keep.
    """

    def __init__(
        self,
        devices: DeviceGroup,
        enter: Enter = contextlib.nullcontext,
        same_random: bool = False,
        most: int = MOST_PROGRAMS,
    ):
        self.devices = devices
        self._enter = enter
        self._body = Body(devices.size, RandomState(devices, same_random))
        self._traces: LastUsed = LastUsed(most)
        self._general: LastUsed = LastUsed(most)
        self._executables: LastUsed = LastUsed(most)
        self._lock = threading.RLock()  # a trace may run another one, on the same thread

    def find(self, source: Source, arguments: Arguments, shapes: Shapes) -> Compiled:
        """The program for a call in eager mode."""
        key = (source.key, arguments.key)
        with self._lock:
            if source.seldom:
                shapes = self._general[key] = _generalized(self._general.get(key), shapes)
            key = (*key, tuple(map(_hashable, shapes)))
            traced: TracedProgram | None = self._traces.get(key)
            if traced is None:
                traced = self._traces[key] = self.trace(source, arguments, shapes)
            return traced.find([tuple(slot.shape) for slot in arguments.slots])

    def trace(self, source: Source, arguments: Arguments, shapes: Shapes) -> TracedProgram:
        """Traces a function, anew."""
        return TracedProgram(self, trace(source, arguments, shapes, self._body, self._enter))

    def compile(self, lowered: Lowered) -> Compiled:
        """Compiles a program, or finds it compiled."""
        key = (lowered.as_text(), tuple(lowered.results))
        with self._lock:
            executable: Executable | None = self._executables.get(key)
            compiled = Compiled(lowered, self.devices, executable)
            self._executables[key] = compiled.executable
            return compiled


class TracedProgram:
    """A traced body, compiled for the shapes that come.

    Args:
        programs: what to compile with.
        traced: the body.
    """

    def __init__(self, programs: Programs, traced: Traced):
        self.traced = traced
        self._programs = programs
        self._compiled: LastUsed = LastUsed(64)

    def find(self, shapes: list[tuple[int, ...]], captured: list[tuple[int, ...]] | None = None) -> Compiled:
        """The program for arguments, and captured tensors of an outer graph, of these shapes."""
        key = (tuple(shapes), tuple(captured or ()))
        compiled = self._compiled.get(key)
        if compiled is None:
            lowered = self.traced.lower(shapes, captured)
            compiled = self._compiled[key] = self._programs.compile(lowered)
        return compiled


class LastUsed(OrderedDict):
    """A dictionary that keeps the entries used last."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary; counts as a use."""
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            del self[next(iter(self))]


def _generalized(known: Shapes | None, shapes: Shapes) -> Shapes:
    """Shapes that take both; those that are known if they already do."""
    if known is None:
        return shapes
    return tuple(
        before if before.is_compatible_with(shape) else before.most_specific_compatible_shape(shape)
        for before, shape in zip(known, shapes, strict=True)
    )


def _hashable(shape: tf.TensorShape) -> Any:
    return None if shape.rank is None else tuple(shape)
