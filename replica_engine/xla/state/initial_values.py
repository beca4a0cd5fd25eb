"""Initial values of variables that a body creates, computed on the host while the body is traced.

A variable outlives the body that creates it. So it needs a value before the body runs, the same for all replicas.
`tf.function` has the same task and solves it in the same way: it runs the ops that made the value once more, outside
the function, before the function's first run. What these ops depend on has these values:

- Random ops are the ones that the user wrote, with their seeds, instead of the ones that replicas draw from
  (`random_numbers`). So all replicas begin with the same value, and `tf.random.set_seed` makes it repeatable.
- Variables have their values from before the run. A `tf.random.Generator` is advanced.
- The replica id is 0: replica 0's initial value counts, as under `tf.distribute.MirroredStrategy`.
- Arguments of the body, and results of cross-replica operations, do not exist yet. An error names the one in question.

An op with a state runs once for all variables of a trace: two variables made of one random tensor are equal.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute, variables
from replica_engine._tf.graphs import replaced_ops, subgraphs, xla_ops
from replica_engine.diagnostics.op_lines import here, user_line
from replica_engine.errors import VariableCreationError
from replica_engine.errors.base import at
from replica_engine.process import scoped
from replica_engine.xla.body import in_body
from replica_engine.xla.signature import argument_names
from replica_engine.xla.state import host_functions
from replica_engine.xla.state.device_value import home_of

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

_thread = threading.local()


def of_one_trace() -> contextlib.AbstractContextManager[object]:
    """Inside, an op with a state runs once for all initial values that depend on it."""
    return scoped.attribute(_thread, "known", {})


def outside(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a variable creator, with an initial value that needs no graph under construction.

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
    graph = variables.graph()

    def call() -> object:
        try:
            value = fn()
        except (TypeError, ValueError) as error:
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
        known = getattr(_thread, "known", None)
        self._known: dict[int, tuple[tf.Tensor, tf.Tensor]] = {} if known is None else known

    def value(self, tensor: tf.Tensor) -> tf.Tensor:
        """Computes a tensor of a graph. A tensor that has a value already is returned."""
        if not tf.is_symbolic_tensor(tensor):
            return tensor
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        if (original := replaced_ops.original(tensor)) is not None:
            return self.value(original)
        if tensor.op.type == "XlaReplicaId":
            with tf.init_scope():
                return tf.zeros([], tf.int32)
        if tensor.op.type == "Placeholder":
            return self.value(self._outside_of(tensor))
        has_state = _has_state(tensor.op)
        wanted = list(tensor.op.outputs) if has_state else [tensor]
        operations, inputs = self._part(tensor.op)
        values = [self._handle(each, operations) if each.dtype == tf.resource else self.value(each) for each in inputs]
        results = subgraphs.run(tensor.graph, operations.values(), inputs, values, wanted)
        if has_state:
            self._known.update((id(each), (each, result)) for each, result in zip(wanted, results, strict=True))
        return results[next(index for index, each in enumerate(wanted) if each is tensor)]

    def _part(self, target: tf.Operation) -> tuple[dict[str, tf.Operation], list[tf.Tensor]]:
        """The ops that make a value, back to the tensors that are computed before it; and these tensors."""
        inputs: dict[int, tf.Tensor] = {}

        def before(op: tf.Operation) -> list[tf.Operation]:
            self._check(op)
            inputs.update((id(tensor), tensor) for tensor in op.inputs if _is_found_first(tensor))
            return [*op.control_inputs, *(tensor.op for tensor in op.inputs if id(tensor) not in inputs)]

        operations = {op.name: op for op in subgraphs.reached([target], before, lambda op: op.name)}
        return operations, list(inputs.values())

    def _outside_of(self, placeholder: tf.Tensor) -> tf.Tensor:
        """The tensor or handle that a placeholder stands for."""
        outside = subgraphs.captured(placeholder)
        if outside is None:
            raise self._of_the_run(argument_names.of(placeholder))
        return host_functions.raw(outside)

    def _handle(self, placeholder: tf.Tensor, operations: dict[str, tf.Operation]) -> tf.Tensor:
        """A variable's handle, for use by `operations`, with the newest value on the host."""
        handle = self._outside_of(placeholder)
        while tf.is_symbolic_tensor(handle):
            handle = self._outside_of(handle)
        body = in_body()
        if body is not None and handle is body.random.handles[0]:
            return body.random.of_initial_values()
        if (device_value := home_of(handle)) is not None:
            others = {op.name for op in placeholder.consumers() if op.name not in operations}
            if variables.may_write(placeholder, others):
                device_value.host_may_write()
            else:
                device_value.host_reads()
        return handle

    def _check(self, op: tf.Operation) -> None:
        """Raises VariableCreationError for an op that only a run can execute."""
        for kind in sorted({op.type, *subgraphs.op_types_of_calls(op)}):
            if kind.startswith(_OF_RUNS) or (kind == op.type and kind.startswith(_WRITE)):
                marker = xla_ops.marker_name(op).removeprefix("replica_engine.") or kind
                words = f"{_IN_WORDS.get(marker, marker)}{at(user_line(op))}"
                raise self._of_the_run(f"{words}, which only a run of the body can execute")

    def _of_the_run(self, what: str) -> VariableCreationError:
        return VariableCreationError(
            f"The initial value of the variable {self._name!r}, created{at(self._where)}, depends on {what}. A "
            "variable exists before the body that creates it runs, and outlives the run. Create the variable with a "
            "value such as tf.zeros(shape), and assign the real value in the body."
        )


def _is_found_first(tensor: tf.Tensor) -> bool:
    is_source = tensor.op.type in ("Placeholder", "XlaReplicaId") or replaced_ops.original(tensor) is not None
    return is_source or _has_state(tensor.op)


def _has_state(op: tf.Operation) -> bool:
    """Whether an op must run only once. An op that makes a handle runs together with the ops that use the handle."""
    return subgraphs.is_stateful(op) and not any(each.dtype in (tf.resource, tf.variant) for each in op.outputs)
