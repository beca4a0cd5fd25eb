"""Host functions whose tensors are taken out in the body, and the functions that the user wrote for them.

A host function gets tensors of the body that calls it as arguments, or by closing over them. Both are places for
tensors. They are found once, while the body is traced. On the host, each call rebuilds the function and its arguments
with concrete tensors in those places.

A function that AutoGraph converted is replaced by the function that the user wrote. A function defined inside a
converted function is converted with it. In the converted one, `int(x)` of a tensor is a tensor, and a loop over a
tensor follows the rules of `tf.while_loop`. That is right for a graph, and wrong on the host, where a function must run
as it was written. Its code is still in the file it was written in, and the variables that it closes over have kept
their names. So the function can be rebuilt (`find_written_function`).
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import tensorflow as tf

from replica_engine.process import interrupts
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import autograph, function_graphs
from replica_engine.values.structure import open_level
from replica_engine.xla import function_spec
from replica_engine.xla.arguments import check_known


def find_written_function(fn: FunctionType) -> FunctionType:
    """The function as it was written; `fn` itself if it was not converted, or if its source cannot be found."""
    code = fn.__code__
    if autograph.OPERATORS not in code.co_freevars:
        return fn
    file, first = autograph.first_line(code)
    if autograph.is_generated(file):
        return fn
    cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
    arguments = inspect.getargs(code)
    candidates = [
        found
        for found in _compile_codes(file, "".join(linecache.getlines(file)))
        if found.co_name == code.co_name
        and inspect.getargs(found) == arguments
        and set(found.co_freevars) <= set(cells)
        # A decorated function begins at its decorator, and a lambda of several lines may be mapped to a later line.
        if 0 <= first - found.co_firstlineno <= 20
    ]
    nearest = [found for found in candidates if found.co_firstlineno == max(each.co_firstlineno for each in candidates)]
    if len(nearest) != 1:
        return fn
    closure = tuple(cells[name] for name in nearest[0].co_freevars)
    made = FunctionType(nearest[0], fn.__globals__, fn.__name__, fn.__defaults__, closure)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__qualname__ = fn.__qualname__
    made.__dict__.update((name, value) for name, value in fn.__dict__.items() if not name.startswith("autograph"))
    return made


@functools.lru_cache(maxsize=32)
def _compile_codes(file: str, source: str) -> list[CodeType]:
    """All code objects of a file. `source` is the file's text, since the text may change in a notebook."""
    try:
        return list(_within(compile(source, file, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):  # for example the syntax of a notebook
        return []


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


Build = Callable[["_Values"], Any]
"""Rebuilds a value, with these tensors in its places."""

Read = Callable[[object], tf.Tensor | None]
"""Takes a variable among the arguments; returns its value if it is on the devices, otherwise None."""

_DEPTH = 32  # levels of functions that functions close over


class Closure:
    """A call of a function, with places for the tensors of a graph under construction.

    Args:
        fn: the function, which may close over tensors.
        args: its arguments: structures that may hold tensors, variables of the devices, and functions that close over
            tensors.
        kwargs: its keyword arguments.
        read: takes a variable among the arguments; returns its value if it is on the devices, otherwise None.

    Attributes:
        tensors: the tensors that were found, each once.
        build: rebuilds the function and its arguments with other tensors.

    Raises:
        HostResultError: an argument, or what the function closes over, is the unknown result of another host function.
    """

    def __init__(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object], read: Read):
        self.tensors: list[tf.Tensor] = []
        self._value = (fn, args, kwargs)
        self._read: Read | None = read
        self._places: dict[int, int] = {}
        self._entered: set[int] = set()  # the values being opened: structures and closures may refer to themselves
        self._graphs = eager.graphs()
        # Each cell, its content when the call was made, and whether a function assigns to it.
        self._cells: dict[int, tuple[CellType, object, bool]] = {}
        self._rebound: set[int] = set()
        self.build = self._opened()

    def settle(self) -> None:
        """Called when the body has been traced: keeps names that the body has bound to another value since the call.

        For this call such a name, for example one that a loop in the body updates, keeps the value it had when the call
        was made. A name that a function assigns to while it runs is left alone.
        """
        self._rebound = {
            key
            for key, (cell, content, assigned) in self._cells.items()
            if not assigned and _contents(cell) is not content
        }
        if self._rebound:
            self.build = self._opened()

    def _opened(self) -> Callable[[Sequence[tf.Tensor]], tuple[Any, ...]]:
        fn, args, kwargs = self._value
        with interrupts.set_for_block(self, "_read", None):
            # A variable that the function closes over stays a variable, which it may write; only arguments become
            # values.
            of_fn = self._open(fn, _DEPTH)
        of_args, of_kwargs = self._open(args, _DEPTH), self._open(kwargs, _DEPTH)

        def build(tensors: Sequence[tf.Tensor]) -> tuple[object, ...]:
            values = _Values(tensors)
            return tuple(_built((of_fn, of_args, of_kwargs), (fn, args, kwargs), values))

        return build

    def _open(self, value: Any, depth: int) -> Build | None:
        """How to rebuild a value; None if it holds no tensor of the graph."""
        if tf.is_symbolic_tensor(value) and any(value.graph is graph for graph in self._graphs):
            return self._place(value, None if id(value) in self._places else value)
        if isinstance(value, tf.Tensor):  # eager, or left over from another trace
            return None
        check_known(value)
        if id(value) in self._entered:
            return (lambda tensors: tensors.made[id(value)]) if isinstance(value, FunctionType) else None
        self._entered.add(id(value))
        try:
            if isinstance(value, (FunctionType, MethodType, functools.partial)) or function_graphs.is_tf_function(
                value
            ):
                with interrupts.set_for_block(self, "_read", None):
                    return self._open_function(value, depth - 1) if depth else None
            if isinstance(value, (tf.Variable, distribute.DistributedValues)):
                return self._open_variable(value)
            if isinstance(value, tf.__internal__.CompositeTensor):
                return self._open_composite(value)
            return self._open_structure(value, depth)
        finally:
            self._entered.discard(id(value))

    def _place(self, value: object, tensor: tf.Tensor | None) -> Build | None:
        """The place of a value, which is new if a tensor is given that stands for it; None if there is none."""
        if tensor is not None:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(tensor)
        index = self._places.get(id(value))
        return None if index is None else itemgetter(index)

    def _open_variable(self, value: object) -> Build | None:
        """How to rebuild a variable among the arguments: its value if it is on the devices; otherwise None."""
        if self._read is None:
            return None
        return self._place(value, None if id(value) in self._places else self._read(value))

    def _open_composite(self, value: object) -> Build | None:
        parts = tf.nest.flatten(value, expand_composites=True)
        builds = [self._open(part, 0) for part in parts]
        if not any(builds):
            return None
        return lambda tensors: tf.nest.pack_sequence_as(value, _built(builds, parts, tensors), expand_composites=True)

    def _open_structure(self, value: object, depth: int) -> Build | None:
        opened = open_level(value)  # not `flatten`: a part without tensors stays the same object, and may be a cycle
        if opened is None:
            return None
        level, children = opened
        builds = [self._open(child, depth) for child in children]
        if not any(builds):
            return None
        return lambda tensors: level.rebuild(_built(builds, children, tensors))

    def _open_function(self, fn: Any, depth: int) -> Build | None:
        if isinstance(fn, MethodType):
            inner = self._open(fn.__func__, depth)
            return None if inner is None else lambda tensors: MethodType(inner(tensors), fn.__self__)
        if isinstance(fn, functools.partial):
            parts = self._open_structure((fn.func, fn.args, fn.keywords), depth)
            return None if parts is None else lambda tensors: _partial(*parts(tensors))
        if not isinstance(fn, FunctionType):  # a tf.function; without its graph, which could not take other tensors
            return self._open(fn.python_function, depth + 1)
        return self._open_plain_function(find_written_function(fn), fn, depth)

    def _open_plain_function(self, fn: FunctionType, converted: FunctionType, depth: int) -> Build | None:
        cells = fn.__closure__ or ()
        contents = []
        for name, cell in zip(fn.__code__.co_freevars, cells, strict=True):
            _, content, assigned = self._cells.get(id(cell), (cell, _contents(cell), False))
            self._cells[id(cell)] = cell, content, assigned or function_spec.assigns(fn.__code__, name)
            contents.append(content)
        settings = (fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None))
        of_cells = [
            self._open(content, depth) or (_constantly(content) if id(cell) in self._rebound else None)
            for cell, content in zip(cells, contents, strict=True)
        ]
        of_settings = self._open(settings, depth)
        if not any(of_cells) and of_settings is None:
            return None if fn is converted else lambda _: fn

        def build(tensors: _Values) -> FunctionType:
            # A cell without tensors stays the very same cell, so that `nonlocal` keeps working, unless the body has
            # rebound its name since. The others are filled after the function exists, which may close over itself.
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
        made: functions that were rebuilt with them, by the id of the function that each stands for.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        super().__init__(tensors)
        self.made: dict[int, FunctionType] = {}


def _built(builds: Sequence[Build | None], values: Sequence[object], tensors: _Values) -> list[object]:
    return [value if build is None else build(tensors) for build, value in zip(builds, values, strict=True)]


def _partial(fn: Callable[..., object], args: tuple[object, ...], keywords: dict[str, object]) -> functools.partial:
    return functools.partial(fn, *args, **keywords)


def _constantly(value: object) -> Build:
    return lambda _: value


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
