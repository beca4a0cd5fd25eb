"""A variable of a strategy as the host sees it: a TensorFlow variable that is never stale.

Everything that TensorFlow does with a variable goes through its handle, so this class watches the handle:

- In eager mode, code that gets the handle finds the newest value there, and may write to it. The exceptions are the
  methods below that only read, or that keep steps from running while they write.
- A host function gets the handle at each call (`host_functions`).
- A replica body gets the handle itself: the body's program takes the values on the devices.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, MutableMapping

import tensorflow as tf

from replica_engine._tf import variables
from replica_engine._tf.graphs import control_flow
from replica_engine.errors import HostAccessError
from replica_engine.process import scoped
from replica_engine.xla.body import host_call_site, in_body
from replica_engine.xla.state import host_functions
from replica_engine.xla.state.device_value import DeviceValue

_thread = threading.local()


def handles_compared() -> contextlib.AbstractContextManager[object]:
    """Inside, handles serve only to tell variables apart; nothing is read or written through them."""
    return scoped.attribute(_thread, "comparing", True)


def _called(original: Callable[..., object], function: object, *args: object, **kwargs: object) -> object:
    """A call of a traced function. A graph that it is in lists the variables that the function has read.

    TensorFlow asks for their handles there. If that counted as a use by the graph, each step of a `tf.function` around
    a function with `strategy.run` would fetch all variables, and compare them before the next step.
    """
    if tf.executing_eagerly():
        return original(function, *args, **kwargs)
    with scoped.attribute(_thread, "calling", tf.compat.v1.get_default_graph()):
        return original(function, *args, **kwargs)


def _reads(name: str) -> Callable[..., object]:
    method = getattr(variables.ResourceVariable, name)

    @functools.wraps(method)
    def reading(self: HostVariable, *args: object, **kwargs: object) -> object:
        with scoped.attribute(_thread, "reading", True):
            return method(self, *args, **kwargs)

    return reading


def _writes(name: str, whole: bool = False) -> Callable[..., object]:
    method = getattr(variables.ResourceVariable, name)

    @functools.wraps(method)
    def writing(self: HostVariable, *args: object, **kwargs: object) -> object:
        if not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        self._check_access()  # before the wait for a step to end: that step may be the caller
        with self._replica_engine[0].host_writes(whole), scoped.attribute(_thread, "reading", True):
            return method(self, *args, **kwargs)

    return writing


class HostVariable(variables.ResourceVariable):
    """The host's side of a variable whose values are on devices.

    TensorFlow's own creators make the variable, so that everything a program has put around variable creation
    takes part. `adopt` then turns the plain variable into a HostVariable.
    """

    @classmethod
    def adopt(cls, component: tf.Variable, device_value: DeviceValue, replica: int) -> None:
        """Turns a plain variable into the host's side of `device_value`."""
        control_flow.CALL_TRACED.around(_called)
        device_value.mark()
        component.__class__ = cls
        component._replica_engine = (device_value, replica)

    @classmethod
    def device_value(cls, component: object) -> tuple[DeviceValue, int] | None:
        """The device value and replica that `adopt` was given for this variable; None for any other variable."""
        return component._replica_engine if isinstance(component, cls) else None

    @classmethod
    def release(cls, component: HostVariable) -> None:
        """Turns it back into a plain variable with the newest value. A later `adopt` assumes that it was written to."""
        device_value, _ = component._replica_engine
        device_value.host_may_write()
        device_value.unmark()
        component.__class__ = variables.ResourceVariable
        del component._replica_engine

    @classmethod
    def used(cls, component: HostVariable, writes: bool) -> None:
        """Called before a function runs that has captured the handle of what was a plain variable then."""
        component._check_access()
        device_value, _ = component._replica_engine
        if writes:
            device_value.host_is_to_write()
        else:
            device_value.host_reads()

    @property
    def variables(self) -> list[HostVariable]:
        """The variable, once for each device of its replica, as TensorFlow's variables of several logical devices."""
        return [self] * self._replica_engine[0].devices_each

    @property
    def handle(self) -> tf.Tensor:
        """The variable's handle, prepared for the mode in which the caller asks for it."""
        device_value, replica = self._replica_engine
        self._check_access()
        if tf.executing_eagerly():
            if getattr(_thread, "reading", False):
                device_value.host_reads()
            elif not getattr(_thread, "comparing", False):
                device_value.host_may_write()
        elif (
            in_body() is None
            and not getattr(_thread, "comparing", False)
            # The gradient of a function that is called may be traced in the call, in a graph of its own.
            and getattr(_thread, "calling", None) is not tf.compat.v1.get_default_graph()
        ):
            return host_functions.handle(device_value, replica)
        return device_value.handles[replica]

    def _check_access(self) -> None:
        """Raises HostAccessError in a host call: it must never touch or wait for a variable that its own step holds."""
        if (side := host_call_site()) is not None:
            raise HostAccessError.variable(self.name, side.where)

    @property
    def device(self) -> str:
        """The host's device; known without a read of the value."""
        return self._replica_engine[0].handles[self._replica_engine[1]].device

    def _lazy_read(self, op: tf.Operation) -> object:
        """TensorFlow's hook for the result of an assignment. In eager mode the usual result goes stale."""
        return self if tf.executing_eagerly() else super()._lazy_read(op)

    def _export_to_saved_model_graph(
        self, object_map: object, tensor_map: MutableMapping[object, object], options: object, **kwargs: object
    ) -> list[object]:
        """TensorFlow's hook for saving. The objects that functions hold instead of the handle are saved as it."""
        resources = super()._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)
        device_value, replica = self._replica_engine
        for at_call in device_value.asked:
            tensor_map[at_call] = tensor_map[device_value.handles[replica]]
            resources.append(at_call)
        return resources


for _name in ("_read_variable_op", "sparse_read", "gather_nd", "is_initialized", "to_proto"):
    setattr(HostVariable, _name, _reads(_name))
for _name in ("add", "sub", "max", "min", "mul", "div", "update"):
    setattr(HostVariable, f"scatter_{_name}", _writes(f"scatter_{_name}"))
for _name in ("assign_add", "assign_sub"):
    setattr(HostVariable, _name, _writes(_name))
for _name in ("assign", "_restore_from_tensors"):
    setattr(HostVariable, _name, _writes(_name, whole=True))
