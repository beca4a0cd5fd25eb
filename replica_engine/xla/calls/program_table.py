"""The table of programs: a function that was traced, lowered and compiled once is found again here.

A call is compared with the last one of its function by identity (`last`), before anything is taken apart. Any other
call is found by its key (`entry`), or is traced. What was found is compiled for each combination of shapes when it
first occurs (`compiled`), and dropped when something that its key names by identity has died (`forget`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, Generic, TypeVar

import numpy as np

from replica_engine.errors import LoweringError, ReplicaMismatchError, base
from replica_engine.pjrt import device_group, plan, rewrites
from replica_engine.pjrt.executable import Executable
from replica_engine.process import sums_are_ordered
from replica_engine.upstream import distribute, eager, thread_state
from replica_engine.values.structure import ById, by_id
from replica_engine.xla.arguments import Arguments, Shapes, is_viewed
from replica_engine.xla.body import Body, LaunchLimits, install
from replica_engine.xla.function_spec import FunctionSpec, Hosts, used_objects
from replica_engine.xla.host_calls.host_call import CallOrder
from replica_engine.xla.stages.body_graph import Shape, with_any_size
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.launch import Slots
from replica_engine.xla.stages.lowered import Lowered
from replica_engine.xla.stages.traced import Enter, Traced, trace
from replica_engine.xla.state.random_numbers import RandomState

_logger = logging.getLogger("replica_engine")

MANY_TRACES = 8
"""The number of traces of one function after which the table warns."""

_MOST_PROGRAMS = 256  # functions, and traces of each, that a table keeps: the most recently used
_MOST_UNUSED = 16  # executables that are kept for the next model of the same shapes when no trace uses them
_MOST_SHAPES = 64  # programs of one trace
_MOST_BRANCHES = 8  # of one program: each new shape compiles those of earlier ones again

V = TypeVar("V")


class ProgramTable:
    """The programs for one group of devices.

    A function is found by its code, and a trace of it by what the function uses (its key) and by everything in its
    arguments except the values of tensors. Executables are found by the text of the program, so that functions with the
    same program share an executable. An executable that calls the host belongs to the functions that it calls.

    Args:
        devices: the devices to compile for.
        enter: makes the context manager around a body while it is traced.
        same_random: whether random ops draw the same numbers on all replicas.
        body: the state that the bodies share, of another table; None makes a new one. Then the table warns when one
            function is traced often.
        name: the name of the strategy that runs the bodies, for timelines.
        limits: how long a launch may take.
        soft_placement: as `soft` for `Body`.

    Attributes:
        devices: the devices.
        body: the state that the bodies share.
    """

    def __init__(
        self,
        devices: device_group.DeviceGroup,
        enter: Enter = contextlib.nullcontext,
        same_random: bool = False,
        body: Body | None = None,
        name: str = "xla",
        limits: LaunchLimits | None = None,
        soft_placement: bool | None = None,
    ):
        install()
        self.devices = devices
        self._enter = enter
        self._warns = body is None
        limits = limits or LaunchLimits()
        self.body = body or Body(
            devices, RandomState(devices, same_random), CallOrder(devices), name, limits, soft_placement
        )
        self._functions: LastUsed[_FunctionTraces] = LastUsed(_MOST_PROGRAMS)
        self._executables: weakref.WeakValueDictionary[Hashable, Executable] = weakref.WeakValueDictionary()
        self._last_executables: deque[Executable] = deque(maxlen=_MOST_UNUSED)
        self._died: deque[_Watch] = deque()
        self._lock = threading.RLock()  # reentrant: a trace may run another trace on the same thread

    def last_memory(self) -> plan.Memory | None:
        """What the program that was launched last needs, if it is still kept; None before the first."""
        found = None if self.body.last_program is None else self.body.last_program()
        return None if found is None else found.memory()

    def for_owner(self) -> ProgramTable:
        """A table for the functions of an object such as a model, with which it goes. It shares this one's `Body`."""
        return ProgramTable(self.devices, self._enter, body=self.body)

    def last(self, fn: object, args: Sequence[Any]) -> tuple[Compiled, Slots] | None:
        """The program for a call in eager mode, and the values of its slots, if the call is like the last one.

        A warm launch spends most of its time around the program. So this compares objects by identity, and tensors by
        dtype and shape, before anything is taken apart.

        Args:
            fn: the function.
            args: its positional arguments; there are no others.

        Returns:
            None if the call must be looked at closely.
        """
        # With a summary writer the step is one more argument, which only `entry` adds.
        if type(fn) is not FunctionType or thread_state.summary_state()[0] is not None:
            return None
        if self._died:
            self.forget()
        function = self._functions.get(fn.__code__)
        last = None if function is None else function.last
        warm = None if last is None else last.warm
        if last is None or warm is None or last.settings != self.body.settings:
            return None
        slots = warm.values(args)
        if slots is None or not last.uses(used_objects(fn, last.hosts)):
            return None
        if any(_is_one(args[index]) for index in last.entry.traced.sums.slots):
            return None  # an error, perhaps
        compiled = last.entry.compiled.get((warm.shapes, ()))
        return None if compiled is None else (compiled, slots)

    def entry(
        self, source: FunctionSpec, arguments: Arguments, shapes: Shapes, args: Sequence[Any] | None = None
    ) -> Entry:
        """The trace for a call in eager mode, made now if there is none.

        Args:
            source: the function.
            arguments: its arguments.
            shapes: the shapes to trace it for.
            args: the arguments by which `last` will recognise such a call; None if there are others besides.
        """
        if self._died:
            self.forget()
        function = self.function(source)
        used, last, settings = source.used(function.hosts), function.last, self.body.settings
        if last is not None and last.serves(used, arguments.key, shapes, settings):
            entry = last.entry
        else:
            # Only the last call is compared by identity: what comes in turns is found by its key.
            entry, last = self._by_key(function, source, arguments, shapes), None
        # The arguments of a loop are values of each replica, and its trace may be found by those of another.
        if source.step is None:
            entry.traced.sums.check(arguments)
        if last is None and used is not None:
            made = _Last(used, function.hosts, arguments.key, shapes, settings, entry)
            if made.uses(source.used(function.hosts)):
                last = function.last = made
        if last is not None and args is not None:
            last.warm = _Warm.from_call(args, arguments) or last.warm
        return entry

    def _by_key(self, function: _FunctionTraces, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> Entry:
        with self._lock:
            kind = source.key(function.hosts), arguments.key
            # With the lock until the trace is filed: another thread that calls the function must not trace it too.
            if (known := function.kinds.get(kind)) is not None:
                shapes = known.widened(shapes, source.reduce_retracing)
            entry = function.traces.get(self._signature(kind, shapes))
            if entry is None:
                self._warn_of_many(function, source)
                entry = self.trace(source, arguments, shapes)
                # What runs on the host is known now: what only that uses is not part of the key.
                function.hosts |= entry.traced.host_calls.codes
                function.last = None
                if entry.sparse and entry.widened(shapes) != shapes:
                    entry = self.trace(source, arguments, entry.widened(shapes))
                self.file(source, arguments, entry.shapes, entry)
            return entry

    def file(self, source: FunctionSpec, arguments: Arguments, shapes: Shapes, entry: Entry) -> None:
        """Files a trace under the key of a call, until something that the key names by identity has died."""
        with self._lock:
            function = self.function(source)
            kind = source.key(function.hosts), arguments.key
            signature = self._signature(kind, shapes)
            function.traces.put(signature, entry)
            if source.reduce_retracing or entry.sparse:
                function.kinds.put(kind, entry)
            for value in [each.value() for each in by_id((source.code, signature))]:
                with contextlib.suppress(TypeError):  # a type without weak references; `ById` keeps such objects alive
                    watch = _Watch(value, self._died.append)
                    watch.code, watch.signature = source.code, signature
                    entry.watches.append(watch)

    def _signature(self, kind: tuple[Any, Any], shapes: Shapes) -> tuple[Any, ...]:
        return (*kind, shapes, self.body.settings)

    def forget(self) -> None:
        """Drops the traces of objects that have died; in a later call, if another thread is at work on the table."""
        if not self._lock.acquire(blocking=False):  # a warm call never waits for a trace of another thread
            return
        dropped = []  # they go when the lock is free
        try:
            while self._died:
                watch = self._died.popleft()
                function = self._functions.get(watch.code)
                if function is None:
                    continue
                dropped.append(entry := function.traces.drop(watch.signature))
                dropped.append(function.kinds.drop(watch.signature[:2]))
                if function.last is not None and function.last.entry is entry:
                    function.last = None
                if any(each.value() is None for each in by_id(watch.code)):
                    self._functions.drop(watch.code)
        finally:
            self._lock.release()
        for entry in filter(None, dropped):
            entry.traced.forget()

    def function(self, source: FunctionSpec) -> _FunctionTraces:
        """What is known of all functions with the code of this one."""
        code = source.code
        found = self._functions.get(code)
        if found is None:
            with self._lock:
                found = self._functions.get(code) or _FunctionTraces()
                self._functions.put(code, found)
        return found

    def _warn_of_many(self, function: _FunctionTraces, source: FunctionSpec) -> None:
        function.times += source.step is None
        if function.times == MANY_TRACES and self._warns:
            text = (
                f"`{source.name}` has been traced {function.times} times, and most traces are compiled. It is traced "
                "again for new shapes and dtypes, for new Python values among its arguments (pass tensors: "
                "tf.constant(count)), and for a new function object that closes over other objects (pass these objects "
                "as arguments)."
            )
            _logger.warning(base.warning("many_traces", text))

    def trace(self, source: FunctionSpec, arguments: Arguments, shapes: Shapes) -> Entry:
        """Traces a function, whether or not the table has a trace. The trace is not filed."""
        return Entry(trace(source, arguments, shapes, self.body, self._enter), shapes)

    def ready(self, entry: Entry, slots: Slots, captured: Sequence[np.ndarray] | None = None) -> Compiled:
        """Compiles what a `Launch` with these arguments needs, and returns it.

        Compiling takes locks that another thread may hold while it waits for a program to end. So this must never be
        called while programs are kept waiting (`DeviceGroup.in_flight`).
        """
        sparse, size = entry.traced.sparse_slots, self.devices.size
        of_captured = None if captured is None else [value.shape for value in captured]
        if any(len({value.shape for value in values}) > 1 for index, values in enumerate(slots) if index not in sparse):
            of_each = [tuple(values[replica % len(values)].shape for values in slots) for replica in range(size)]
            return self._in_branches(entry, of_each, of_captured)
        shapes = [
            tuple(with_any_size(values[0].shape)) if index in sparse else values[0].shape
            for index, values in enumerate(slots)
        ]
        return self.compiled(entry, shapes, of_captured)

    def _in_branches(
        self, entry: Entry, of_each: Sequence[tuple[Shape, ...]], captured: Sequence[Shape] | None
    ) -> Compiled:
        """The program for replicas whose shares differ in shape: the last batch of a dataset.

        Each replica takes a branch that computes exactly its share. The program also has branches for the shapes that
        came before, up to a limit: there are many more combinations of shapes than shapes.

        Args:
            entry: the body.
            of_each: for each replica, the shapes of its arguments.
            captured: the shapes of captured tensors of an outer graph.

        Raises:
            ReplicaMismatchError: the body has cross-replica operations, which cannot be in branches.
        """
        key = (tuple(of_each), tuple(captured or ()))
        if (compiled := entry.compiled.get(key)) is not None:
            return compiled
        branches, joined = entry.joined.get(key[1]) or ([], None)
        if joined is None or not set(of_each).issubset(branches):
            branches = list(dict.fromkeys([*branches, *of_each]))
            if len(branches) > _MOST_BRANCHES:
                branches = list(dict.fromkeys(of_each))
            lowered = []
            for shapes in branches:
                lowered.append(self.lowered(entry, shapes, captured))
                if lowered[-1].has_collectives:
                    raise _mismatch(entry.traced, of_each)
            joined = Lowered.in_branches(lowered)
            if self.devices.mesh is not None and self._would_wait(joined):
                # This needs more memory, but no device waits in a branch that others do not take.
                joined = Lowered.in_branches(lowered, whole=True)
            entry.joined.put(key[1], (branches, joined))
        compiled = Compiled(joined.program, self.devices, self.executable(joined), list(map(branches.index, of_each)))
        entry.compiled.put(key, compiled)
        return compiled

    def _would_wait(self, joined: Lowered) -> bool:
        """Whether devices of all replicas would wait for each other in a branch of a program.

        If replicas may take different branches of the body itself, to compile it is an error then.
        """
        try:
            return self.executable(joined).exchanges_in_branches()
        except LoweringError:
            return True

    def compiled(self, entry: Entry, shapes: Sequence[Shape], captured: Sequence[Shape] | None = None) -> Compiled:
        """The program for arguments, and captured tensors of an outer graph, of these shapes."""
        key = (tuple(shapes), tuple(captured or ()))
        compiled = entry.compiled.get(key)
        if compiled is None:
            lowered = self.lowered(entry, shapes, captured)
            compiled = Compiled(lowered.program, self.devices, self.executable(lowered))
            entry.compiled.put(key, compiled)
        return compiled

    def lowered(self, entry: Entry, shapes: Sequence[Shape], captured: Sequence[Shape] | None = None) -> Lowered:
        """The body lowered for these shapes."""
        key = (tuple(shapes), tuple(captured or ()))
        lowered = entry.lowered.get(key)
        if lowered is None:
            lowered = entry.traced.lower(shapes, captured)
            entry.lowered.put(key, lowered)
        return lowered

    def executable(self, lowered: Lowered) -> Executable:
        """Compiles a lowered program, or finds the executable of its text in the table."""
        calls = lowered.traced.host_calls
        owner = ById(calls) if calls.calls else None
        results = tuple(lowered.program.results)
        # The switches change what is compiled, but not the text.
        key = (lowered.as_text(), results, owner, rewrites.enabled(), sums_are_ordered())
        with self._lock:
            executable: Executable | None = self._executables.get(key)
            if executable is None:
                executable = self._executables[key] = lowered.executable(self.devices)
                if owner is None:
                    self._last_executables.append(executable)
            return executable


def _mismatch(traced: Traced, of_each: Sequence[tuple[Shape, ...]]) -> ReplicaMismatchError:
    """The error of replicas whose arguments have these shapes, for a body with cross-replica operations."""
    name, shapes = next(
        (name, shapes)
        for name, shapes in zip(traced.slot_names, zip(*of_each, strict=True), strict=True)
        if len(set(shapes)) > 1
    )
    other = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
    met = next((f"{each.kind}{base.at(each.where)}" for each in traced.collectives), "")
    error = ReplicaMismatchError.shapes(name, other, str(shapes[0]), str(shapes[other]), met)
    error.by_replica = list(shapes)
    return error


class LastUsed(Generic[V]):
    """A dictionary that keeps only the most recently used values."""

    def __init__(self, most: int):
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.RLock()  # reentrant: comparing keys may run the garbage collector

    def get(self, key: Hashable) -> V | None:
        """The value of a key, or None. Counts as a use."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: Hashable, value: V) -> None:
        """Sets the value of a key."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)

    def drop(self, key: Hashable) -> V | None:
        """Removes a key. Returns its value, or None."""
        with self._lock:
            return self._values.pop(key, None)


@dataclass(eq=False)
class Entry:
    """A traced body, with its programs.

    Attributes:
        traced: the body.
        shapes: the shapes of the slots that it was traced for.
        sparse: the slots of sparse arguments that were to stay on the host.
        lowered: what was lowered, by the shapes of slots and of captured tensors of an outer graph.
        compiled: the programs, by the same.
        joined: the shapes for which a program has branches, and that program before it is compiled, by the shapes of
            captured tensors.
        watches: weak references to what its key names; they live as long as the trace.
    """

    traced: Traced
    shapes: Shapes
    sparse: frozenset[int] = field(init=False)
    lowered: LastUsed[Lowered] = field(default_factory=lambda: LastUsed(_MOST_SHAPES))
    compiled: LastUsed[Compiled] = field(default_factory=lambda: LastUsed(_MOST_SHAPES))
    joined: LastUsed[tuple[list[tuple[Shape, ...]], Lowered]] = field(default_factory=lambda: LastUsed(_MOST_SHAPES))
    watches: list[_Watch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sparse = self.traced.sparse_slots

    def widened(self, shapes: Shapes, reduce_retracing: bool = False) -> Shapes:
        """The shapes to trace for in place of others: one trace serves sparse arguments of any size on the host.

        With `reduce_retracing`, they fit all calls so far; they are those of this trace if it serves the shapes.
        """
        if reduce_retracing:
            shapes = tuple(
                before if before.is_compatible_with(shape) else before.most_specific_compatible_shape(shape)
                for before, shape in zip(self.shapes, shapes, strict=True)
            )
        return tuple(with_any_size(shape) if index in self.sparse else shape for index, shape in enumerate(shapes))


class _Watch(weakref.ref):
    """A weak reference that knows which trace uses its object.

    It calls `append` of a deque when the object dies: the garbage collector may find that in any thread, under any
    lock, so no Python may run then.
    """

    __slots__ = ("code", "signature")
    code: Hashable
    signature: tuple[Any, ...]


class _Last:
    """The last call of a function: a call with the very same objects need not be looked up by its key.

    It does not keep the objects alive that the function uses, where their types have weak references.

    Args:
        used: the objects that the function uses.
        hosts: what is known to run on the host, which decides what it uses.
        key: the key of the arguments.
        shapes: their shapes.
        settings: as in `Body`.
        entry: the trace.

    Attributes:
        warm: the arguments, if `ProgramTable.last` may recognise them.
    """

    def __init__(self, used: list[Any], hosts: Hosts, key: Any, shapes: Shapes, settings: Hashable, entry: Entry):
        self.hosts = hosts
        self.settings = settings
        self.entry = entry
        self.warm: _Warm | None = None
        self._key = key
        self._shapes = shapes
        self._ids = list(map(id, used))
        self._kept: list[Any] = []
        self._weak: list[weakref.ref] = []
        for value in used:
            try:
                self._weak.append(weakref.ref(value))
            except TypeError:
                if type(value) is not CellType:  # a cell that counts is kept by the trace, which a host function is in
                    self._kept.append(value)

    def uses(self, objects: list[Any] | None) -> bool:
        """Whether these are the very same objects; tracing and other threads may bind names to others.

        Equal addresses say so only while the objects from before are alive.
        """
        if objects is None or list(map(id, objects)) != self._ids:
            return False
        return not any(map(operator.is_, [ref() for ref in self._weak], itertools.repeat(None)))

    def serves(self, used: list[Any] | None, key: Any, shapes: Shapes, settings: Hashable) -> bool:
        """Whether the trace is the one for a call."""
        return self.uses(used) and key == self._key and shapes == self._shapes and settings == self.settings


class _FunctionTraces:
    """What a table knows of all functions with one code.

    Attributes:
        hosts: the code of functions in it that run on the host, as far as is known.
        times: how often it was traced.
        wants_numbers: whether it cannot be compiled with tensors instead of Python numbers.
        last: the last call in eager mode.
        traces: its traces, by what it uses, the key of the arguments, their shapes, and the settings of `Body`.
        kinds: the newest trace that may serve several shapes, by what it uses and the key of the arguments.
    """

    def __init__(self) -> None:
        self.hosts: Hosts = frozenset()
        self.times = 0
        self.wants_numbers = False
        self.last: _Last | None = None
        self.traces: LastUsed[Entry] = LastUsed(_MOST_PROGRAMS)
        self.kinds: LastUsed[Entry] = LastUsed(_MOST_PROGRAMS)


class _Warm:
    """Positional arguments that are all tensors, one for all replicas or one for each.

    Args:
        slots: for each argument, how many values it has, and the dtype and the shape of each of them.

    Attributes:
        shapes: the shape of each argument.
    """

    def __init__(self, slots: Sequence[tuple[int, tuple[Any, tuple[int, ...]]]]):
        self._slots = slots
        self.shapes = tuple(shape for _, (_, shape) in slots)

    @classmethod
    def from_call(cls, args: Sequence[Any], arguments: Arguments) -> _Warm | None:
        """The arguments of a call; None if some are not tensors whose memory NumPy can see, or are of uneven shapes.

        Args:
            args: the positional arguments; there are no others.
            arguments: the same, taken apart.
        """
        if type(args) is not tuple or len(args) != len(arguments.slots) or arguments.summary_writer is not None:
            return None
        slots = []
        for value in args:
            values = _values(value)
            if not values or not all(type(each) is eager.EagerTensor and is_viewed(each) for each in values):
                return None
            kinds = set(map(eager.described, values))
            if len(kinds) > 1:
                return None
            slots.append((len(values), kinds.pop()))
        return cls(slots)

    def values(self, args: Sequence[Any]) -> list[list[np.ndarray]] | None:
        """The values of arguments like these, as arrays; None if the arguments are not like these."""
        if type(args) is not tuple or len(args) != len(self._slots):
            return None
        found = []
        for value, (count, kind) in zip(args, self._slots, strict=True):
            values = _values(value)
            if len(values) != count:
                return None
            for each in values:
                if type(each) is not eager.EagerTensor or eager.described(each) != kind:
                    return None
            found.append(list(map(np.asarray, values)))  # what `view` does with these dtypes
        return found


def _is_one(value: Any) -> bool:
    """Whether all replicas get the same tensor of an argument."""
    first, *others = _values(value)
    return all(each is first for each in others)


def _values(value: Any) -> Sequence[Any]:
    """The values of an argument; none if it is neither a tensor nor a distributed value of a plain type."""
    if type(value) is eager.EagerTensor:
        return (value,)
    return value.values if type(value) in _DISTRIBUTED else ()


_DISTRIBUTED = frozenset((distribute.PerReplica, distribute.LaterPerReplica, distribute.Mirrored))
