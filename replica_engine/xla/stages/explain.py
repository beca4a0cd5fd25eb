"""An error of XLA's compiler, in terms of the user's program: which op, at which line, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf.graphs import subgraphs
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.errors import LoweringError
from replica_engine.errors.base import at
from replica_engine.xla.soft_placement.moved import MovedBody
from replica_engine.xla.stages.body_graph import BodyGraph

_LOOP_SHAPES = re.compile(r"shapes of loop body do not match: \((.*?)\) vs\. \((.*?)\)$", re.MULTILINE)
_SHAPE = re.compile(r"\w+\[([\d,<=]*)\]")
_OF_ANY_SIZE = ("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "DynamicPartition")
_NODE = re.compile(r"to node `([^`]+)`|\{\{node ([^}]+)\}\}")


def explain(traced: BodyGraph, error: Exception, moved: MovedBody | None) -> LoweringError:
    """The error that the user gets for an error of XLA's compiler."""
    text = str(error)
    where = _line(traced, text, moved)
    if found := _LOOP_SHAPES.search(text):
        explained = _growing_loop(traced.name, where, *_change(*found.groups()), _gathers(traced, text, moved))
    else:
        explained = _explain(traced, text, where)
    explained.op_name = _node(text)
    return explained


def unreadable(traced: BodyGraph, names: list[str], message: str, moved: MovedBody | None) -> LoweringError:
    """The error for a module with an operation that jaxlib does not read.

    Args:
        traced: the body.
        names: the names in the operation's location, among which is that of TensorFlow's op.
        message: what jaxlib says; "" for an operation that has no form in StableHLO.
        moved: the body with its host ops moved.
    """
    originals = moved.originals if moved else {}
    ops = {name: originals.get(name) or next(_named(traced.graph, name), None) for name in names}
    name, op = next((found for found in ops.items() if found[1] is not None), ("", None))
    where = user_line(op) if op is not None else ""
    if message:
        error = LoweringError.other(traced.name, message, where)
    else:
        error = _unsupported(traced.name, op.type if op is not None else "an op", where)
    error.op_name = name
    return error


def undividable(traced: BodyGraph) -> LoweringError:
    """The error for a body with a value whose shape depends on data, which XLA cannot divide over devices."""
    op = next((op for op in subgraphs.everywhere(traced.graph) if op.type in _OF_ANY_SIZE), None)
    where = user_line(op) if op is not None else ""
    return LoweringError(
        f"`{traced.name}` has a value whose shape depends on data{at(where)}, such as "
        "the result of tf.where(mask), tf.unique or tf.boolean_mask. XLA cannot divide such values over the devices of "
        "a replica. Keep the shape: tf.where(mask, x, 0.0) in place of tf.boolean_mask(x, mask), divided by the sum of "
        "the mask for a mean. On replicas of one device, without `distribution=`, the step works as it is."
    )


def _growing_loop(fn: str, where: str, before: str, after: str, gathers: list[str]) -> LoweringError:
    cause = f" The loop contains {' and '.join(gathers)}, whose result is larger than its operand." if gathers else ""
    gather = ", and gather them after the loop" if gathers else ""
    return LoweringError(
        f"In `{fn}`, a value of a loop{at(where)} has the shape {before} before an iteration and {after} after it, and "
        f"XLA compiles a loop for one shape. shape_invariants do not change that.{cause} Collect the values of the "
        f"iterations in a tf.TensorArray(dtype, size=n){gather}; or loop over a Python range, for i in range(n): such "
        "a loop is unrolled, and shapes may differ."
    )


def _unsupported(name: str, op: str, where: str) -> LoweringError:
    """The error for an op without a kernel of XLA; the user did not write the ops of `tf.debugging`."""
    if not op.startswith("Debug"):
        return LoweringError.unsupported_op(name, op, where)
    return LoweringError(
        f"tf.debugging.enable_check_numerics or another debugger has added {op} to `{name}`{at(where)}, and "
        "XLA cannot compile it. Call tf.debugging.disable_check_numerics() before the function is traced; or leave "
        "soft_placement on, with which check_numerics works under TPUStrategy; or use MirroredStrategy."
    )


def _explain(traced: BodyGraph, text: str, where: str) -> LoweringError:
    name = traced.name
    unsupported = re.search(r"on XLA_\w+: (\w+) \(", text) or re.search(r"with op (\w+)", text)
    if "Detected unsupported operations" in text and unsupported:
        return _unsupported(name, unsupported.group(1), where)
    if "compile-time constant" in text:
        return LoweringError.not_constant(name, unsupported.group(1) if unsupported else "an op", where)
    if "tensor list" in text.lower():
        return LoweringError(
            f"In `{name}`, a loop{at(_unbounded_loop(traced.graph) or where)} keeps a value of each iteration, for its "
            "gradient or in a TensorArray, so XLA must know the number of iterations: pass maximum_iterations to "
            "tf.while_loop, or loop over tf.range(n) for a constant n."
        )
    message = text.removeprefix("Failed getting HLO text: ").strip("'").split("\n\n")[0].split("Stack trace")[0]
    message = message.split("tf2xla conversion failed")[0]  # the rest is about TensorFlow's internals
    return LoweringError.other(name, message.strip(), where)


def _unbounded_loop(graph: Any) -> str:
    """The line of the first loop that keeps values and has no known number of iterations; its gradient comes later."""
    for op in subgraphs.everywhere(graph):
        if op.type in ("While", "StatelessWhile") and any(output.dtype == tf.variant for output in op.outputs):
            most = tf.get_static_value(op.inputs[1])  # -1 stands for no maximum
            if most is None or np.all(most < 0):
                return user_line(op)
    return ""


def _change(before: str, after: str) -> tuple[str, str]:
    """The shapes of the first value of a loop that changes its shape, in the words of TensorFlow."""
    for one, other in zip(_SHAPE.findall(before), _SHAPE.findall(after), strict=False):
        if one != other:
            return f"[{one.replace(',', ', ')}]", f"[{other.replace(',', ', ')}]"
    return before, after


def _gathers(traced: BodyGraph, message: str, moved: MovedBody | None) -> list[str]:
    """The gathers in the loop that a message is about, with their lines."""
    loop = moved.originals.get(_node(message)) if moved else next(_named(traced.graph, _node(message)), None)
    graphs = [] if loop is None else subgraphs.functions_of(loop)
    inside = {user_line(op) for graph in graphs for op in subgraphs.everywhere(graph)}
    found = (each for each in traced.collectives if each.kind == "all_gather" and each.where in inside)
    return list(dict.fromkeys(f"{each.kind}{at(each.where)}" for each in found))


def _node(message: str) -> str:
    found = _NODE.search(message)
    return found.group(1) or found.group(2) if found else ""


def _line(traced: BodyGraph, message: str, moved: MovedBody | None) -> str:
    """The user's line of the op that XLA's message is about.

    The op itself knows it best. But the message gives only the op's name, and functions of the body may have ops of
    one name. Then the stack trace in the message decides. For an op of a body with moved ops this is the last choice:
    the op is a copy, and its trace is of the copying.
    """
    if moved and (op := moved.originals.get(_node(message))) is not None:
        return user_line(op)
    lines = {user_line(op) for op in _named(traced.graph, _node(message))}
    if len(lines) == 1:
        return lines.pop()
    # XLA prints one stack for the op and others for the calls around it. The op's stack is the first. The name of a
    # lambda is left out.
    stack = re.split(r"The op is created at:|Stack trace for op definition:", message)[1:2]
    return user_line(re.findall(r'File "([^"]+)", line (\d+), in (\S*)', stack[0] if stack else message))


def _named(graph: Any, name: str) -> Iterator[tf.Operation]:
    """The ops of this name in a graph, and in the functions that it runs."""
    return (op for op in subgraphs.everywhere(graph) if op.name == name)


_OF_DATA = frozenset({"Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
"""The ops whose results XLA gives a size that depends on data."""

_SIZES = ("Shape", "Size", "ShapeN")


def reshape_by_data(graph: Any) -> tf.Operation | None:
    """The first reshape of a body to a size that depends on data, of which XLA computes wrong values without an error.

    `tf.reshape(x, [count, -1])`, where count is the size of `tf.where(mask)`: for XLA that size is the largest that it
    may become, together with the true one. A reshape to it gets rows for the largest. The values then lie in other rows
    than in TensorFlow, and TensorFlow's own `jit_compile=True` returns them so.

    Args:
        graph: the body; functions that it runs count.
    """
    for op in subgraphs.everywhere(graph):
        if op.type == "Reshape" and op.inputs[0].shape.is_fully_defined() and _depends_on_sizes(op.inputs[1].op):
            return op
    return None


def _depends_on_sizes(op: tf.Operation) -> bool:
    """Whether an op depends on the size of a result of one of the ops above."""

    def before(found: tuple[tf.Operation, bool]) -> list[tuple[tf.Operation, bool]]:
        each, is_size = found
        return [(one.op, is_size or one.op.type in _SIZES) for one in each.inputs]

    found = subgraphs.reached([(op, op.type in _SIZES)], before, tuple)
    return any(is_size and each.type in _OF_DATA for each, is_size in found)
