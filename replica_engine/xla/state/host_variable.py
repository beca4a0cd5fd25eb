"""A variable of a strategy as the host sees it, and its initial value.

`HostVariable` is a TensorFlow variable that is never stale. `outside` computes initial values of variables that a body
creates, on the host, while the body is traced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, MutableMapping
from types import FunctionType
from typing import Any

import tensorflow as tf

from replica_engine.diagnostics.user_frames import here, user_line
from replica_engine.errors import HostAccessError, VariableCreationError, base
from replica_engine.process import interrupts
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import function_graphs, graph_walk, operators, xla_ops
from replica_engine.xla import arguments
from replica_engine.xla.body import host_call_site, in_body
from replica_engine.xla.state import host_handles
from replica_engine.xla.state.device_value import DeviceValue, find_device_value

_thread = threading.local()


def handles_compared() -> contextlib.AbstractContextManager[object]:
    """Inside, handles serve only to tell variables apart; nothing is read or written through them."""
    return interrupts.set_for_block(_thread, "comparing", True)


def _called(original: Callable[..., object], function: object, *args: object, **kwargs: object) -> object:
    """A call of a traced function. A graph that it is in lists the variables that the function has read.

    TensorFlow asks for their handles there. If that counted as a use by the graph, each step of a `tf.function` around
    a function with `strategy.run` would fetch all variables, and compare them before the next step.
    """
    if tf.executing_eagerly():
        return original(function, *args, **kwargs)
    with interrupts.set_for_block(_thread, "calling", tf.compat.v1.get_default_graph()):
        return original(function, *args, **kwargs)


# TensorFlow's methods ask for `handle`, which cannot tell what they want with it. So they say it before they ask.
def _reads(name: str) -> Callable[..., object]:
    method = getattr(eager.ResourceVariable, name)

    @functools.wraps(method)
    def reading(self: HostVariable, *args: object, **kwargs: object) -> object:
        with interrupts.set_for_block(_thread, "reading", True):
            return method(self, *args, **kwargs)

    return reading


def _writes(name: str, whole: bool = False) -> Callable[..., object]:
    method = getattr(eager.ResourceVariable, name)

    @functools.wraps(method)
    def writing(self: HostVariable, *args: object, **kwargs: object) -> object:
        if not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        self._check_access()  # before the wait for a step to end: that step may be the caller
        with self._replica_engine[0].host_writes(whole), interrupts.set_for_block(_thread, "reading", True):
            return method(self, *args, **kwargs)

    return writing


class HostVariable(eager.ResourceVariable):
    """The host's side of a variable whose values are on devices: a TensorFlow variable that is never stale.

    Everything that TensorFlow does with a variable goes through its handle, so this class watches the handle:

    - In eager mode, code that gets the handle finds the newest value there, and may write to it. The exceptions are the
      methods below that only read, or that keep steps from running while they write.
    - A host function gets the handle at each call (`host_handles`).
    - A replica body gets the handle itself: the body's program takes the values on the devices.

    TensorFlow's own creators make the variable, so that everything a program has put around variable creation takes
    part. `adopt` then turns the plain variable into a HostVariable.
    """

    @classmethod
    def adopt(cls, component: tf.Variable, device_value: DeviceValue, replica: int) -> None:
        """Turns a plain variable into the host's side of `device_value`."""
        operators.CALL_TRACED.around(_called)
        device_value.mark()
        # The same object, since checkpoints, models and optimizers may hold it already.
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
        # From here on anybody may write the value, and nothing here sees it.
        device_value.unmark()
        component.__class__ = eager.ResourceVariable
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
            return host_handles.handle(device_value, replica)
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


# They only read.
for _name in ("_read_variable_op", "sparse_read", "gather_nd", "is_initialized", "to_proto"):
    setattr(HostVariable, _name, _reads(_name))
for _name in ("add", "sub", "max", "min", "mul", "div", "update"):
    setattr(HostVariable, f"scatter_{_name}", _writes(f"scatter_{_name}"))
for _name in ("assign_add", "assign_sub"):
    setattr(HostVariable, _name, _writes(_name))
# They replace the whole value, so the old one may be lost.
for _name in ("assign", "_restore_from_tensors"):
    setattr(HostVariable, _name, _writes(_name, whole=True))


# Initial values of variables that a body creates.
_OF_RUNS = ("Xla", "Iterator")
"""How the types of ops begin that only a run can execute: they need all replicas, or they affect the next step."""

_WRITE = ("Assign", "ResourceScatter")
"""How the types of ops begin that write to variables. Random ops in loops and functions write to a `RandomState`."""

_IN_WORDS = {
    "XlaAllReduce": "all_reduce",
    "XlaReplicaId": "the replica id",
    "XlaCustomCallV2": "a cross-replica operation or a host call",
    "host_call": "a host call",
    "IteratorGetNext": "the next batch of a dataset",
    **dict.fromkeys(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"), "an assignment"),
}

_making = threading.local()


def run_stateful_ops_once() -> contextlib.AbstractContextManager[object]:
    """Inside, an op with a state runs once for all initial values that depend on it."""
    return interrupts.set_for_block(_making, "known", {})


def outside(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a variable creator, with an initial value that needs no graph under construction.

    A variable outlives the body that creates it. So it needs a value before the body runs, the same for all replicas.
    `tf.function` has the same task and solves it in the same way: it runs the ops that made the value once more,
    outside the function, before the function's first run. What these ops depend on has these values:

    - Random ops are the ones that the user wrote, with their seeds, instead of the ones that replicas draw from
      (`random_numbers`). So all replicas begin with the same value, and `tf.random.set_seed` makes it repeatable.
    - Variables have their values from before the run. A `tf.random.Generator` is advanced.
    - The replica id is 0: replica 0's initial value counts, as under `tf.distribute.MirroredStrategy`.
    - Arguments of the body, and results of cross-replica operations, do not exist yet. An error names the one in
      question.

    An op with a state runs once for all variables of a trace: two variables made of one random tensor are equal.

    Raises:
        VariableCreationError: the initial value depends on something that is known only when the function runs.
    """
    value = kwargs.get("initial_value")
    if not tf.inside_function() or value is None:
        return kwargs
    name = kwargs.get("name") or "Variable"
    if isinstance(value, FunctionType):
        return {**kwargs, "initial_value": _called_outside(value, name, kwargs.get("dtype"))}
    if isinstance(value, distribute.UnreadVariable) and not tf.executing_eagerly():  # the result of an assignment
        value = tf.convert_to_tensor(value)
    elif isinstance(value, (list, tuple)) and any(map(tf.is_symbolic_tensor, tf.nest.flatten(value))):
        value = tf.convert_to_tensor(value, kwargs.get("dtype"))
    if not tf.is_symbolic_tensor(value):
        return kwargs
    return {**kwargs, "initial_value": _Computation(name).value(value)}


def _called_outside(fn: Callable[[], object], name: str, dtype: tf.DType | None) -> Callable[[], object]:
    """An initial value as a function, for eager mode. If `fn` uses tensors of the body, it is called in their graph."""
    graph = eager.graph()

    def call() -> object:
        try:
            value = fn()
        except (TypeError, ValueError) as error:
            # TensorFlow has no class of its own for this error.
            if "out of scope" not in str(error):
                raise
            with graph.as_default():
                value = tf.convert_to_tensor(fn(), dtype)
        return _Computation(name).value(value) if tf.is_symbolic_tensor(value) else value

    return call


class _Computation:
    """Computes one initial value, a tensor of the function under construction, now and on the host.

    Args:
        name: the name of the variable that is created here.

    Raises:
        VariableCreationError: the tensor depends on something that is known only when the function runs.
    """

    def __init__(self, name: str):
        self._name = name
        self._where = here()
        known = getattr(_making, "known", None)
        self._known: dict[int, tuple[tf.Tensor, tf.Tensor]] = {} if known is None else known

    def value(self, tensor: tf.Tensor) -> tf.Tensor:
        """Computes a tensor of a graph. A tensor that has a value already is returned."""
        if not tf.is_symbolic_tensor(tensor):
            return tensor
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        if (original := function_graphs.original(tensor)) is not None:
            return self.value(original)
        if tensor.op.type == "XlaReplicaId":
            with tf.init_scope():
                return tf.zeros([], tf.int32)
        if tensor.op.type == "Placeholder":
            return self.value(self._find_outside(tensor))
        has_state = _has_state(tensor.op)
        wanted = list(tensor.op.outputs) if has_state else [tensor]
        operations, inputs = self._part(tensor.op)
        values = [self._handle(each, operations) if each.dtype == tf.resource else self.value(each) for each in inputs]
        results = graph_walk.run(tensor.graph, operations.values(), inputs, values, wanted)
        if has_state:
            # With the tensor: an id is its own only as long as it lives.
            self._known.update((id(each), (each, result)) for each, result in zip(wanted, results, strict=True))
        return results[next(index for index, each in enumerate(wanted) if each is tensor)]

    def _part(self, target: tf.Operation) -> tuple[dict[str, tf.Operation], list[tf.Tensor]]:
        """The ops that make a value, back to the tensors that are computed before it; and these tensors."""
        inputs: dict[int, tf.Tensor] = {}

        def before(op: tf.Operation) -> list[tf.Operation]:
            self._check(op)
            inputs.update((id(tensor), tensor) for tensor in op.inputs if _is_found_first(tensor))
            return [*op.control_inputs, *(tensor.op for tensor in op.inputs if id(tensor) not in inputs)]

        operations = {op.name: op for op in graph_walk.reached([target], before, lambda op: op.name)}
        return operations, list(inputs.values())

    def _find_outside(self, placeholder: tf.Tensor) -> tf.Tensor:
        """The tensor or handle that a placeholder stands for."""
        outside = graph_walk.captured(placeholder)
        if outside is None:
            raise self._make_run_only_error(arguments.describe_placeholder(placeholder))
        return host_handles.raw(outside)

    def _handle(self, placeholder: tf.Tensor, operations: dict[str, tf.Operation]) -> tf.Tensor:
        """A variable's handle, for use by `operations`, with the newest value on the host."""
        handle = self._find_outside(placeholder)
        while tf.is_symbolic_tensor(handle):
            handle = self._find_outside(handle)
        body = in_body()
        # Initial values draw from a state of their own, not from the replicas'.
        if body is not None and handle is body.random.handles[0]:
            return body.random.make_initial_values_handle()
        if (device_value := find_device_value(handle)) is not None:
            others = {op.name for op in placeholder.consumers() if op.name not in operations}
            if eager.may_write(placeholder, others):
                device_value.host_may_write()
            else:
                device_value.host_reads()
        return handle

    def _check(self, op: tf.Operation) -> None:
        """Raises VariableCreationError for an op that only a run can execute."""
        for kind in sorted({op.type, *graph_walk.op_types_of_calls(op)}):
            if kind.startswith(_OF_RUNS) or (kind == op.type and kind.startswith(_WRITE)):
                marker = xla_ops.marker_name(op).removeprefix("replica_engine.") or kind
                words = f"{_IN_WORDS.get(marker, marker)}{base.at(user_line(op))}"
                raise self._make_run_only_error(f"{words}, which only a run of the body can execute")

    def _make_run_only_error(self, what: str) -> VariableCreationError:
        return VariableCreationError(
            f"The initial value of the variable {self._name!r}, created{base.at(self._where)}, depends on {what}. A "
            "variable exists before the body that creates it runs, and outlives the run. Create the variable with a "
            "value such as tf.zeros(shape), and assign the real value in the body."
        )


def _is_found_first(tensor: tf.Tensor) -> bool:
    is_source = tensor.op.type in ("Placeholder", "XlaReplicaId") or function_graphs.original(tensor) is not None
    return is_source or _has_state(tensor.op)


def _has_state(op: tf.Operation) -> bool:
    """Whether an op must run only once. An op that makes a handle runs together with the ops that use the handle."""
    return graph_walk.is_stateful(op) and not any(each.dtype in (tf.resource, tf.variant) for each in op.outputs)
