"""The ops of a body that run on the host: those for which XLA has no kernel, or a kernel that does nothing.

Summaries are among them: `add_caller` and `bound` give them the writer and the step of the caller.
"""

from __future__ import annotations

import contextlib
import numbers
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.pjrt.stablehlo.markers import HOST_CALL
from replica_engine.upstream import thread_state
from replica_engine.upstream.graphs import graph_walk, host_kernels, xla_ops
from replica_engine.values.structure import ById
from replica_engine.xla.arguments import Arguments, Shapes, Slot


def add_caller(arguments: Arguments, shapes: Shapes) -> Shapes:
    """Adds to a body's arguments the state of the caller that the body's summaries need. Only for eager mode.

    Summaries of a body go to the writer of the thread that calls `run`, at the step that this thread has set. A body is
    traced once, and later calls may have another writer and another step. So in a call from eager mode the step becomes
    an argument of the body, and pieces look up the writer when they run. The key of the trace includes everything that
    decides whether a body has summaries at all: whether there is a writer, and whether recording is on. In a call
    inside a `tf.function` the writer and the step are traced in, as in any `tf.function`.

    Returns:
        The shapes of all slots.
    """
    writer, step, recording = thread_state.summary_state()
    if writer is None:
        return shapes
    arguments.summary_writer = thread_state.callers_writer()
    is_plain = recording is None or isinstance(recording, bool)  # None before anybody has set it
    key: list[Any] = ["summaries", recording if is_plain else ById(recording)]
    if tf.is_tensor(recording) and not tf.is_symbolic_tensor(recording) and not callable(recording):
        key[1] = bool(recording)
    if isinstance(step, (numbers.Integral, np.ndarray, tf.__internal__.EagerTensor)):
        slot = Slot("the step of the summaries", [tf.cast(step, tf.int64)])
        arguments.slots.append(slot)
        arguments.summary_step = len(arguments.slots) - 1
        shapes = (*shapes, slot.shape)
        key.append("a step")
    else:
        key.append(None if step is None else ById(step))
    arguments.key = (arguments.key, tuple(key))
    return shapes


def bound(arguments: Arguments, placeholders: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Inside, while the body is traced, its summaries are for the writer and the step of each later caller."""
    if arguments.summary_writer is None:
        return contextlib.nullcontext()
    step = None if arguments.summary_step is None else placeholders[arguments.summary_step]
    return thread_state.summaries_of_caller(step)


CHECKS = ("Assert", "CheckNumerics", "CheckNumericsV2")
"""Ops that only raise. XLA compiles them to nothing."""

_THREE_SLOTS = 8  # REDUCE_INF_NAN_THREE_SLOTS, a mode of DebugNumericSummaryV2

SHAPED_BY_DATA = ("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "DynamicPartition")
"""Ops that XLA compiles, with results whose shape is known only when they run. The host cannot get such results."""

KNOWN_TO_XLA = ("Shape", "ShapeN", "Size", "Rank")
"""Ops whose results XLA knows when it compiles, for any values of their inputs."""

_SHAPES = {  # for each op, the inputs whose values XLA must know when it compiles: shapes, sizes and axes
    **dict.fromkeys(("Range",), (0, 1, 2)),
    **dict.fromkeys(("Fill", "Split"), (0,)),
    **dict.fromkeys(("SplitV",), (1, 2)),
    **dict.fromkeys(("TensorListReserve",), (0, 1)),
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


# In a branch or a loop strings may only be told: printed, written as a summary, part of an error, given to Python.
_TELLS = re.compile(r"^PrintV2$|^Assert$|Summary|^(Eager)?PyFunc")
_NO_WORK = re.compile(
    r"^(Const|Placeholder|Identity|NoOp|Encode(Png|Jpeg|Wav))$|^TensorList|^(Stateless)?(If|Case|While)$"
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
    if key not in _known:
        _known[key] = _is_for_host(op)
    return _known[key]


def _is_for_host(op: tf.Operation) -> bool:
    if op.type in ("Placeholder", "NoOp") or graph_walk.runs_functions(op) or _REFUSED.search(op.type):
        return False
    if op.type in CHECKS:
        return True
    if any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
        return True
    return not host_kernels.compiles(op) and host_kernels.has_host_kernel(op)


def may_move(op: tf.Operation) -> bool:
    """Whether an op that XLA can compile may run on the host too, since it only computes."""
    return not (
        op.type.startswith("Xla")
        or any(tensor.dtype == tf.resource for tensor in op.inputs)
        or graph_walk.list_inner_graphs(op)
        or _REFUSED.search(op.type)
    )


def shape_inputs(op: tf.Operation) -> tuple[int, ...]:
    """The inputs of an op that XLA must know when it compiles, for ops that often get them from strings."""
    return _SHAPES.get(op.type, ())


def computes_sizes(graph: Any) -> set[tf.Operation]:
    """The ops of a graph, not of its functions, that compute numbers which XLA must know when it compiles.

    If such a number comes from the host, it stays there: on its way over the devices it would cost another call.
    """
    found: set[tf.Operation] = set()
    sizes: set[int] = set()
    for op in reversed(host_kernels.needed_ops(graph)):
        if op.type not in KNOWN_TO_XLA and any(id(output) in sizes for output in op.outputs):
            found.add(op)
            sizes.update(id(each) for each in op.inputs if not each.dtype.is_floating and each.shape.rank in (0, 1))
        slices = (1, 2) if op.type == "StridedSlice" else ()
        sizes.update(id(op.inputs[index]) for index in (*shape_inputs(op), *slices))
    return found


def stays_for_host(op: tf.Operation) -> bool:
    """Whether an op that uses a value needs it on the host only; the devices make checks, and call if they fail."""
    return is_for_host(op) and op.type not in CHECKS and not is_numerics_summary(op)


def runs_whole(op: tf.Operation) -> bool:
    """Whether the host can run a branch with all that is in it: it only computes, and TensorFlow has all kernels."""
    only_computes = op.type in ("StatelessIf", "StatelessCase")
    return only_computes and all(
        each.type == "Placeholder" or host_kernels.has_host_kernel(each) for each in _inside(op)
    )


def _inside(op: tf.Operation) -> Iterator[tf.Operation]:
    """The ops in the functions of a branch, loop or call that are needed there."""
    return (each for graph in graph_walk.list_inner_graphs(op) for each in xla_ops.needed(graph).values())


def string_work(ops: Sequence[tf.Operation]) -> tf.Operation | None:
    """The first of some ops, or of ops in their functions, that works with strings or tables.

    Ops whose results only go into prints, summaries, messages of checks and Python functions do not count.

    Args:
        ops: ops of one graph, each after all that it depends on.
    """
    told: set[tf.Operation] = set()
    found = None
    for op in reversed(ops):
        users = [user for output in op.outputs for user in output.consumers()]
        returned = any(output is each for output in op.outputs for each in getattr(op.graph, "outputs", ()))
        if _TELLS.search(op.type) or (users and not returned and told.issuperset(users)):
            told.add(op)
        elif functions := graph_walk.list_inner_graphs(op):
            found = next(filter(None, (string_work(host_kernels.needed_ops(graph)) for graph in functions)), found)
        elif not _NO_WORK.search(op.type) and _has_strings(op):
            found = op
    return found


def _has_strings(op: tf.Operation) -> bool:
    tensors = (*op.inputs, *op.outputs)
    return "Table" in op.type or any(
        tensor.dtype == tf.string or (tensor.dtype == tf.resource and _is_of_strings(tensor)) for tensor in tensors
    )


def _is_of_strings(handle: tf.Tensor) -> bool:
    described = xla_ops.variable_dtype_and_shape(handle)
    return described is not None and described[0] == tf.string


def is_numerics_summary(op: tf.Operation) -> bool:
    """Whether an op says for `tf.debugging.enable_check_numerics` what is not finite in the result of another op."""
    return op.type == "DebugNumericSummaryV2" and op.get_attr("tensor_debug_mode") == _THREE_SLOTS


def is_host_resource(handle: tf.Tensor) -> bool:
    """Whether a resource is not a variable that a device can have: a table, a summary writer, a variable of strings."""
    described = xla_ops.variable_dtype_and_shape(handle)
    return described is None or xla_ops.is_host_only(described[0])


def is_left_on_host(component: tf.Tensor) -> bool:
    """Whether only sparse ops and host ops use a component of a sparse argument."""

    def passed_on(each: tf.Tensor) -> list[tf.Tensor]:
        return [op.outputs[0] for op in each.consumers() if op.type == "Identity"]

    users = [op for each in graph_walk.reached([component], passed_on) for op in each.consumers()]
    work = [op for op in users if op.type != "Identity"]
    return bool(users) and all((op.type.startswith("Sparse") and may_move(op)) or is_for_host(op) for op in work)


def calls_host(op: tf.Operation) -> bool:
    """Whether an op is a host call that the user wrote, or runs a function with such a call in it."""
    return xla_ops.marker_name(op) == HOST_CALL or any(map(calls_host, _inside(op)))


def needs_host(graph: Any) -> bool:
    """Whether an op of a function graph, or of a function in it, must run on the host."""
    return any(map(contains_host_op, xla_ops.needed(graph).values()))


def contains_host_op(op: tf.Operation) -> bool:
    """Whether an op must run on the host, or runs a function with an op that must, or that a copy would not have."""
    if not graph_walk.runs_functions(op):
        return is_for_host(op)
    return any(map(contains_host_op, _inside(op))) or any(map(_has_unused, graph_walk.list_inner_graphs(op)))


def _has_unused(graph: Any) -> bool:
    """Whether XLA would fail at an op of a branch, loop or call that nothing needs: it compiles all ops of these."""
    needed = xla_ops.needed(graph)
    return any(op.name not in needed and _fails(op) for op in graph.get_operations())


def _fails(op: tf.Operation) -> bool:
    if graph_walk.runs_functions(op):
        return any(_fails(inner) for graph in graph_walk.list_inner_graphs(op) for inner in graph.get_operations())
    if op.type in ("Placeholder", "NoOp"):
        return False
    return not host_kernels.compiles(op) or any(_is_of_data(op.inputs[index]) for index in shape_inputs(op))


def _is_of_data(tensor: tf.Tensor) -> bool:
    """Whether a value depends on more than shapes and constants, so that XLA cannot know it."""

    def behind(each: tf.Tensor) -> list[tf.Tensor]:
        if each.op.type == "Placeholder":
            outside = graph_walk.captured(each)
            return [outside] if tf.is_symbolic_tensor(outside) else []
        return [] if each.op.type in KNOWN_TO_XLA else list(each.op.inputs)

    return any(map(_is_of_run, graph_walk.reached([tensor], behind)))


def _is_of_run(tensor: tf.Tensor) -> bool:
    """Whether a tensor is an argument, or a variable that is captured."""
    if tensor.op.type != "Placeholder":
        return False
    outside = graph_walk.captured(tensor)
    return outside is None or outside.dtype == tf.resource
