"""Copies operations of one function graph to another, several times, with other inputs. Checked on TensorFlow 2.21.0.

`tf.graph_util.import_graph_def` copies through Python, op by op. Here the bytes of the nodes go to TensorFlow's C++ as
they are, once for each copy. What a GraphDef does not carry is copied as well: devices, the shapes that come with the
handles of variables, and the lines of the user that made the ops.

TensorFlow changes some ops after it has made them: the gradient of a call, a branch or a loop adds outputs and inputs
to it. So ops of these types are looked at again before each further copy (`_repeat_changes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

# TF_GraphImportGraphDefWithResults and its options: adds nodes to a graph.
from tensorflow.python.client import pywrap_tf_session as _c_api
from tensorflow.python.framework import c_api_util as _c_api_util

# OpDef by name: whether ops of a type have seeds.
from tensorflow.python.framework import op_def_registry as _op_def_registry

# FuncGraph: the graph of a function. Operation: the Python side of an op that C++ has made.
from tensorflow.python.framework import ops as _ops
from tensorflow.python.framework import random_seed as _random_seed
from tensorflow.python.framework.func_graph import FuncGraph as FuncGraph

# copy_handle_data: the shape and dtype of the variable behind a handle.
from tensorflow.python.ops.handle_data_util import copy_handle_data as _copy_handle_data

# GraphDebugInfoBuilder, LoadTracesFromDebugInfo: the lines that made ops, as objects that other ops may have.
from tensorflow.python.util import _tf_stack

_CHANGED_LATER = frozenset(
    (
        "PartitionedCall",
        "StatefulPartitionedCall",
        "If",
        "StatelessIf",
        "Case",
        "StatelessCase",
        "While",
        "StatelessWhile",
    )
)
_HANDLES = (tf.resource, tf.variant)
_SEED = "seed2"
_LOOPS = frozenset(("While", "StatelessWhile"))
_CUSTOM = b"CustomGradient-"  # how TensorFlow begins the name of a gradient that belongs to one call


class Copies:
    """Copies of the ops of a graph.

    Args:
        source: the graph whose ops are copied.
        target: the graph to which they are copied, several times.
        devices: for each copy, the device of ops that name none, by its full name.
        own_gradient: the gradient of copies of ops whose gradient is none for their copies.
    """

    def __init__(self, source: Any, target: Any, devices: Sequence[str], own_gradient: Callable[..., Any]):
        self._source, self._target, self._devices = source, target, devices
        self._own_gradient = own_gradient
        # The number of ops that were looked at, and of captures.
        self._seen = self._captured = 0
        # For each copy, what stands for a tensor (by its id) and an op (by its name) of the source.
        self._tensors: list[dict[int, tf.Tensor]] = [{} for _ in devices]
        self._operations: list[dict[str, tf.Operation]] = [{} for _ in devices]
        self._given: set[str] = set()
        self._kept: list[Any] = []  # so that no id is used twice
        self._changing: list[tuple[tf.Operation, int, int, bytes]] = []

    def give(self, inside: tf.Tensor, outside: Sequence[tf.Tensor]) -> None:
        """Sets what stands for a placeholder of the source in each copy."""
        self._given.add(inside.op.name)
        self._kept.append((inside, outside))
        for copy, tensor in enumerate(outside):
            self._tensors[copy][id(inside)] = tensor
            self._operations[copy][inside.op.name] = tensor.op

    def tensor(self, copy: int, tensor: tf.Tensor) -> tf.Tensor:
        """What stands for a tensor of the source in a copy."""
        known = self._tensors[copy].get(id(tensor))
        return self._operations[copy][tensor.op.name].outputs[tensor.value_index] if known is None else known

    def operation(self, copy: int, operation: tf.Operation) -> tf.Operation | None:
        """What stands for an op of the source in a copy; None for what was given."""
        return self._operations[copy].get(operation.name)

    def new_captures(self) -> list[tuple[Any, tf.Tensor]]:
        """What the source has captured since the last call: the values outside, and the placeholders."""
        captures = self._source.captures
        new, self._captured = captures[self._captured :], len(captures)
        return new

    def new_operations(self) -> list[tf.Operation]:
        """The ops of the source that were made since the last call, in the order in which they were made."""
        everything = self._source.get_operations()
        new, self._seen = everything[self._seen :], len(everything)
        return [op for op in new if op.name not in self._given]

    def add(self, new: Sequence[tf.Operation], seeds: Mapping[str, Sequence[int]]) -> None:
        """Copies ops, whose inputs were copied before or are among them.

        Args:
            new: the ops.
            seeds: for ops, by name, whose seed differs between the copies: the seed of each copy.
        """
        kinds = {op.type for op in new}
        if not kinds.isdisjoint(_CHANGED_LATER):
            new = _in_order(new)
        for name, function in list(self._source._functions.items()):
            if name not in self._target._functions:
                self._target._add_function_recursive(function)
        early = self._before_changes(new)
        self._import([op for op in new if op.name in early], seeds)
        self._repeat_changes()
        self._import([op for op in new if op.name not in early], seeds)

    def watch(self, variables: Iterable[Any]) -> None:
        """Tells tapes around the target's function that it uses variables."""
        for variable in variables:
            self._target.watch_variable(variable)

    def _before_changes(self, new: Sequence[tf.Operation]) -> set[str]:
        """The names of the new ops that ops of earlier copies have got as inputs since."""
        pending = [tensor.op for op, _, inputs, _ in self._changing for tensor in list(op.inputs)[inputs:]]
        inside = {op.name for op in new} if pending else set()
        found: set[str] = set()
        while pending:
            op = pending.pop()
            if op.name in inside and op.name not in found:
                found.add(op.name)
                pending += [tensor.op for tensor in op.inputs] + op.control_inputs
        return found

    def _repeat_changes(self) -> None:
        """Makes the changes that TensorFlow has made to ops of the source to their copies."""
        for index, (op, outputs, inputs, data) in enumerate(self._changing):
            now = op._node_def
            if now == data:
                continue
            before, after = tf.compat.v1.NodeDef.FromString(data), tf.compat.v1.NodeDef.FromString(now)
            changed = [key for key in after.attr if key not in before.attr or before.attr[key] != after.attr[key]]
            for copy in range(len(self._devices)):
                twin = self._operations[copy][op.name]
                for key in changed:
                    twin._set_attr(key, after.attr[key])
                if len(op.inputs) > inputs:
                    twin._add_while_inputs([self.tensor(copy, tensor) for tensor in list(op.inputs)[inputs:]])
                if len(op.outputs) > outputs:
                    more = op.outputs[outputs:]
                    twin._add_outputs([tensor.dtype for tensor in more], [tensor.shape for tensor in more])
                    _copy_handles(more, twin.outputs[outputs:])
            self._changing[index] = op, len(op.outputs), len(op.inputs), now

    def _import(self, new: Sequence[tf.Operation], seeds: Mapping[str, Sequence[int]]) -> None:
        if not new:
            return
        inside = {op.name for op in new}
        inputs = {tensor.name: tensor for op in new for tensor in op.inputs if tensor.op.name not in inside}
        controls = {control.name: control for op in new for control in op.control_inputs if control.name not in inside}
        nodes = [op._node_def for op in new]
        pieces = [_without_far_colocation(node, inside) for node in nodes]
        lines = _lines(new)
        # What is the same for all copies is asked once: each question to C++ counts in a graph of many thousand ops.
        about = [
            (
                op.name,
                op.device,
                lines.get(op.name + "@"),
                self._own_gradient if _has_own_gradient(op, node) else op._gradient_function,
                any(output.dtype in _HANDLES for output in op.outputs),
            )
            for op, node in zip(new, nodes, strict=True)
        ]
        for copy, device in enumerate(self._devices):
            for position, op in enumerate(new):
                if op.name in seeds:
                    pieces[position] = _with_seed(pieces[position], seeds[op.name][copy])
            made = self._imported(copy, pieces, inputs, controls)
            known = self._operations[copy]
            for op, original, (name, named, line, gradient, is_handle) in zip(made, new, about, strict=True):
                assert op.name.endswith(name), (op.name, name)
                op._set_device_from_string(_on(device, named))
                op._gradient_function = gradient  # that of a call computes with the op that it is given
                known[name] = op
                if line is not None:
                    _c_api.TF_SetOpStackTrace(op._c_op, line)
                if is_handle:
                    _copy_handles(original.outputs, op.outputs)
        self._changing += [
            (op, len(op.outputs), len(op.inputs), op._node_def) for op in new if op.type in _CHANGED_LATER
        ]

    def _imported(
        self,
        copy: int,
        pieces: Sequence[bytes],
        inputs: Mapping[str, tf.Tensor],
        controls: Mapping[str, tf.Operation],
    ) -> list[tf.Operation]:
        """Adds nodes to the target, once."""
        target = self._target
        with target.as_default(), tf.name_scope(f"replica_{copy}") as scope:
            prefix = scope[:-1]
        scoped = _c_api_util.ScopedTFImportGraphDefOptions()
        options = scoped.options
        _c_api.TF_ImportGraphDefOptionsSetPrefix(options, prefix)
        _c_api.TF_ImportGraphDefOptionsSetUniquifyNames(options, True)
        _c_api.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options, False)
        for name, tensor in inputs.items():
            source, _, index = name.rpartition(":")
            output = self.tensor(copy, tensor)._as_tf_output()
            _c_api.TF_ImportGraphDefOptionsAddInputMapping(options, source, int(index), output)
        for name in controls:
            _c_api.TF_ImportGraphDefOptionsRemapControlDependency(options, name, self._operations[copy][name]._c_op)
        # Without versions the nodes would count as of version 0, and lower the target to it: from then on, scalar
        # placeholders would be of unknown shape.
        versions = target.graph_def_versions.SerializeToString()
        data = b"".join(_field(0x0A, piece) for piece in pieces) + _field(0x22, versions)
        with target._mutation_lock():
            buffer = _c_api.TF_NewBufferFromString(data)
            try:
                with target._c_graph.get() as c_graph:
                    results = _c_api.TF_GraphImportGraphDefWithResults(c_graph, buffer, options)
                _c_api_util.ScopedTFImportGraphDefResults(results)
            finally:
                _c_api.TF_DeleteBuffer(buffer)
            return _new_operations(target)


def placeholder(graph: Any, like: tf.Tensor) -> tf.Tensor:
    """A placeholder of a graph, of the dtype and static shape of a tensor; a handle keeps what it is a handle of."""
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        made = tf.compat.v1.placeholder(like.dtype, like.shape)
    if like.dtype in _HANDLES:
        _copy_handle_data(like, made)
    return made


def counted_seeds(graph: Any) -> int:
    """How many seeds TensorFlow has drawn for the ops of a graph."""
    return _random_seed._graph_to_seed_dict.get(graph, 0)


def count_seeds(graph: Any, number: int) -> None:
    """Sets how many seeds TensorFlow has drawn for the ops of a graph."""
    _random_seed._graph_to_seed_dict[graph] = number


def seed_of_op(op: tf.Operation) -> int | None:
    """The seed that a random op has of its own, besides the global one; None for ops without seeds."""
    return op.get_attr(_SEED) if _has_seed(op.type) else None


def new_graph(target: Any) -> Any:
    """A function graph whose ops are to be copied to another, the default graph."""
    graph = FuncGraph("replica")
    # cond and while look whether they are in a graph that puts stateful ops in order.
    graph._add_control_dependencies = target._add_control_dependencies
    return graph


def watched_variables(graph: Any) -> list[Any]:
    """The variables that ops of a graph have read."""
    return list(graph._watched_variables)


def is_passed_by_reference(graph: Any) -> bool:
    """Whether a graph captures Python values that are looked up at each call."""
    return bool(graph._function_captures.by_ref_internal)


def on_capture(graph: Any, see: Callable[[Any], Any]) -> None:
    """Passes each value that ops of a function graph use to `see`, which returns the value to use."""
    capture = graph.capture

    def seen(tensor: Any, name: str | None = None, shape: Any = None) -> Any:
        return capture(see(tensor), name, shape)

    graph.capture = seen


def _in_order(new: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Each op after its inputs: what loops accumulate into for their gradients is made after them."""
    inside = {op.name: op for op in new}
    done: set[str] = set()
    order = []
    for op in new:
        stack = [op]
        while stack:
            top = stack[-1]
            missing: list[tf.Operation] = []
            if top.name not in done and (top.type in _CHANGED_LATER or len(stack) > 1):
                before = [tensor.op for tensor in top.inputs] + top.control_inputs
                missing = [each for each in before if each.name in inside and each.name not in done]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top.name not in done:
                done.add(top.name)
                order.append(top)
    return order


def _without_far_colocation(data: bytes, inside: set[str]) -> bytes:
    """A node without the wish to be where an op is that is not copied with it."""
    if b"loc:@" not in data:
        return data
    node = tf.compat.v1.NodeDef.FromString(data)
    if all(each.decode().removeprefix("loc:@") in inside for each in node.attr["_class"].list.s):
        return data
    del node.attr["_class"]
    return node.SerializeToString()


def _has_own_gradient(op: tf.Operation, node: bytes) -> bool:
    """Whether the gradient of an op is not one for its copies.

    That of a tf.custom_gradient computes with the tensors of the source, and that of a loop changes functions by name.
    """
    return _CUSTOM in node or op.type in _LOOPS


def _with_seed(data: bytes, seed: int) -> bytes:
    node = tf.compat.v1.NodeDef.FromString(data)
    node.attr[_SEED].i = seed
    return node.SerializeToString()


def _field(tag: int, data: bytes) -> bytes:
    """A field of a message of Protocol Buffers: its tag, its length, and its bytes."""
    length, out = len(data), bytearray((tag,))
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out) + data


@functools.cache
def _has_seed(kind: str) -> bool:
    definition = _op_def_registry.get(kind)
    return definition is not None and any(attribute.name == _SEED for attribute in definition.attr)


@functools.lru_cache(maxsize=1024)
def _on(device: str, named: str) -> str:
    """The device of a copy's op, of which the original names no device or a part of one."""
    if not named:
        return device
    return tf.DeviceSpec.from_string(device).make_merged_spec(tf.DeviceSpec.from_string(named)).to_string()


def _lines(operations: Sequence[tf.Operation]) -> Any:
    """The user's lines that made ops, by name; those of TF_OperationGetStackTrace may not be given to other ops."""
    builder = _tf_stack.GraphDebugInfoBuilder()
    for op in operations:
        if op.traceback is not None:
            builder.AccumulateStackTrace("", op.name, op.traceback)
    return _tf_stack.LoadTracesFromDebugInfo(builder.Build())


def _copy_handles(originals: Sequence[tf.Tensor], copies: Sequence[tf.Tensor]) -> None:
    for original, copy in zip(originals, copies, strict=True):
        if original.dtype in _HANDLES:
            _copy_handle_data(original, copy)


def _new_operations(graph: Any) -> list[tf.Operation]:
    """Makes the Python side of the ops that C++ has added; TensorFlow's own way looks at scopes for each op."""
    made = []
    for c_op in graph.new_operations():
        op = _ops.Operation._from_c_op(c_op=c_op, g=graph)
        graph._names_in_use.setdefault(op.name.lower(), 1)
        made.append(op)
    return made
