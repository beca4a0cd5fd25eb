"""Which variable a handle is a component of, and who uses it. Checked on TensorFlow 2.21.0.

`trace_once` copies what replica 0 has traced for the other replicas. In the copies, the handle of a component of a
distributed variable must become that of another component, if the program reached it through the distributed variable.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

# DistributedVariable: whose components are found by their handles.
from tensorflow.python.distribute import values as _values

# _call_flat: the call of a traced function.
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction as _ConcreteFunction

# _ConstantValue: the value of a tensor that is known at trace time, without the conversions around it.
from tensorflow.python.framework import tensor_util as _tensor_util

# BaseResourceVariable: the class of components.
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as _BaseResourceVariable

VARIABLE = f"{_values.__name__}.DistributedVariable"
COMPONENT = f"{_BaseResourceVariable.__module__}.BaseResourceVariable"
CONSTANTS = _tensor_util.__name__
NOTES_USE = frozenset((_ConcreteFunction._call_flat.__code__,))
"""Code that tells tapes which variables a function uses, component by component."""

FILES = os.path.join(os.path.dirname(_values.__file__), "values")
"""Code of TensorFlow in files whose names begin so reaches components through their distributed variables."""

_MARK = "_replica_engine_components"
_known: dict[int, tuple[Any, Component]] = {}
_watching = threading.local()


class Component(NamedTuple):
    """A component of a distributed variable: the variable, as a weak reference, and the number of the replica."""

    variable: Any
    replica: int

    def of(self, replica: int) -> Any:
        """The handle of the component of another replica; None if the variable is gone."""
        variable = self.variable()
        return None if variable is None else variable._values[replica]._handle


class Watcher(NamedTuple):
    """What is told of the code that runs on a thread.

    Attributes:
        handle: takes the handle of a variable that is about to be used.
        constant: takes a tensor whose value was asked for at trace time and is not known then.
    """

    handle: Callable[[Any], Any]
    constant: Callable[[tf.Tensor], None]


def install() -> None:
    """Notes the components of distributed variables from now on; only once per process."""
    init = _values.DistributedVariable.__init__
    if hasattr(init, _MARK):
        return
    handle, constant = _BaseResourceVariable.handle.fget, _tensor_util._ConstantValue

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _note(self)

    @functools.wraps(handle)
    def watched(self: Any) -> Any:
        watcher = getattr(_watching, "watcher", None)
        if watcher is not None:
            watcher.handle(self._handle)
        return handle(self)

    @functools.wraps(constant)
    def asked(tensor: Any, partial: bool) -> Any:
        value = constant(tensor, partial)
        watcher = getattr(_watching, "watcher", None)
        if watcher is not None and value is None:
            watcher.constant(tensor)
        return value

    setattr(noted, _MARK, True)
    _values.DistributedVariable.__init__ = noted
    _BaseResourceVariable.handle = property(watched)
    _tensor_util._ConstantValue = asked


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside the block, the watcher is told of what this thread does."""
    _watching.watcher = watcher
    try:
        yield
    finally:
        del _watching.watcher


def component(handle: Any) -> Component | None:
    """The component that a handle belongs to, if it is one of a distributed variable."""
    found = _known.get(id(handle))
    return None if found is None else found[1]


def handles(variable: Any) -> list[Any]:
    """The handles of the components of a distributed variable; none for other variables."""
    return [each._handle for each in getattr(variable, "_values", ()) if isinstance(each, _BaseResourceVariable)]


def _note(variable: Any) -> None:
    reference = weakref.ref(variable)
    found = {id(handle): (handle, Component(reference, index)) for index, handle in enumerate(handles(variable))}
    _known.update(found)
    weakref.finalize(variable, _forget, list(found)).atexit = False


def _forget(ids: list[int]) -> None:
    for each in ids:
        _known.pop(each, None)
