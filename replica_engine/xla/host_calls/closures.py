"""Calls of host functions with the tensors of the body taken out of them, and put in again on the host.

What a host function uses of the body it is called in reaches it as an argument, or by closing over it. Both are
places for tensors, found once while the body is traced; on the host each call gets the function and arguments again
with concrete tensors in those places. Functions that AutoGraph converted are as they were written again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute, function, variables
from replica_engine.values.structure import open_level
from replica_engine.xla.host_calls.originals import original_of
from replica_engine.xla.signature.function_spec import assigns

Build = Callable[[Any], Any]
"""Makes the value again, with these tensors in its places."""

_DEPTH = 32  # of functions that functions close over


class Closure:
    """A call of a function, with places for the tensors of a graph under construction.

    Args:
        fn: the function, which may close over tensors.
        args: its arguments: structures that may hold tensors, variables of the devices, and functions likewise.
        kwargs: likewise.
        read: of a variable among the arguments, its value if the devices have it; or else None.

    Attributes:
        tensors: what was found, each once.
        build: function and arguments again, with other tensors.
    """

    def __init__(self, fn: Any, args: tuple, kwargs: dict[str, Any], read: Callable[[Any], tf.Tensor | None]):
        self.tensors: list[tf.Tensor] = []
        self._value = (fn, args, kwargs)
        self._read: Callable[[Any], tf.Tensor | None] | None = read
        self._places: dict[int, int] = {}
        self._entered: set[int] = set()  # what is being opened: structures and closures may refer to themselves
        self._graphs = variables.graphs()
        self._cells: dict[
            int, tuple[CellType, Any, bool]
        ] = {}  # what they had when the call was made; is it assigned to
        self._rebound: set[int] = set()
        self.build = self._opened()

    def settle(self) -> None:
        """The body has been traced: what it has bound anew since keeps for this call what it was bound to then.

        A name that a loop in the body goes on with, say. What a function assigns to as it runs is left alone.
        """
        self._rebound = {
            key
            for key, (cell, content, assigned) in self._cells.items()
            if not assigned and _contents(cell) is not content
        }
        if self._rebound:
            self.build = self._opened()

    def _opened(self) -> Build:
        fn, args, kwargs = self._value
        read, self._read = self._read, None
        of_fn = self._open(fn, _DEPTH)
        self._read = read
        of_args, of_kwargs = self._open(args, _DEPTH), self._open(kwargs, _DEPTH)

        def build(tensors: Sequence[Any]) -> Any:
            values = _Values(tensors)
            return tuple(_built((of_fn, of_args, of_kwargs), (fn, args, kwargs), values))

        return build

    def _open(self, value: Any, depth: int) -> Build | None:
        """None if there is no tensor of the graph in it."""
        if tf.is_symbolic_tensor(value) and any(value.graph is graph for graph in self._graphs):
            return self._place(value)
        if isinstance(value, tf.Tensor):  # eager, or left behind by another trace
            return None
        if id(value) in self._entered:
            return (lambda tensors: tensors.made[id(value)]) if isinstance(value, FunctionType) else None
        self._entered.add(id(value))
        try:
            if isinstance(value, (FunctionType, MethodType, functools.partial)) or function.is_tf_function(value):
                read, self._read = self._read, None
                found = self._open_function(value, depth - 1) if depth else None
                self._read = read
                return found
            if isinstance(value, (tf.Variable, distribute.DistributedValues)):
                return self._open_variable(value)
            if isinstance(value, tf.__internal__.CompositeTensor):
                return self._open_composite(value)
            return self._open_structure(value, depth)
        finally:
            self._entered.discard(id(value))

    def _place(self, tensor: tf.Tensor) -> Build:
        index = self._places.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return lambda tensors: tensors[index]

    def _open_variable(self, value: Any) -> Build | None:
        """Among the arguments, its value if it is on the devices."""
        if self._read is None:
            return None
        key = id(value)
        if key not in self._places:
            read = self._read(value)
            if read is None:
                return None
            self._places[key] = len(self.tensors)
            self.tensors.append(read)
        index = self._places[key]
        return lambda tensors: tensors[index]

    def _open_composite(self, value: Any) -> Build | None:
        parts = tf.nest.flatten(value, expand_composites=True)
        builds = [self._open(part, 0) for part in parts]
        if not any(builds):
            return None
        return lambda tensors: tf.nest.pack_sequence_as(value, _built(builds, parts, tensors), expand_composites=True)

    def _open_structure(self, value: Any, depth: int) -> Build | None:
        level = open_level(value)
        if level is None:
            return None
        builds = [self._open(child, depth) for child in level.children]
        if not any(builds):
            return None
        return lambda tensors: level.rebuild(_built(builds, level.children, tensors))

    def _open_function(self, fn: Any, depth: int) -> Build | None:
        if isinstance(fn, MethodType):
            inner = self._open(fn.__func__, depth)
            return None if inner is None else lambda tensors: MethodType(inner(tensors), fn.__self__)
        if isinstance(fn, functools.partial):
            parts = self._open_structure((fn.func, fn.args, fn.keywords), depth)
            return None if parts is None else lambda tensors: _partial(*parts(tensors))
        if not isinstance(fn, FunctionType):  # a tf.function; without its graph, which could not take other tensors
            return self._open(fn.python_function, depth + 1)
        return self._open_plain_function(original_of(fn), fn, depth)

    def _open_plain_function(self, fn: FunctionType, converted: FunctionType, depth: int) -> Build | None:
        cells = fn.__closure__ or ()
        contents = [
            self._cells.setdefault(id(cell), (cell, _contents(cell), assigns(fn.__code__, name)))[1]
            for name, cell in zip(fn.__code__.co_freevars, cells, strict=True)
        ]
        for name, cell in zip(fn.__code__.co_freevars, cells, strict=True):
            if assigns(fn.__code__, name):
                self._cells[id(cell)] = (*self._cells[id(cell)][:2], True)
        settings = (fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None))
        of_cells = [
            self._open(content, depth) or (_constantly(content) if id(cell) in self._rebound else None)
            for cell, content in zip(cells, contents, strict=True)
        ]
        of_settings = self._open(settings, depth)
        if not any(of_cells) and of_settings is None:
            return None if fn is converted else lambda _: fn

        def build(tensors: Any) -> Any:
            # A cell without tensors stays the very same one, so that `nonlocal` goes on working, unless the body has
            # bound it anew since. The others are filled when the function is there, which may close over itself.
            closure = tuple(cell if inner is None else CellType() for cell, inner in zip(cells, of_cells, strict=True))
            made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure)
            tensors.made[id(converted)] = made
            for cell, inner in zip(closure, of_cells, strict=True):
                if inner is not None:
                    cell.cell_contents = inner(tensors)
            defaults, named, wrapped = settings if of_settings is None else of_settings(tensors)
            made.__defaults__, made.__kwdefaults__ = defaults, named
            made.__dict__.update(fn.__dict__)
            if wrapped is not None:
                made.__wrapped__ = wrapped  # type: ignore[attr-defined]
            return made

        return build


class _Values(list):
    """Tensors for the places of a closure.

    Attributes:
        made: functions that have been made with them, by the id of what they stand for.
    """

    def __init__(self, tensors: Sequence[Any]):
        super().__init__(tensors)
        self.made: dict[int, Any] = {}


def _built(builds: Sequence[Build | None], values: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    return [value if build is None else build(tensors) for build, value in zip(builds, values, strict=True)]


def _partial(fn: Any, args: tuple, keywords: dict[str, Any]) -> functools.partial:
    return functools.partial(fn, *args, **keywords)


def _constantly(value: Any) -> Build:
    return lambda _: value


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
