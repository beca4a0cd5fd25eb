"""The ops of a body that run on the host: those for which XLA has no kernel, or a kernel that does nothing."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs, xla_ops
from replica_engine.pjrt.markers import HOST_CALL

CHECKS = ("Assert", "CheckNumerics", "CheckNumericsV2")
"""Ops that only raise. XLA compiles them to nothing."""

_THREE_SLOTS = 8  # REDUCE_INF_NAN_THREE_SLOTS, a mode of DebugNumericSummaryV2

SHAPED_BY_DATA = ("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "DynamicPartition")
"""Ops that XLA compiles, with results whose shape is known only when they run. The host cannot get such results."""

KNOWN_TO_XLA = ("Shape", "ShapeN", "Size", "Rank")
"""Ops whose results XLA knows when it compiles, for any values of their inputs."""

_SHAPES = {  # for each op, the inputs whose values XLA must know when it compiles: shapes, sizes and axes
    **dict.fromkeys(("Range",), (0, 1, 2)),
    **dict.fromkeys(("Fill", "SplitV", "TensorListReserve"), (0, 1)),
    **dict.fromkeys(("Split",), (0,)),
    **dict.fromkeys(("Reshape", "BroadcastTo", "Tile", "Pad", "PadV2", "MirrorPad", "OneHot", "TopKV2"), (1,)),
    **dict.fromkeys(("Bincount", "DenseBincount", "ResizeBilinear", "ResizeNearestNeighbor", "ExpandDims"), (1,)),
    **dict.fromkeys(("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"), (2,)),
    **dict.fromkeys(("Slice", "ScatterNd", "LinSpace", "GatherV2"), (2,)),
}

# Random ops for which XLA has no kernel would depend on the order in which replicas come. From an iterator each replica
# would take whichever element comes next. A collective of TensorFlow would wait for other threads.
_REFUSED = re.compile(
    r"Iterator|Dataset|^Optional|^Collective|^Nccl|^CrossReplica|^TPU|^_?(Host)?(Send|Recv)$|^(Stateful)?(Random|Multi)"
)


_COUNTING = ("Bincount", "DenseBincount")
"""Ops that XLA compiles if it knows how many places to count in: the second input."""

_known: dict[tuple, bool] = {}  # by op type and dtypes: a body has thousands of ops of few kinds


def is_for_host(op: tf.Operation) -> bool:
    """Whether an op must run on the host, wherever its inputs come from."""
    if op.type in _COUNTING and _is_of_data(op.inputs[1]):
        return True
    key = (op.type, *[tensor.dtype for tensor in op.inputs], *[tensor.dtype for tensor in op.outputs])
    if tf.variant in key or tf.resource in key:  # not cached: the contents of a list or variable are in attributes
        return _is_for_host(op)
    known = _known.get(key)
    if known is None:
        known = _known[key] = _is_for_host(op)
    return known


def _is_for_host(op: tf.Operation) -> bool:
    if op.type in ("Placeholder", "NoOp") or subgraphs.runs_functions(op) or _REFUSED.search(op.type):
        return False
    if op.type in CHECKS:
        return True
    if any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
        return True
    return not host_ops.compiles(op) and host_ops.has_host_kernel(op)


def may_move(op: tf.Operation) -> bool:
    """Whether an op that XLA can compile may run on the host too, since it only computes."""
    return not (
        op.type.startswith("Xla")
        or any(tensor.dtype == tf.resource for tensor in op.inputs)
        or subgraphs.functions_of(op)
        or _REFUSED.search(op.type)
    )


def shape_inputs(op: tf.Operation) -> tuple[int, ...]:
    """The inputs of an op that XLA must know when it compiles, for ops that often get them from strings."""
    return _SHAPES.get(op.type, ())


def is_numerics_summary(op: tf.Operation) -> bool:
    """Whether an op says for `tf.debugging.enable_check_numerics` what is not finite in the result of another op."""
    return op.type == "DebugNumericSummaryV2" and op.get_attr("tensor_debug_mode") == _THREE_SLOTS


def is_host_resource(handle: tf.Tensor) -> bool:
    """Whether a resource is not a variable that a device can have: a table, a summary writer, a variable of strings."""
    described = xla_ops.variable_dtype_and_shape(handle)
    return described is None or xla_ops.is_host_only(described[0])


def is_left_on_host(component: tf.Tensor) -> bool:
    """Whether only sparse ops and host ops use a component of a sparse argument."""
    pending, used = [component], False
    while pending:
        for op in pending.pop().consumers():
            if op.type == "Identity":
                pending.append(op.outputs[0])
            elif not (op.type.startswith("Sparse") and may_move(op)) and not is_for_host(op):
                return False
            used = True
    return used


def calls_host(op: tf.Operation) -> bool:
    """Whether an op is a host call that the user wrote, or runs a function with such a call in it."""
    if op.type == "XlaCustomCallV2":
        return op.get_attr("call_target_name").decode() == HOST_CALL
    return any(map(calls_host, _ops_of_functions(op)))


def needs_host(graph: Any) -> bool:
    """Whether an op of a function graph, or of a function in it, must run on the host."""
    return any(contains_host_op(op) for op in xla_ops.needed(graph).values())


def contains_host_op(op: tf.Operation) -> bool:
    """Whether an op must run on the host, or runs a function with an op that must, or that a copy would not have."""
    if not subgraphs.runs_functions(op):
        return is_for_host(op)
    functions = subgraphs.functions_of(op)
    return any(map(needs_host, functions)) or any(map(_has_unused, functions))


def _has_unused(graph: Any) -> bool:
    """Whether XLA would fail at an op of a branch, loop or call that nothing needs: it compiles all ops of these."""
    needed = xla_ops.needed(graph)
    return any(op.name not in needed and _fails(op) for op in graph.get_operations())


def _fails(op: tf.Operation) -> bool:
    if subgraphs.runs_functions(op):
        return any(_fails(inner) for graph in subgraphs.functions_of(op) for inner in graph.get_operations())
    if op.type in ("Placeholder", "NoOp"):
        return False
    return not host_ops.compiles(op) or any(_is_of_data(op.inputs[index]) for index in shape_inputs(op))


def _is_of_data(tensor: tf.Tensor) -> bool:
    """Whether a value depends on more than shapes and constants, so that XLA cannot know it."""
    pending, seen = [tensor], set()
    while pending:
        each = pending.pop()
        op = each.op
        if id(each) in seen or op.type in KNOWN_TO_XLA:
            continue
        seen.add(id(each))
        if op.type == "Placeholder":
            outside = subgraphs.captured(each)
            if outside is None or outside.dtype == tf.resource:
                return True
            pending += [outside] if tf.is_symbolic_tensor(outside) else []
        pending += op.inputs
    return False


def _ops_of_functions(op: tf.Operation) -> list[tf.Operation]:
    return [inner for graph in subgraphs.functions_of(op) for inner in xla_ops.needed(graph).values()]
