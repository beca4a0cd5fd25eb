"""A variable of a strategy as its host sees it: a TensorFlow variable that is never stale.

Whatever TensorFlow does with a variable goes through its handle, so the handle is where we look on: whoever
asks for it in eager mode gets the newest value there, and may write to it, unless the question comes from one of
the methods below that only read, or that hold off steps while they write. In a host function it is asked for at
each call (`host_graph`). In a replica body it is the handle itself: the body's program takes the values on the
devices.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine._tf import variables
from replica_engine.errors import HostAccessError
from replica_engine.xla.body import host_side, in_body
from replica_engine.xla.state import host_functions
from replica_engine.xla.state.device_value import DeviceValue

_thread = threading.local()


@contextlib.contextmanager
def _only_reading() -> Iterator[None]:
    before = getattr(_thread, "reading", False)
    _thread.reading = True
    try:
        yield
    finally:
        _thread.reading = before


@contextlib.contextmanager
def handles_compared() -> Iterator[None]:
    """Inside, handles are asked for to know variables by them; nobody reads or writes through them."""
    before = getattr(_thread, "comparing", False)
    _thread.comparing = True
    try:
        yield
    finally:
        _thread.comparing = before


def _reads(name: str) -> Callable[..., Any]:
    method = getattr(variables.ResourceVariable, name)

    @functools.wraps(method)
    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _only_reading():
            return method(self, *args, **kwargs)

    return reading


def _writes(name: str, whole: bool = False) -> Callable[..., Any]:
    method = getattr(variables.ResourceVariable, name)

    @functools.wraps(method)
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        self._check_access()  # before the wait for a step to end, which may be the one that is calling
        with self._replica_engine[0].host_writes(whole), _only_reading():
            return method(self, *args, **kwargs)

    return writing


class HostVariable(variables.ResourceVariable):
    """The host's side of a variable whose values are on devices.

    TensorFlow's own creators make the variable, so that whatever a program has put around variable creation
    takes part; `adopt` then makes it one of these.
    """

    @classmethod
    def adopt(cls, component: Any, device_value: DeviceValue, replica: int) -> None:
        """Makes a plain variable the host's side of `device_value`."""
        device_value.mark()
        component.__class__ = cls
        component._replica_engine = (device_value, replica)

    @classmethod
    def device_value(cls, component: Any) -> tuple[DeviceValue, int] | None:
        """What `adopt` takes, of a variable that is one of these; None if it is not."""
        return component._replica_engine if isinstance(component, cls) else None

    @classmethod
    def release(cls, component: Any) -> None:
        """Makes it a plain variable again, with the newest value. After it, `adopt` expects that to have changed."""
        device_value, _ = component._replica_engine
        device_value.host_may_write()
        device_value.unmark()
        component.__class__ = variables.ResourceVariable
        del component._replica_engine

    @property
    def handle(self) -> tf.Tensor:
        """The variable's handle, for where it is asked for."""
        device_value, replica = self._replica_engine
        self._check_access()
        if tf.executing_eagerly():
            if getattr(_thread, "reading", False):
                device_value.host_reads()
            elif not getattr(_thread, "comparing", False):
                device_value.host_may_write()
        elif in_body() is None:
            return host_functions.handle(device_value, replica)
        return device_value.handles[replica]

    def _check_access(self) -> None:
        """A host call must not touch what is on the devices, least of all wait for it: its own step has it."""
        if (side := host_side()) is not None:
            raise HostAccessError.variable(self.name, side.where)

    _read_variable_op = _reads("_read_variable_op")
    sparse_read = _reads("sparse_read")
    gather_nd = _reads("gather_nd")
    is_initialized = _reads("is_initialized")
    to_proto = _reads("to_proto")
    assign = _writes("assign", whole=True)
    assign_add = _writes("assign_add")
    assign_sub = _writes("assign_sub")
    scatter_add = _writes("scatter_add")
    scatter_sub = _writes("scatter_sub")
    scatter_max = _writes("scatter_max")
    scatter_min = _writes("scatter_min")
    scatter_mul = _writes("scatter_mul")
    scatter_div = _writes("scatter_div")
    scatter_update = _writes("scatter_update")
    _restore_from_tensors = _writes("_restore_from_tensors", whole=True)

    @property
    def device(self) -> str:
        """The host; known without a look at the value."""
        return self._replica_engine[0].handles[self._replica_engine[1]].device

    def _lazy_read(self, op: Any) -> Any:
        """TensorFlow's hook for what an assignment returns: in eager mode a view that would go stale."""
        return self if tf.executing_eagerly() else super()._lazy_read(op)

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any) -> list:
        """TensorFlow's hook for saving. What functions have in the place of our handle stands for it there too."""
        resources = super()._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)
        device_value, replica = self._replica_engine
        for at_call in device_value.asked:
            tensor_map[at_call] = tensor_map[device_value.handles[replica]]
            resources.append(at_call)
        return resources
