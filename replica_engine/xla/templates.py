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

from replica_engine._compat import distribute, function
from replica_engine.replica.structure import open_level
from replica_engine.xla.originals import original_of

Build = Callable[[Sequence[Any]], Any]
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
        build = self._open(value, _DEPTH)
        self.build: Build = build or (lambda _: value)

    def _open(self, value: Any, depth: int) -> Build | None:
        """None if there is no tensor of the graph in it."""
        if tf.is_symbolic_tensor(value):
            return self._place(value)
        if isinstance(value, tf.Tensor) or id(value) in self._entered:
            return None
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

        def build(tensors: Sequence[Any]) -> Any:
            # A cell without tensors stays the very same one, so that `nonlocal` goes on working.
            closure = tuple(
                cell if inner is None else CellType(inner(tensors)) for cell, inner in zip(cells, of_cells, strict=True)
            )
            defaults, named, wrapped = settings if of_settings is None else of_settings(tensors)
            made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults, closure)
            made.__kwdefaults__ = named
            made.__dict__.update(fn.__dict__)
            if wrapped is not None:
                made.__wrapped__ = wrapped  # type: ignore[attr-defined]
            return made

        return build


def _built(builds: Sequence[Build | None], values: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    return [value if build is None else build(tensors) for build, value in zip(builds, values, strict=True)]


def _partial(fn: Any, args: tuple, keywords: dict[str, Any]) -> functools.partial:
    return functools.partial(fn, *args, **keywords)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
