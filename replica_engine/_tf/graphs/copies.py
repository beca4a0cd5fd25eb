"""Copies operations of one function graph to another, several times, with other inputs. Checked on TensorFlow 2.21.0.

`tf.graph_util.import_graph_def` copies through Python, op by op. Here the bytes of the nodes go to TensorFlow's C++ as
they are, once for each copy. What a GraphDef does not carry is copied as well: devices, the shapes that come with the
handles of variables, and the lines of the user that made the ops.

TensorFlow changes some ops after it has made them: the gradient of a call, a branch or a loop adds outputs and inputs
to it. So ops of these types are looked at again before each further copy (`_repeat_changes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import tensorflow as tf

# TF_GraphImportGraphDefWithResults and its options: adds nodes to a graph.
from tensorflow.python.client import pywrap_tf_session as _c_api
from tensorflow.python.framework import c_api_util as _c_api_util

# Operation: the Python side of an op that C++ has made.
from tensorflow.python.framework import ops as _ops

# gradient_registry: the gradients of If and Case ops.
from tensorflow.python.framework.ops import gradient_registry as _gradient_registry

# GraphDebugInfoBuilder, LoadTracesFromDebugInfo: the lines that made ops, as objects that other ops may have.
from tensorflow.python.util import _tf_stack

from replica_engine._tf import eager
from replica_engine._tf.graphs.source import HANDLES, SEED, FuncGraph, constant, copy_handle_data, placeholder

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
_LOOPS = frozenset(("While", "StatelessWhile"))
_BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
_CUSTOM = b"CustomGradient-"  # how TensorFlow begins the name of a gradient that belongs to one call


class Copies:
    """Copies of the ops of a graph.

    Args:
        source: the graph whose ops are copied.
        target: the graph to which they are copied, several times.
        devices: for each copy, the device of ops that name none, by its full name.
        own_gradient: the gradient of copies for which the gradient of the copied op is wrong.
    """

    def __init__(self, source: Any, target: Any, devices: Sequence[str], own_gradient: Callable[..., Any]):
        self._source, self._target, self._devices = source, target, devices
        self._own_gradient = own_gradient
        # The number of ops that were looked at, and of captures.
        self._seen = self._captured = 0
        # For each copy, what stands for a tensor (by its id) and an op (by its name) of the source.
        self._tensors: list[dict[int, tf.Tensor]] = [{} for _ in devices]
        self._operations: list[dict[str, tf.Operation]] = [{} for _ in devices]
        self._begun: set[int] = set()  # the copies that have ops already
        self._given: set[str] = set()
        self._holes: dict[tuple[int, ...], tf.Tensor] = {}  # placeholders, by the ids of what stands for them
        self._of_one: set[int] = set()
        self._made: set[int] = set()  # the ids of the copies
        self._originals: dict[int, tf.Operation] = {}  # by the id of the first copy
        self._kept: list[tuple[tf.Tensor, Sequence[tf.Tensor]]] = []  # so that no id is used twice
        self._given_operations: list[tuple[tf.Operation, Sequence[tf.Operation]]] = []
        self._changing: list[tuple[tf.Operation, int, int, bytes]] = []

    def give(self, inside: tf.Tensor, outside: Sequence[tf.Tensor]) -> None:
        """Sets what stands for a placeholder of the source in each copy."""
        self._given.add(inside.op.name)
        self._kept.append((inside, outside))
        self._holes[tuple(map(id, outside))] = inside
        if any(each is not outside[0] for each in outside):
            self._of_one |= set(map(id, outside))
        for copy, tensor in enumerate(outside):
            self._tensors[copy][id(inside)] = tensor
            self._operations[copy][inside.op.name] = tensor.op

    def give_operation(self, inside: tf.Operation, outside: Sequence[tf.Operation]) -> None:
        """Sets what stands for an op of the source without inputs and outputs in each copy."""
        self._given.add(inside.name)
        self._given_operations.append((inside, outside))
        for copy, operation in enumerate(outside):
            self._operations[copy][inside.name] = operation

    def tensor(self, copy: int, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor of a copy that stands for a tensor of the source."""
        known = self._tensors[copy].get(id(tensor))
        return self._operations[copy][tensor.op.name].outputs[tensor.value_index] if known is None else known

    def given(self, tensor: tf.Tensor) -> list[tf.Tensor] | None:
        """For each copy, the tensor given for a placeholder of the source; None for a tensor that is copied."""
        return [known[id(tensor)] for known in self._tensors] if tensor.op.name in self._given else None

    def is_of_one(self, tensor: Any) -> bool:
        """Whether a tensor stands for a placeholder in some of the copies only, or was made in one."""
        return not eager.is_eager(tensor) and (id(tensor) in self._of_one or id(tensor.op) in self._made)

    def operation(self, copy: int, operation: tf.Operation) -> tf.Operation | None:
        """The op of a copy that stands for an op of the source; None if the op has not been copied."""
        return self._operations[copy].get(operation.name)

    def hole(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """The placeholder for which tensors were set to stand, one in each copy; None if there is none."""
        return self._holes.get(tuple(map(id, tensors)))

    def original(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """The tensor of the source of which tensors are the copies, one in each; None if they are not."""
        op = self._originals.get(id(tensors[0].op))
        found = None if op is None else op.outputs[tensors[0].value_index]
        if found is None or any(self.tensor(copy, found) is not each for copy, each in enumerate(tensors)):
            return None
        return found

    def better_known(self, new: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
        """The ops with a result whose static shape is better known in a copy than in the source."""
        for op in new:
            for index, output in enumerate(op.outputs):
                shape = output.shape
                if not shape.is_fully_defined() and any(
                    _knows_more(known[op.name].outputs[index].shape, shape) for known in self._operations
                ):
                    yield op

    def rehearse(self, new: Sequence[tf.Operation], seeds: Mapping[str, Sequence[int]]) -> Copies:
        """Copies ops, as `add` does, to a graph that is thrown away; only before the first `add`."""
        target = FuncGraph("rehearsal")
        made = Copies(self._source, target, self._devices, self._own_gradient)
        with target.as_default():
            for inside, outside in self._kept:
                made.give(inside, [_stand_in(target, each) for each in outside])
            for inside, outside in self._given_operations:
                made.give_operation(inside, [tf.no_op() for _ in outside])
        made.add(new, seeds)
        return made

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
        """The names of the new ops that have become inputs, direct or indirect, of ops that were copied earlier."""
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
        # Attributes that all copies share are read once: with many thousand ops, each call of C++ counts.
        about = [
            (
                op.name,
                op.device,
                lines.get(op.name + "@"),
                self._gradient(op, node),
                any(output.dtype in HANDLES for output in op.outputs),
            )
            for op, node in zip(new, nodes, strict=True)
        ]
        for copy, device in enumerate(self._devices):
            for position, op in enumerate(new):
                if op.name in seeds:
                    pieces[position] = _with_seed(pieces[position], seeds[op.name][copy])
            prefix, made = self._imported(copy, pieces, inputs, controls)
            known = self._operations[copy]
            for op, original, (name, named, line, gradient, is_handle) in zip(made, new, about, strict=True):
                assert op.name == prefix + name or _is_numbered(op.name, prefix + name), (op.name, prefix + name)
                op._set_device_from_string(_on(device, named))
                op._gradient_function = gradient  # the gradient of a call computes with the op that it is given
                known[name] = op
                self._made.add(id(op))
                if copy == 0:
                    self._originals[id(op)] = original
                if line is not None:
                    _c_api.TF_SetOpStackTrace(op._c_op, line)
                if is_handle:
                    _copy_handles(original.outputs, op.outputs)
        self._changing += [
            (op, len(op.outputs), len(op.inputs), op._node_def) for op in new if op.type in _CHANGED_LATER
        ]

    def _gradient(self, op: tf.Operation, node: bytes) -> Callable[..., Any] | None:
        """The gradient function of the copies of an op; None for the one that is registered for the op's type.

        The gradient of a tf.custom_gradient computes with tensors of the source, and the gradient of a loop changes
        functions by name. Both would be wrong for a copy.
        """
        if _CUSTOM in node or op.type in _LOOPS:
            return self._own_gradient
        if op.type in _BRANCHES:
            return functools.partial(_of_branches, self._own_gradient)
        return op._gradient_function

    def _scope(self, copy: int) -> str:
        """An empty name scope of the target, named as the scope of a replica is when each replica is traced."""
        while True:
            with self._target.as_default(), tf.name_scope(f"replica_{copy}") as scope:
                beginning = scope.lower()
            if copy in self._begun or not any(map(str.startswith, self._target._names_in_use, repeat(beginning))):
                self._begun.add(copy)
                return scope

    def _imported(
        self,
        copy: int,
        pieces: Sequence[bytes],
        inputs: Mapping[str, tf.Tensor],
        controls: Mapping[str, tf.Operation],
    ) -> tuple[str, list[tf.Operation]]:
        """Adds nodes to the target, once; returns the beginning of their names, and the ops in the same order."""
        target = self._target
        scope = self._scope(copy)
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
            return scope, _new_operations(target)


def _stand_in(graph: Any, tensor: tf.Tensor) -> tf.Tensor:
    """A tensor of `graph` with the static shape and the constant value of a tensor of another graph."""
    known = constant(graph, [tensor])
    return placeholder(graph, tensor) if known is None else known


def _knows_more(known: tf.TensorShape, shape: tf.TensorShape) -> bool:
    if known.rank is None:
        return False
    return shape.rank is None or any(
        one is not None and other is None for one, other in zip(known.as_list(), shape.as_list(), strict=True)
    )


def _in_order(new: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The ops, each after its inputs. A loop is older than the accumulators that its gradient gives it as inputs."""
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
    """A node without its colocation with other ops, if one of these is not copied together with it."""
    if b"loc:@" not in data:
        return data
    node = tf.compat.v1.NodeDef.FromString(data)
    if all(each.decode().removeprefix("loc:@") in inside for each in node.attr["_class"].list.s):
        return data
    del node.attr["_class"]
    return node.SerializeToString()


def _of_branches(own_gradient: Callable[..., Any], op: tf.Operation, *upstream: Any) -> Any:
    """The gradient of a copy of a branch.

    TensorFlow's gradient adds outputs to the function of the branch, which all copies share, and renames that function.
    So for the second copy it may find another function under the name, and raise.
    """
    try:
        return _gradient_registry.lookup(op.type)(op, *upstream)
    except tf.errors.InvalidArgumentError:
        return own_gradient(op, *upstream)


def _is_numbered(name: str, wanted: str) -> bool:
    """Whether a name is `wanted` with a number appended to make it unique."""
    return name.startswith(wanted + "_") and name[len(wanted) + 1 :].isdigit()


def _with_seed(data: bytes, seed: int) -> bytes:
    node = tf.compat.v1.NodeDef.FromString(data)
    node.attr[SEED].i = seed
    return node.SerializeToString()


def _field(tag: int, data: bytes) -> bytes:
    """A field of a message of Protocol Buffers: its tag, its length, and its bytes."""
    length, out = len(data), bytearray((tag,))
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out) + data


@functools.lru_cache(maxsize=1024)
def _on(device: str, named: str) -> str:
    """The device of a copied op. `named` is the device of the original: empty, partial or whole."""
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
        if original.dtype in HANDLES:
            copy_handle_data(original, copy)


def _new_operations(graph: Any) -> list[tf.Operation]:
    """Makes the Python side of the ops that C++ has added; TensorFlow's own way looks at scopes for each op."""
    made = []
    for c_op in graph.new_operations():
        op = _ops.Operation._from_c_op(c_op=c_op, g=graph)
        graph._names_in_use.setdefault(op.name.lower(), 1)
        made.append(op)
    return made
