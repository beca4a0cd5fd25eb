"""Ops that XLA cannot compile: finds them, copies the other ops, and runs a single op on the host.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# quick_execute: runs an op by its type name and attributes. execute_with_cancellation: the same, and it can be ended.
from tensorflow.python.eager import execute as _execute

# get_registered_kernels_for_op: the devices and dtypes for which an op has kernels.
from tensorflow.python.framework import kernels as _kernels

# _py_funcs: the Python functions of tf.py_function and tf.numpy_function, by the token of their op.
# tape_cache: the data from which the gradient of a tf.py_function is computed, by the same token.
from tensorflow.python.ops import script_ops as _script_ops

from replica_engine.upstream.graphs import function_graphs, graph_walk, xla_ops

_XLA_DEVICE = "XLA_CPU_JIT"  # bodies are lowered for this device, for every platform


def needed_ops(graph: Any) -> list[tf.Operation]:
    """The ops that the results and effects of a function graph need, each after all ops that it depends on.

    Apart from that, the ops are in the order in which they were made, which is the order of the program.
    """
    ops = xla_ops.needed(graph)
    order = {op.name: index for index, op in enumerate(graph.get_operations())}
    waits: dict[str, int] = {}
    users: dict[str, list[str]] = {}
    for name, op in ops.items():
        before = {each.name for each in (*op.control_inputs, *(tensor.op for tensor in op.inputs))} & ops.keys()
        waits[name] = len(before)
        for each in before:
            users.setdefault(each, []).append(name)
    ready = [(order[name], name) for name, count in waits.items() if not count]
    heapq.heapify(ready)
    sorted_ops = []
    while ready:
        _, name = heapq.heappop(ready)
        sorted_ops.append(ops[name])
        for user in users.get(name, ()):
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (order[user], user))
    return sorted_ops


def made_ops(graph: Any) -> list[tf.Operation]:
    """The ops of a function graph in the order in which they were made, also those that nothing needs.

    Ops in whose place others stand are left out.
    """
    aside = function_graphs.set_aside(graph)
    return [op for op in graph.get_operations() if op.name not in aside]


def compiles(op: tf.Operation) -> bool:
    """Whether XLA has a kernel for an op with its dtypes. The kernel may still refuse the shapes."""
    return any(
        all(_attribute_dtypes(op, name) <= allowed for name, allowed in kernel) for kernel in _xla_kernels(op.type)
    )


def has_host_kernel(op: tf.Operation) -> bool:
    """Whether TensorFlow can run an op on the host."""
    return any(kernel.device_type == "CPU" for kernel in _list_kernels(op.type))


@functools.cache
def _list_kernels(kind: str) -> list[Any]:
    return list(_kernels.get_registered_kernels_for_op(kind).kernel)


def _attribute_dtypes(op: tf.Operation, name: str) -> frozenset[int]:
    value = op.get_attr(name)
    return frozenset(each.as_datatype_enum for each in (value if isinstance(value, list) else [value]))


@functools.cache
def _xla_kernels(kind: str) -> tuple[tuple[tuple[str, frozenset[int]], ...], ...]:
    """For each XLA kernel of an op type, the dtypes that its attributes may have."""
    _register_xla_kernels()
    return tuple(
        tuple((each.name, frozenset(each.allowed_values.list.type)) for each in kernel.constraint)
        for kernel in _list_kernels(kind)
        if kernel.device_type == _XLA_DEVICE
    )


@functools.cache
def _register_xla_kernels() -> None:
    """Makes TensorFlow register its XLA kernels, which it does at its first compilation."""
    with tf.init_scope():
        graph = xla_ops.trace("registers_xla_kernels", lambda: [tf.constant(0)], [])
        xla_ops.stablehlo(xla_ops.register("registers_xla_kernels", graph), [], [])


def copy_op(op: tf.Operation, inputs: Sequence[tf.Tensor], control_inputs: Sequence[tf.Operation]) -> tf.Operation:
    """Copies an op with other inputs into the current graph, under the same name if that name is free."""
    copied = graph_walk.apply_op(op, inputs, control_inputs)
    for old, new in zip(op.outputs, copied.outputs, strict=True):
        keep_shape(old, new)
    return copied


def keep_shape(old: tf.Tensor, new: tf.Tensor) -> None:
    """Copies the known shape of a tensor, or of the variable or list behind it, to the tensor's copy."""
    if old.dtype in (tf.resource, tf.variant):
        data = getattr(old, "_handle_data", None)
        if data is not None and data.is_set and getattr(new, "_handle_data", None) is None:
            new._handle_data = data
    if old.shape.is_compatible_with(new.shape):
        new.set_shape(old.shape)


def runner(op: tf.Operation) -> Callable[..., list[Any]]:
    """Makes a function that runs the op eagerly on the host.

    It takes the inputs and, if the op may wait, what can end it (`function_calls.manager`), and returns the outputs.
    """
    attributes: list[Any] = []
    for name in op.node_def.attr:
        if not name.startswith("_"):
            attributes += [name, _plain(op.get_attr(name))]
    kind, count, given = op.type, len(op.outputs), tuple(attributes)
    waits = graph_walk.can_be_ended(op)
    context = xla_ops.eager_context()

    def run(inputs: list[Any], manager: Any = None) -> list[Any]:
        if manager is None or not waits:
            return list(_execute.quick_execute(kind, count, inputs, given, context) or ())
        return list(_execute.execute_with_cancellation(kind, count, inputs, given, context, manager) or ())

    return run


def _plain(value: Any) -> Any:
    """The value of an attribute in the form that eager ops take."""
    if isinstance(value, tf.DType):
        return value.as_datatype_enum
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if hasattr(value, "unknown_rank"):  # a shape, as a protocol buffer message
        return None if value.unknown_rank else [size.size for size in value.dim]
    return value


class PythonFunction:
    """The Python function of a `tf.py_function` or a `tf.numpy_function`.

    Attributes:
        is_eager: whether the function takes tensors; otherwise it takes arrays.
        token: the key of the function in TensorFlow.
        forward_token: the token of the function whose gradient this is; None if this is not a gradient.
    """

    def __init__(self, op: tf.Operation):
        self.token = op.get_attr("token").decode()
        self.is_eager = op.type == "EagerPyFunc"
        self._function = _script_ops._py_funcs.get(self.token)
        self._dtypes = [output.dtype for output in op.outputs]
        self.forward_token: str | None = None
        if getattr(self._function, "_is_grad_func", False):
            self.forward_token = _token_in(self._function._func)

    @property
    def is_differentiated(self) -> bool:
        """Whether a call must be remembered for its gradient."""
        return bool(getattr(self._function, "_support_graph_mode_gradient", False))

    def __call__(self, inputs: list[tf.Tensor], replica: int = 0) -> tuple[list[tf.Tensor], Any]:
        """Calls the function as its op would, except that an exception keeps its type.

        Returns:
            The results, and the data that `differentiate` needs if `is_differentiated`.
        """
        if self._function is None:
            raise RuntimeError(f"The function of a tf.py_function is gone: {self.token}.")
        if not self.is_eager:
            return self._results(_script_ops._py_funcs(self.token, None, [each.numpy() for each in inputs])), None
        token = f"{self.token}:{replica}"  # replicas call at the same time
        value = self._function(None, token, inputs)
        return self._results(value), _script_ops.tape_cache.pop(token.encode(), None)

    def _results(self, value: Any) -> list[tf.Tensor]:
        if not self._dtypes:  # without declared results, the returned value is ignored
            return []
        values = list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if len(values) != len(self._dtypes):
            message = f"the function returned {len(values)} values, and Tout declares {len(self._dtypes)}"
            raise tf.errors.InvalidArgumentError(None, None, message)
        return [_result(each, dtype) for each, dtype in zip(values, self._dtypes, strict=True)]

    @staticmethod
    def differentiate(taped: Any, upstream: list[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients with respect to the inputs of a call, from the gradients with respect to its results."""
        tape, inputs, outputs = taped
        found = tape.gradient(outputs, inputs, output_gradients=upstream)
        return [tf.zeros_like(each) if one is None else one for each, one in zip(inputs, found, strict=True)]


def _result(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Converts a result of a Python function to a tensor; it must have the declared dtype."""
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype != dtype:
        raise tf.errors.InvalidArgumentError(
            None, None, f"the function returned a value of dtype {tensor.dtype.name}, and Tout declares {dtype.name}"
        )
    return tensor


def _token_in(fn: Any) -> str | None:
    """The token over which TensorFlow's function of a gradient closes: nothing else says whose gradient it is."""
    while fn is not None:
        code = getattr(fn, "__code__", None)
        if code is not None and "token" in code.co_freevars:
            value = fn.__closure__[code.co_freevars.index("token")].cell_contents
            return value.decode() if isinstance(value, bytes) else value
        fn = getattr(fn, "__wrapped__", None)
    return None


def read_constant(op: tf.Operation) -> tf.Tensor:
    """The eager tensor with the value of a Const op."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)
