"""The shapes of the results of Python functions, which `tf.py_function` and `tf.numpy_function` do not declare.

If the devices use a result, XLA must know its shape. If the body does not set the shape (`y.set_shape(...)`), the
function is called once with zeros while the body is lowered, as in `outside_compilation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replica_engine._tf import host_ops, xla_ops
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.xla.body import HostSide, on_host
from replica_engine.xla.soft_placement import kinds
from replica_engine.xla.soft_placement.values import Value


def shapes(
    op: tf.Operation, inputs: Sequence[Value], seen: dict[str, list[tf.TensorShape]], size: int
) -> list[tf.TensorShape]:
    """The shapes of the results of a Python function, as far as they are known or can be found out.

    Args:
        op: the call of the function.
        inputs: the inputs of the call.
        seen: a dictionary; the shapes of the inputs are added to it, by the function's token. The results of the
            function's gradient have these shapes.
        size: the number of replicas.
    """
    function = host_ops.PythonFunction(op)
    declared = [output.shape for output in op.outputs]
    if function.gradient_of is not None:
        known = seen.get(function.gradient_of, declared)
        return [shape if shape.is_fully_defined() else other for shape, other in zip(declared, known, strict=True)]
    seen[function.token] = [value.shape for value in inputs]
    if not any(map(_is_asked_for, op.outputs)) or not all(value.shape.is_fully_defined() for value in inputs):
        return declared
    try:
        with tf.init_scope(), tf.device("CPU:0"), tf.summary.record_if(False), on_host(_first_replica(size, op)):
            results, _ = function([tf.zeros(value.shape, value.dtype) for value in inputs])
    except Exception:  # it needs other values: its results stay on the host, or an error is raised later
        return declared
    return [result.shape for result in results]


def _is_asked_for(output: tf.Tensor) -> bool:
    """Whether the devices use a result whose shape is not declared."""
    if output.shape.is_fully_defined() or xla_ops.is_host_only(output.dtype):
        return False
    if any(output is returned for returned in output.graph.outputs):
        return True
    return any(not kinds.is_for_host(op) for op in output.consumers())


def _first_replica(size: int, op: tf.Operation) -> HostSide:
    return HostSide(tf.constant(0), size, user_line(op))
