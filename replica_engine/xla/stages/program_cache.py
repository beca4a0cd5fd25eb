"""Functions and their compiled programs: a function that was traced, lowered and compiled once is found again here."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.flight_record import SyncPointRecord, launch_records
from replica_engine.errors.base import warning
from replica_engine.pjrt import cpu_rewrites
from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.pjrt.plans.plan import Memory
from replica_engine.values.structure import ById, by_id
from replica_engine.xla import hooks
from replica_engine.xla.body import Body, LaunchLimits
from replica_engine.xla.host_calls.call import CallOrder
from replica_engine.xla.signature.arguments import Arguments, Shapes
from replica_engine.xla.signature.function_spec import FunctionSpec, Hosts, used_objects
from replica_engine.xla.signature.warm import Warm, is_one
from replica_engine.xla.stages.body_graph import of_any_size
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.launch import Launchable, Slots
from replica_engine.xla.stages.lower import Lowered
from replica_engine.xla.stages.results import Shape
from replica_engine.xla.stages.trace import Enter, Traced, trace
from replica_engine.xla.stages.uneven import Uneven
from replica_engine.xla.state.random_numbers import RandomState

_logger = logging.getLogger("replica_engine")

MANY_TRACES = 8
"""The number of traces of one function after which the cache warns."""

MOST_PROGRAMS = 256
"""How many functions, and traces of each, a cache keeps: the most recently used."""

_MOST_UNUSED = 16  # executables that are kept for the next model of the same shapes when no trace uses them


class ProgramCache:
    """The programs for one group of devices.

    A function is found by its code, and a trace of it by what the function uses (`key`) and by everything in its
    arguments except the values of tensors. Executables are found by the text of the program, so that functions with the
    same program share an executable. An executable that calls the host belongs to the functions that it calls.

    Args:
        devices: the devices to compile for.
        enter: makes the context manager around a body while it is traced.
        same_random: whether random ops draw the same numbers on all replicas.
        most: how many entries to keep.
        body: the state that the bodies share; None makes a new one.
        warns: whether to warn when one function is traced often.
        name: the name of the strategy that runs the bodies, for timelines.
        limits: how long a launch may take.
        soft_placement: as for `Body`.

    Attributes:
        body: the state that the bodies share.
    """

    def __init__(
        self,
        devices: DeviceGroup,
        enter: Enter = contextlib.nullcontext,
        same_random: bool = False,
        most: int = MOST_PROGRAMS,
        body: Body | None = None,
        warns: bool = True,
        name: str = "xla",
        limits: LaunchLimits | None = None,
        soft_placement: bool | None = None,
    ):
        hooks.install()
        self.devices = devices
        self._enter = enter
        self._warns = warns
        self.body = body or Body(
            devices.replicas,
            RandomState(devices, same_random),
            CallOrder(devices),
            name,
            limits,
            soft_placement,
            devices.size,
            devices.mesh,
            devices.spans,
        )
        self._functions: LastUsed = LastUsed(most)
        self._call_host: LastUsed = LastUsed(most)
        self._executables: weakref.WeakValueDictionary[Any, Executable] = weakref.WeakValueDictionary()
        self._last_executables: deque[Executable] = deque(maxlen=min(most, _MOST_UNUSED))
        self._died: deque[_Watch] = deque()
        self._most = most
        self._lock = threading.RLock()  # reentrant: a trace may run another trace on the same thread

    def sync_points(self) -> list[SyncPointRecord]:
        """The collectives of the most recent launches."""
        return launch_records(self.body.launches, self.devices.names, self.body.KEPT)

    def last_memory(self) -> Memory | None:
        """What the program that was launched last needs, if it is still kept; None before the first."""
        found = None if self.body.last_program is None else self.body.last_program()
        return None if found is None else found.memory()

    def beside(self) -> ProgramCache:
        """A second cache with its own programs and functions. It shares this one's `Body`, with the random numbers."""
        return ProgramCache(self.devices, self._enter, body=self.body, warns=False)

    def find(self, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> TracedProgram:
        """The traced body for a call in eager mode."""
        if self._died:
            self._drop()
        function = self._function(source)
        used = None if source.reduce_retracing or function.sparse else source.used(function.hosts)
        recent = function.recent
        if used is not None and recent is not None and recent.serves(used, arguments, shapes, self.body.moves_ops):
            recent.program.traced.sums.check(arguments)
            return recent.program
        program = self._find(source, arguments, shapes)
        program.traced.sums.check(arguments)
        if used is not None and not function.sparse and _Used(used).are(source.used(function.hosts)):
            recent = _Recent(_Used(used), arguments.key, shapes, self.body.moves_ops, program, function.hosts)
            function.recent, function.warm = recent, None
        return program

    def keep_warm(
        self, source: FunctionSpec, args: Sequence[Any], arguments: Arguments, program: TracedProgram
    ) -> None:
        """Notes that a call with these positional arguments, and no others, has run a program: see `recall`."""
        function = self._function(source)
        recent = function.recent
        if recent is not None and recent.program is program and recent.key == arguments.key:
            warm = Warm.of(args, arguments)
            if warm is not None:
                function.warm = recent, warm, program.find([each.shape for each in warm.slots])

    def recall(self, fn: Any, args: Sequence[Any]) -> tuple[TracedProgram, Compiled, list[list[np.ndarray]]] | None:
        """The program for a call in eager mode, and the values of its slots, if the call is like the last one.

        A warm launch spends most of its time around the program. So this compares objects by identity, and tensors by
        dtype and shape, before anything is taken apart. The caller checks that the thread has no summary writer.

        Args:
            fn: the function.
            args: its positional arguments; there are no others.

        Returns:
            None if the call must be looked at closely.
        """
        if type(fn) is not FunctionType:
            return None
        if self._died:
            self._drop()
        function: _Function | None = self._functions.get(fn.__code__)
        if function is None or function.warm is None:
            return None
        recent, warm, compiled = function.warm
        if function.recent is not recent or recent.moves_ops != self.body.moves_ops:
            return None
        slots = warm.values(args)
        if slots is None or not recent.used.are(used_objects(fn, recent.hosts)):
            return None
        if any(is_one(args[index]) for index in recent.program.traced.sums.slots):
            return None  # an error, perhaps
        return recent.program, compiled, slots

    def _find(self, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> TracedProgram:
        with self._lock:
            function = self._function(source)
            if source.reduce_retracing:
                key = (self.key(source), arguments.key)
                shapes = function.general[key] = _generalized(function.general.get(key), shapes)
            shapes = self._of_any_size(source, arguments, shapes)
            traced: TracedProgram | None = function.traces.get(self._signature(source, arguments, shapes))
            if traced is None:
                self._warn_of_many(source)
                traced = self.trace(source, arguments, shapes)
                self.learn(source, traced)
                if sparse := traced.traced.sparse_slots:
                    function.sparse[self.key(source), arguments.key] = sparse
                    shapes = self._of_any_size(source, arguments, shapes)
                    traced = self.trace(source, arguments, shapes)
                self._put(source, self._signature(source, arguments, shapes), traced)
            return traced

    def _put(self, source: FunctionSpec, signature: Any, traced: TracedProgram) -> None:
        """Files a trace until something that its signature names by identity has died."""
        code = _code(source)
        self._function(source).traces[signature] = traced
        for value in [each.value() for each in by_id((code, signature))]:
            with contextlib.suppress(TypeError):  # a type without weak references; `ById` keeps such objects alive
                watch = _Watch(value, self._died.append)
                watch.code, watch.signature = code, signature
                traced.watches.append(watch)

    def _drop(self) -> None:
        """Drops the traces of objects that have died; in a later call, if another thread is at work on the cache."""
        if not self._lock.acquire(blocking=False):  # a warm call never waits for a trace of another thread
            return
        dropped = []  # they go when the lock is free
        try:
            while self._died:
                watch = self._died.popleft()
                function: _Function | None = self._functions.get(watch.code)
                if function is None:
                    continue
                dropped.append(traced := function.traces.pop(watch.signature, None))
                if function.recent is not None and function.recent.program is traced:
                    function.recent = function.warm = None
                if any(each.value() is None for each in by_id(watch.code)):
                    del self._functions[watch.code]
        finally:
            self._lock.release()
        for traced in filter(None, dropped):
            traced.traced.forget()

    def _function(self, source: FunctionSpec) -> _Function:
        """What is known of a function: found by its code, by the key that it comes with, or by what a partial calls."""
        code = _code(source)
        found: _Function | None = self._functions.get(code)
        if found is None:
            with self._lock:
                found = self._functions[code] = self._functions.get(code) or _Function(self._most)
        return found

    def _of_any_size(self, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> Shapes:
        """The shapes, with the size unknown where a sparse argument stays on the host: one trace serves all sizes."""
        known = self._function(source).sparse
        sparse = known.get((self.key(source), arguments.key)) if known else None
        if not sparse:
            return shapes
        return tuple(of_any_size(shape) if index in sparse else shape for index, shape in enumerate(shapes))

    def key(self, source: FunctionSpec) -> Any:
        """The key that a trace is found by. It omits what only host functions use, since they may change that."""
        return source.key(self._function(source).hosts)

    def learn(self, source: FunctionSpec, traced: TracedProgram) -> None:
        """Notes which functions in a traced function run on the host."""
        function = self._function(source)
        function.hosts |= traced.traced.host_calls.codes
        function.warm = None

    def calls_host(self, key: Any) -> bool:
        """Whether the step of the device loop with this key is known to call the host."""
        return bool(self._call_host.get(key, False))

    def note_host_calls(self, key: Any) -> None:
        """Notes that the step of the device loop with this key calls the host."""
        self._call_host[key] = True

    def wants_numbers(self, source: FunctionSpec) -> bool:
        """Whether a function could not be compiled with tensors instead of Python numbers."""
        return self._function(source).wants_numbers

    def note_numbers(self, source: FunctionSpec) -> None:
        """Notes that a function cannot be compiled with tensors instead of Python numbers."""
        self._function(source).wants_numbers = True

    def keep(self, source: FunctionSpec, arguments: Arguments, traced: TracedProgram) -> None:
        """Files a trace under another key as well."""
        with self._lock:
            self._put(source, self._signature(source, arguments, ()), traced)

    def _signature(self, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> Any:
        return (self.key(source), arguments.key, tuple(map(_hashable, shapes)), self.body.moves_ops)

    def _warn_of_many(self, source: FunctionSpec) -> None:
        function = self._function(source)
        function.times += 1
        if function.times == MANY_TRACES and self._warns:
            text = (
                f"`{source.name}` has been traced {function.times} times, and most traces are compiled. It is traced "
                "again for new shapes and dtypes, for new Python values among its arguments (pass tensors: "
                "tf.constant(count)), and for a new function object that closes over other objects (pass these objects "
                "as arguments)."
            )
            _logger.warning(warning("many_traces", text))

    def trace(self, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> TracedProgram:
        """Traces a function, whether or not the cache has a trace."""
        return TracedProgram(self, trace(source, arguments, shapes, self.body, self._enter))

    def executable(self, text: str, lowered: Lowered, devices: DeviceGroup) -> Executable:
        """Compiles the text of a lowered program, or finds the executable in the cache."""
        calls = lowered.traced.host_calls
        owner = ById(calls) if calls.calls else None
        key = (text, tuple(lowered.program.results), devices.devices, owner, cpu_rewrites.enabled())
        with self._lock:
            executable: Executable | None = self._executables.get(key)
            if executable is None:
                executable = self._executables[key] = lowered.executable(text, devices)
                if owner is None:
                    self._last_executables.append(executable)
            return executable


def _code(source: FunctionSpec) -> Any:
    return source.code if isinstance(source.code, CodeType) else source.declared or ById(source.code)


class _Watch(weakref.ref):
    """A weak reference that knows which trace uses its object.

    It calls `append` of a deque when the object dies: the garbage collector may find that in any thread, under any
    lock, so no Python may run then.
    """

    __slots__ = ("code", "signature")
    code: Any
    signature: Any


class _Used:
    """The objects that a function uses, without keeping them alive where their types have weak references."""

    __slots__ = ("_ids", "_kept", "_weak")

    def __init__(self, objects: list[Any]):
        self._ids = list(map(id, objects))
        self._kept: list[Any] = []
        self._weak: list[weakref.ref] = []
        for value in objects:
            try:
                self._weak.append(weakref.ref(value))
            except TypeError:
                if type(value) is not CellType:  # a cell that counts is kept by the trace, which a host function is in
                    self._kept.append(value)

    def are(self, objects: list[Any] | None) -> bool:
        """Whether these are the very same objects; tracing and other threads may bind names to others.

        Equal addresses say so only while the objects from before are alive.
        """
        if objects is None or list(map(id, objects)) != self._ids:
            return False
        return not any(map(operator.is_, [ref() for ref in self._weak], itertools.repeat(None)))


class _Function:
    """What a cache knows of all functions with one code.

    Attributes:
        hosts: the code of functions in it that run on the host, as far as is known.
        times: how often it was traced.
        wants_numbers: whether it cannot be compiled with tensors instead of Python numbers.
        recent: the last call in eager mode.
        warm: the same with its arguments and program, if `recall` may find it.
        traces: its traces.
        general: with `reduce_retracing`, the shapes that fit all calls so far, by what it uses and the arguments' key.
        sparse: the slots of sparse arguments that stay on the host, by the same.
    """

    def __init__(self, most: int):
        self.hosts: Hosts = frozenset()
        self.times = 0
        self.wants_numbers = False
        self.recent: _Recent | None = None
        self.warm: tuple[_Recent, Warm, Compiled] | None = None
        self.traces: LastUsed = LastUsed(most)
        self.general: LastUsed = LastUsed(most)
        self.sparse: LastUsed = LastUsed(most)


class _Recent(NamedTuple):
    """The last call of a function: a call with the very same objects need not be looked up by its key."""

    used: _Used
    key: Any
    shapes: Shapes
    moves_ops: bool
    program: TracedProgram
    hosts: Hosts

    def serves(self, used: list[Any], arguments: Arguments, shapes: Shapes, moves_ops: bool) -> bool:
        """Whether the program is the one for a call."""
        return (
            self.used.are(used) and arguments.key == self.key and shapes == self.shapes and moves_ops == self.moves_ops
        )


class TracedProgram:
    """A traced body, compiled for each combination of shapes when it first occurs.

    Args:
        programs: the cache to compile with.
        traced: the body.
    """

    def __init__(self, programs: ProgramCache, traced: Traced):
        self.devices = programs.devices
        self.traced = traced
        self.executable = programs.executable
        self.watches: list[Any] = []  # they live as long as the trace
        self._lowered: LastUsed = LastUsed(64)
        self._compiled: LastUsed = LastUsed(64)

    def ready(self, slots: Slots, captured: Sequence[np.ndarray] | None = None) -> Launchable:
        """Compiles what a `Launch` with these arguments needs, and returns it.

        Compiling takes locks that another thread may hold while it waits for a program to end. So this must never be
        called while programs are kept waiting (`DeviceGroup.in_flight`).
        """
        sparse = self.traced.sparse_slots
        if any(
            value.shape != values[0].shape
            for index, values in enumerate(slots)
            if index not in sparse
            for value in values[1:]
        ):
            return Uneven(self.devices, self.traced, self.lowered, self.executable, slots, captured)
        shapes = [
            tuple(of_any_size(values[0].shape)) if index in sparse else values[0].shape
            for index, values in enumerate(slots)
        ]
        return self.find(shapes, None if captured is None else [value.shape for value in captured])

    def find(self, shapes: Sequence[Shape], captured: Sequence[Shape] | None = None) -> Compiled:
        """The program for arguments, and captured tensors of an outer graph, of these shapes."""
        key = (tuple(shapes), tuple(captured or ()))
        compiled = self._compiled.get(key)
        if compiled is None:
            lowered = self.lowered(shapes, captured)
            executable = self.executable(lowered.as_text(), lowered, self.devices)
            compiled = self._compiled[key] = Compiled(lowered.program, self.devices, executable)
        return compiled

    def lowered(self, shapes: Sequence[Shape], captured: Sequence[Shape] | None = None) -> Lowered:
        """The body lowered for these shapes."""
        key = (tuple(shapes), tuple(captured or ()))
        lowered = self._lowered.get(key)
        if lowered is None:
            lowered = self._lowered[key] = self.traced.lower(shapes, captured)
        return lowered


class LastUsed(OrderedDict):
    """A dictionary that keeps only the most recently used entries."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most
        self._lock = threading.RLock()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or the default. Counts as a use."""
        with self._lock:
            if key not in self:
                return default
            self.move_to_end(key)
            return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._lock:
            super().__setitem__(key, value)
            self.move_to_end(key)
            while len(self) > self._most:
                del self[next(iter(self))]


def _generalized(known: Shapes | None, shapes: Shapes) -> Shapes:
    """Shapes that fit both; the known shapes if they already do."""
    if known is None:
        return shapes
    return tuple(
        before if before.is_compatible_with(shape) else before.most_specific_compatible_shape(shape)
        for before, shape in zip(known, shapes, strict=True)
    )


def _hashable(shape: tf.TensorShape) -> Any:
    return None if shape.rank is None else tuple(shape)
