"""Functions and their compiled programs: what is traced, lowered and compiled once is found again here."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from replica_engine._compat import function as tf_function
from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.xla.arguments import Arguments, ById, constant_key
from replica_engine.xla.compiled import Compiled
from replica_engine.xla.lower import Lowered
from replica_engine.xla.trace import Enter, Traced, trace

MOST_PROGRAMS = 256
"""How many traces, and how many executables, a cache keeps: those used last."""


class Programs:
    """The programs for one group of devices.

    A trace is found by its function, the structure, shapes and dtypes of its arguments and all of them that is
    no tensor. A lambda or nested function that is made anew for each call is the same function if its code and
    what it closes over are the same objects. Executables are found by the text of the program, so that
    functions that come to the same program share one.

    Args:
        devices: what to compile for.
        enter: what to put around a body while it is traced.
        most: how many to keep.
    """

    def __init__(self, devices: DeviceGroup, enter: Enter = contextlib.nullcontext, most: int = MOST_PROGRAMS):
        self.devices = devices
        self._enter = enter
        self._traces: LastUsed = LastUsed(most)
        self._executables: LastUsed = LastUsed(most)
        self._lock = threading.RLock()  # a trace may run another one, on the same thread

    def find(self, fn: Callable[..., Any], arguments: Arguments) -> Compiled:
        """The program for a call in eager mode."""
        key = (function_key(fn), arguments.key)
        with self._lock:
            compiled = self._traces.get(key)
            if compiled is None:
                compiled = self._traces[key] = self.compile(self.trace(fn, arguments).lower())
            return compiled

    def trace(self, fn: Callable[..., Any], arguments: Arguments) -> Traced:
        """Traces `fn`, anew."""
        return trace(fn, arguments, self.devices.size, self._enter)

    def compile(self, lowered: Lowered) -> Compiled:
        """Compiles a program, or finds it compiled."""
        key = (lowered.as_text(), tuple(lowered.results))
        with self._lock:
            executable: Executable | None = self._executables.get(key)
            compiled = Compiled(lowered, self.devices, executable)
            self._executables[key] = compiled.executable
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


def function_key(fn: Any, depth: int = 3) -> Any:
    """Equal for functions that would be traced to the same graph.

    Functions are equal that have the same code, globals, defaults and closed-over objects. `depth` is how far
    to look into functions that a function closes over.
    """
    if isinstance(fn, functools.partial):
        rest = tuple((name, _key(value, depth)) for name, value in sorted(fn.keywords.items()))
        return "partial", function_key(fn.func, depth), tuple(_key(value, depth) for value in fn.args), rest
    if isinstance(fn, MethodType):
        return "method", function_key(fn.__func__, depth), ById(fn.__self__)
    if not isinstance(fn, FunctionType) or tf_function.is_tf_function(fn) or depth == 0:
        return ById(fn)
    cells = tuple(_cell_key(cell, depth) for cell in fn.__closure__ or ())
    defaults = tuple(_key(value, depth) for value in fn.__defaults__ or ())
    named = tuple((name, _key(value, depth)) for name, value in sorted((fn.__kwdefaults__ or {}).items()))
    # fn.__dict__ as well: functools.wraps keeps the wrapped function there, and AutoGraph its settings.
    marks = tuple((name, _key(value, depth)) for name, value in sorted(fn.__dict__.items()))
    return fn.__code__, ById(fn.__globals__), cells, defaults, named, marks


def _cell_key(cell: CellType, depth: int) -> Any:
    try:
        return _key(cell.cell_contents, depth)
    except ValueError:  # not yet assigned
        return ById(cell)


def _key(value: Any, depth: int) -> Any:
    return function_key(value, depth - 1) if isinstance(value, FunctionType) else constant_key(value)
