"""Walks over graphs: what an op needs, what waits, and running a part in eager mode.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

# context: has the functions that TensorFlow knows by name, including those of graphs.
from tensorflow.python.eager import context as _context

# from_func_graph: registers a part of a graph as a function under a name. call_flat: calls that function.
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic_function

# add_op_callback, remove_op_callback: a function that TensorFlow calls for each op that it makes on this thread.
from tensorflow.python.framework import op_callbacks as _op_callbacks

# script_ops: calls Python functions of graphs, each by its token.
from tensorflow.python.ops import script_ops as _script_ops

from replica_engine.upstream import eager
from replica_engine.upstream.hook import StandIn


@contextlib.contextmanager
def seen(see: Mapping[str, Callable[[tf.Operation], None]]) -> Iterator[None]:
    """Calls `see[kind]` with each op of that type that is added to a graph inside, right after it is added."""

    def callback(
        op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> Any:
        if op_type in see and graph is not None:
            see[op_type](graph.get_operation_by_name(op_name))
        return outputs  # maybe those that another callback has replaced

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


@contextlib.contextmanager
def noted(note: Callable[..., None]) -> Iterator[None]:
    """Calls `note(kind, inputs, attributes, outputs, op_name=, graph=)` after each op of this thread inside."""

    def callback(
        kind: str | bytes, inputs: Any, attrs: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> Any:
        kind = kind.decode() if isinstance(kind, bytes) else kind
        note(kind, inputs, attrs, outputs, op_name=op_name, graph=graph)
        return outputs

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Changes an input of an op that nothing has used yet."""
    op._update_input(index, tensor)


def effects_wait(graph: tf.Graph, begin: int, awaited: tf.Operation) -> None:
    """Makes the ops with effects, from the `begin`-th of a graph on, wait for another op that was made before them.

    Only these: ops that just compute stay as they are, so that TensorFlow can compute constants ahead.
    """
    for op in graph.get_operations()[begin:]:
        if is_stateful(op) and op.type != "ReadVariableOp":
            op._add_control_input(awaited)


# The ops of a graph and of the functions that it runs, and a part of them run in eager mode.

T = TypeVar("T")
Ops = Iterable[tf.Operation]

_numbers = itertools.count()

BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
"""The types of the ops that run one of their functions, which their first input chooses."""

LOOPS = ("While", "StatelessWhile")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")

FUNCTION_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
    **dict.fromkeys(LOOPS, ("cond", "body")),
    **dict.fromkeys(CALLS, ("f",)),
}
"""The attributes that name functions, of each type of op that runs some."""

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
"""The types of the ops that read a variable, or rows of one."""

ADDING = ("AssignAddVariableOp", "AssignSubVariableOp")
"""The types of the ops that add something to a variable."""


def reached(start: Iterable[T], further: Callable[[T], Iterable[T]], key: Callable[[T], Any] = id) -> Iterator[T]:
    """Some ops, tensors, graphs or names, and all that `further` leads to from them: each once, the last found first.

    Those of one `key` count as one.
    """
    pending, seen = list(start), dict[Any, T]()
    while pending:
        each = pending.pop()
        if (own := key(each)) not in seen:
            seen[own] = each  # which keeps it: an id is its own as long as it lives
            yield each
            pending += further(each)


def everywhere(*graphs: Any) -> Iterator[tf.Operation]:
    """The ops of graphs, and of the functions that these run: each function once, in the order of the program."""

    def inside(graph: Any) -> list[Any]:
        return [inner for op in graph.get_operations() if runs_functions(op) for inner in list_inner_graphs(op)][::-1]

    return (op for graph in reached(graphs[::-1], inside) for op in graph.get_operations())


def captured(inside: tf.Tensor) -> Any | None:
    """The outside value of a placeholder in a function graph; None if the placeholder is an argument instead."""
    captures = getattr(inside.graph, "captures", ())
    return next((outside for outside, placeholder in captures if placeholder is inside), None)


def is_passed_on(body: Any, index: int) -> bool:
    """Whether an iteration leaves a value of a loop unchanged."""
    output = body.outputs[index]
    while output.op.type in ("Identity", "IdentityN"):
        output = output.op.inputs[output.value_index]
    return output is body.inputs[index]


def outermost(tensor: Any, captures: dict[Any, dict[int, Any]] | None = None) -> Any:
    """What a placeholder stands for, through all functions; any other tensor itself.

    `captures` keeps those of each graph, by placeholder, for many calls: a step has an op for each weight, slot and
    replica, and its graph captures as many handles.
    """
    captures = {} if captures is None else captures
    while tf.is_symbolic_tensor(tensor):
        if tensor.graph not in captures:
            captures[tensor.graph] = {id(inside): outside for outside, inside in getattr(tensor.graph, "captures", ())}
        if (outside := captures[tensor.graph].get(id(tensor))) is None:
            break
        tensor = outside
    return tensor


def capture_in(graph: Any, tensor: Any) -> tf.Tensor:
    """The tensor in a function graph, which captures it, or makes a constant of a small eager tensor."""
    with graph.as_default():
        return graph.capture(tensor)


def is_stateful(op: tf.Operation) -> bool:
    """Whether the op has an effect, or may return other results when it runs again."""
    return bool(op._is_stateful)


def list_inner_graphs(op: tf.Operation) -> list[Any]:
    """The graphs of the functions that a branch, loop or call runs; an empty list for any other op.

    For a branch they are in the order of the branches; for a loop they are its condition and its body.
    """
    graphs = [getattr(function, "graph", None) for function in _registered(op)]
    return graphs if all(graph is not None for graph in graphs) else []


def _registered(op: tf.Operation) -> list[Any]:
    """The functions that a branch, loop or call runs, as its graph knows them."""
    values = [op.get_attr(attribute) for attribute in FUNCTION_ATTRIBUTES.get(op.type, ())]
    names = [each.name for value in values for each in (value if isinstance(value, list) else [value])]
    return [op.graph._get_function(name) for name in names]


def runs_functions(op: tf.Operation) -> bool:
    """Whether an op is a branch, a loop or a call."""
    return op.type in FUNCTION_ATTRIBUTES


def op_types_of_calls(op: tf.Operation) -> set[str]:
    """The types of all ops in the functions that an op calls: a loop, a branch or a function call."""
    return {node.op for definition in definitions(_called(op.node_def)) for node in definition.node_def}


def definitions(names: Iterable[str]) -> Iterator[Any]:
    """The FunctionDefs of functions that the context knows by name, and of all that they call: each once."""
    known = functools.cache(_context.context().get_function_def)

    def inside(name: str) -> list[str]:
        return [each for node in known(name).node_def for each in _called(node)]

    return map(known, reached(names, inside, str))


def _called(node: Any) -> Iterator[str]:
    """The names of the functions that a node calls: a loop, a branch or a function call."""
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name:
                yield function.name


def apply_op(op: tf.Operation, inputs: Sequence[tf.Tensor], control_inputs: Ops = ()) -> tf.Operation:
    """Copies an op into the current graph, with inputs that may have other shapes."""
    graph = eager.graph()
    for function in _registered(op):
        graph._add_function_recursive(function)
    # Colocation ("_class") refers to ops of the original graph, which do not exist in this one.
    attributes = {name: value for name, value in op.node_def.attr.items() if name != "_class"}
    with tf.control_dependencies(list(control_inputs)), tf.name_scope(""):
        return graph._create_op_internal(
            op.type,
            list(inputs),
            [output.dtype for output in op.outputs],
            name=op.name,
            attrs=attributes,
            op_def=op.op_def,
            compute_device=False,
        )


def run(
    graph: Any, operations: Ops, inputs: Sequence[tf.Tensor], values: Sequence[Any], outputs: Any
) -> list[tf.Tensor]:
    """Runs ops of a function graph in eager mode, on the host.

    TensorFlow's lift_to_graph copies the ops that a tensor needs to another graph. It cannot substitute values for
    tensors in the middle. A function can, because its inputs may be any tensors of the graph.

    Args:
        graph: the graph of the ops.
        operations: all ops that `outputs` need, except those that make `inputs`.
        inputs: the tensors of the graph whose values are given.
        values: their eager values.
        outputs: the tensors of the graph to compute.

    Returns:
        The values of `outputs`.
    """
    part = GraphPart(graph, operations, inputs, outputs)
    with tf.init_scope(), tf.device("CPU:0"):
        function = _atomic_function.from_func_graph(f"replica_engine_part_{next(_numbers)}", part, {})
        return list(function.call_flat(*values))


class GraphPart(StandIn):
    """Some ops of a function graph, with the attributes that `from_func_graph` reads from a graph."""

    def __init__(
        self, graph: Any, operations: Ops, inputs: Sequence[Any], outputs: Sequence[Any], control_outputs: Ops = ()
    ):
        super().__init__(graph)
        self._operations = list(operations)
        self.inputs, self.outputs, self.control_outputs = list(inputs), list(outputs), list(control_outputs)

    def get_operations(self) -> list[tf.Operation]:
        """The ops of the part."""
        return self._operations


# Ops in which a graph may stand still: those that wait for something outside, and those that call Python.

PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""The types of ops that call Python. TensorFlow cannot end them."""

_WAITS = (
    *PYTHON,
    *("QueueDequeueV2", "QueueDequeueManyV2", "QueueDequeueUpToV2", "QueueEnqueueV2", "QueueEnqueueManyV2"),
    *("IteratorGetNext", "OptionalGetValue", "MultiDeviceIteratorGetNextFromShard", "IteratorGetNextAsOptional"),
    *("BarrierTakeMany", "Stage", "Unstage", "MapStage", "MapUnstage", "OrderedMapUnstage", "ReadFile"),
    *("CollectiveReduceV2", "CollectiveGatherV2", "CollectiveReduceV3", "NcclAllReduce"),
)
"""The types of ops that may wait for something outside of the graph."""

_HEAVY = ("MatMul", "Conv", "Einsum", "FFT", "Pool", "Sort", "TopK", "Unique", "Svd", "Qr", "Cholesky", "Solve", "Eig")
"""What the types of ops contain that compute more than each element once."""

_CALLER = _script_ops.FuncRegistry.__call__.__code__


def may_take_long(op: tf.Operation) -> bool:
    """Whether an op may wait for something outside, calls Python or other functions, or has much to compute."""
    return op.type in _WAITS or runs_functions(op) or any(each in op.type for each in _HEAVY)


def can_be_ended(op: tf.Operation) -> bool:
    """Whether TensorFlow's cancellation has something to end: an op that may wait, or that runs functions that may.

    An iterator is left alone: once a wait for its next element was cancelled, it looks as if it had come to its end.
    """
    if op.type in PYTHON or "Iterator" in op.type:
        return False
    return op.type in _WAITS or runs_functions(op)


def python_ops(graph: Any) -> dict[str, tf.Operation]:
    """The ops that call Python in a graph and in the functions that it runs, by their tokens."""
    return {op.get_attr("token").decode(): op for op in everywhere(graph) if op.type in PYTHON}


def calls_python(graph: Any) -> bool:
    """Whether a graph, or a function that it runs, calls Python."""
    return any(op.type in PYTHON or (runs_functions(op) and not _only_tensorflow(op)) for op in graph.get_operations())


def draws(graph: Any) -> bool:
    """Whether a graph, or a function that it runs, takes elements from an iterator, whose dataset may call Python."""
    return any("Iterator" in op.type for op in everywhere(graph))


def threads_in(tokens: Iterable[str]) -> dict[str, list[int]]:
    """The threads that run Python functions of graphs now: their idents, by the token of the function."""
    wanted, found = set(tokens), dict[str, list[int]]()
    for ident, innermost in sys._current_frames().items():
        for frame, _ in traceback.walk_stack(innermost):
            token = frame.f_locals.get("token") if frame.f_code is _CALLER else None
            if token in wanted:
                found.setdefault(token, []).append(ident)
    del innermost, frame  # perhaps that of this call: it would hold itself, and all that calls of this thread have
    return found


def before(op: tf.Operation, passed: Iterable[tf.Operation]) -> list[tf.Operation]:
    """The ops that may wait and that must be done before `op`, but not before the ops that are `passed`.

    Of a branch, a loop or a function that is called they are the ops inside, whose lines say more than its own.
    """
    behind = {*reached(passed, _needed)}
    new = reached([op], lambda op: [each for each in _needed(op) if each not in behind])
    several = (inner for each in new if each not in behind for inner in (each, *everywhere(*list_inner_graphs(each))))
    return [inner for inner in several if inner.type in _WAITS]


def _needed(op: tf.Operation) -> list[tf.Operation]:
    return [*(each.op for each in op.inputs), *op.control_inputs]


def _only_tensorflow(op: tf.Operation) -> bool:
    try:
        return op_types_of_calls(op).isdisjoint(PYTHON)
    except (tf.errors.NotFoundError, ValueError):
        return False  # a function that the context does not know: it may call anything
