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

from replica_engine._compat import distribute, function, variables
from replica_engine.replica.structure import open_level
from replica_engine.xla.originals import original_of

Build = Callable[[Any], Any]
"""Makes the value again, with these tensors in its places."""

_DEPTH = 4  # of functions that functions close over


class Template:
    """A value with places for the tensors of a graph under construction.

    Args:
        value: a structure, which may hold functions that close over tensors.

    Attributes:
        tensors: what was found, each once.
        build: the value again, with other tensors.
    """

    def __init__(self, value: Any):
        self.tensors: list[tf.Tensor] = []
        self._places: dict[int, int] = {}
        self._entered: set[int] = set()  # what is being opened: structures and closures may refer to themselves
        self._graphs = variables.graphs()
        build = self._open(value, _DEPTH)
        self.build: Build = (lambda _: value) if build is None else (lambda tensors: build(_Values(tensors)))

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
                return self._open_function(value, depth - 1) if depth else None
            if isinstance(value, (tf.Variable, distribute.DistributedValues)):
                return None
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
        contents = [_contents(cell) for cell in cells]
        settings = (fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None))
        of_cells = [self._open(content, depth) for content in contents]
        of_settings = self._open(settings, depth)
        if not any(of_cells) and of_settings is None:
            return None if fn is converted else lambda _: fn

        def build(tensors: Any) -> Any:
            # A cell without tensors stays the very same one, so that `nonlocal` goes on working. The others are filled
            # when the function is there, which may close over itself.
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
    """Tensors for the places of a template.

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


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
