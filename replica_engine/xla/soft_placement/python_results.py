"""The shapes of the results of Python functions, which `tf.py_function` and `tf.numpy_function` do not declare.

If the devices use a result, XLA must know its shape. The body can set it, with `y.set_shape(...)` or
`tf.ensure_shape(y, ...)`. Otherwise the function is called once with zeros while the body is lowered, as in
`outside_compilation`. A result that the body only returns stays on the host, and may have another shape each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, xla_ops
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.xla.body import HostSide, on_host
from replica_engine.xla.soft_placement import kinds
from replica_engine.xla.soft_placement.values import Value


def shapes(
    op: tf.Operation, inputs: Sequence[Value], seen: dict[str, list[tf.TensorShape]], size: int, in_body: bool
) -> list[tuple[tf.TensorShape, bool]]:
    """The shapes of the results of a Python function, and whether each was found by a call with zeros.

    Shapes that are neither known nor can be found out are as TensorFlow knows them.

    Args:
        op: the call of the function.
        inputs: the inputs of the call.
        seen: a dictionary; the shapes of the inputs are added to it, by the function's token. The results of the
            function's gradient have these shapes.
        size: the number of replicas.
        in_body: whether the call is in the graph of the body itself, and not in a function of it.
    """
    function = host_ops.PythonFunction(op)
    declared = [_declared(output) for output in op.outputs]
    if function.gradient_of is not None:
        known = seen.get(function.gradient_of, declared)
        return [
            (shape if shape.is_fully_defined() else other, False) for shape, other in zip(declared, known, strict=True)
        ]
    seen[function.token] = [value.shape for value in inputs]
    asked_for = any(
        not shape.is_fully_defined() and _is_asked_for(output, in_body)
        for shape, output in zip(declared, op.outputs, strict=True)
    )
    if not asked_for or not all(value.shape.is_fully_defined() for value in inputs):
        return [(shape, False) for shape in declared]
    try:
        with tf.init_scope(), tf.device("CPU:0"), tf.summary.record_if(False), on_host(_first_replica(size, op)):
            results, _ = function([tf.zeros(value.shape, value.dtype) for value in inputs])
    except Exception:  # it needs other values: its results stay on the host, or an error is raised later
        return [(shape, False) for shape in declared]
    return [
        (shape, False) if shape.is_fully_defined() else (result.shape, True)
        for shape, result in zip(declared, results, strict=True)
    ]


def _declared(output: tf.Tensor) -> tf.TensorShape:
    """The shape of a result that the body declares."""
    ensured = (op.outputs[0].shape for op in output.consumers() if op.type == "EnsureShape")
    return next((shape for shape in (output.shape, *ensured) if shape.is_fully_defined()), output.shape)


def _is_asked_for(output: tf.Tensor, in_body: bool) -> bool:
    """Whether the devices use a result."""
    if xla_ops.is_host_only(output.dtype):
        return False
    if not in_body and any(output is returned for returned in output.graph.outputs):
        return True
    return any(
        _is_asked_for(op.outputs[0], in_body) if op.type == "Identity" else not kinds.is_for_host(op)
        for op in output.consumers()
    )


def _first_replica(size: int, op: tf.Operation) -> HostSide:
    return HostSide(tf.constant(0), size, user_line(op))
