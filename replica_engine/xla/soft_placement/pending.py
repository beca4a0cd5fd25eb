"""Host ops that wait to be emitted, and how they become pieces.

The copy of a graph is built in the order of the program. A host op is not emitted when its turn comes: it waits here,
since the next op may belong to the same piece. All waiting ops are emitted when an op on the devices needs a result of
one of them; before a branch, a loop or a host call of the user; and at the end of the graph. So a piece never waits for
an op that waits for that piece, and a replica makes its host calls in the order of the program.

Among the ops that are emitted together, those that pass values to each other, or are ordered by a control dependency,
form one piece. All ops with effects form one piece too: in several pieces they would lose their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from replica_engine.xla.host_calls.call import HostCalls
from replica_engine.xla.soft_placement import kinds
from replica_engine.xla.soft_placement.piece import HostOp, Piece, Source, host_op
from replica_engine.xla.soft_placement.values import Value


class Waiting(NamedTuple):
    """An op that waits.

    Attributes:
        op: the op of the original graph; for an alias, the op that made the value.
        inputs: its inputs.
        outputs: its outputs.
        alias: for an op that only passes a value on, the number under which the value is stored; otherwise None.
    """

    op: tf.Operation
    inputs: list[Value]
    outputs: list[Value]
    alias: int | None = None


class Pending:
    """The ops that wait in one graph of the copy.

    Args:
        calls: the host calls of the body.
        in_loop: whether the graph is a loop, or inside a loop.
        in_condition: whether the graph is the condition of a loop.

    Attributes:
        constants: the constants that the copy has so far.
    """

    def __init__(self, calls: HostCalls, in_loop: bool, in_condition: bool = False):
        self.in_loop = in_loop
        self.in_condition = in_condition
        self._emitted = False
        self.calls = calls
        self.constants: dict[Value, tf.Tensor] = {}
        self._waiting: list[Waiting] = []

    def add(self, waiting: Waiting) -> None:
        """Adds an op that waits."""
        for value in waiting.outputs:
            value.pending = True
        self._waiting.append(waiting)

    def flush(self, together: bool = False) -> None:
        """Emits all waiting ops: together as one piece, or one piece for each group of connected ops."""
        waiting, self._waiting = self._waiting, []
        for group in [waiting] if together and waiting else _groups(waiting):
            self._emit(group)

    def _emit(self, group: Sequence[Waiting]) -> None:
        registers: dict[Value, int] = {}
        sources: dict[int, Source] = {}
        operands: list[tf.Tensor] = []
        ops: list[HostOp] = []
        results: list[tuple[int, tf.TensorSpec]] = []
        returned: list[Value] = []
        stores: list[tuple[int, int]] = []
        made = {value for each in group for value in each.outputs}
        for each in group:
            for value in each.inputs:
                if value not in registers and value not in made:
                    registers[value] = len(registers)
                    source = value.on_host()
                    if source is None:
                        assert value.tensor is not None, "emitted before"
                        source = Source("operand", len(operands))
                        operands.append(value.tensor)
                    sources[registers[value]] = source
            if each.alias is not None:
                stores.append((each.alias, registers[each.inputs[0]]))
                registers[each.outputs[0]] = registers[each.inputs[0]]
                each.outputs[0].pending = False
                continue
            inputs = [registers[value] for value in each.inputs]
            outputs = [registers.setdefault(value, len(registers)) for value in each.outputs]
            ops.append(host_op(each.op, inputs, outputs))
        inside = {each.op for each in group}
        for each in group:
            if each.alias is not None:
                continue
            for value, tensor in zip(each.outputs, each.op.outputs, strict=True):
                value.pending = False
                register = registers[value]
                on_devices, on_host = _uses(tensor, inside)
                if value.fits_device and on_devices:
                    results.append((register, tf.TensorSpec(value.shape, value.dtype)))
                    returned.append(value)
                elif on_devices or on_host:
                    value.source = Source("stored", self.calls.new_number())
                    stores.append((value.source.what, register))
        self._emitted = True
        tried = [value.tried_with for value in returned]
        piece = Piece(self.calls, ops, sources, len(registers), results, stores, self.in_loop, tried)
        _, tensors = self.calls.emit(piece, operands)
        for value, tensor in zip(returned, tensors, strict=True):
            value.tensor = tensor

    def hold(self, result: tf.Tensor) -> tf.Tensor:
        """The result of a loop's condition, passed through the host if the condition has host calls.

        XLA drops everything that the result does not depend on. The result depends on this call, which depends on the
        calls before it.
        """
        if not self._emitted:
            return result
        spec = tf.TensorSpec([], result.dtype)
        piece = Piece(self.calls, [], {0: Source("operand", 0)}, 1, [(0, spec)], [], self.in_loop)
        return self.calls.emit(piece, [result])[1][0]

    def fetch(self, value: Value) -> tf.Tensor:
        """Brings a value that is stored on the host, and that the devices can have, to the devices."""
        source = value.source
        assert source is not None, "a value that is stored"
        spec = tf.TensorSpec(value.shape, value.dtype)
        piece = Piece(self.calls, [], {0: source}, 1, [(0, spec)], [], self.in_loop, [value.tried_with])
        return self.calls.emit(piece, [])[1][0]


def _uses(tensor: tf.Tensor, inside: set[tf.Operation]) -> tuple[bool, bool]:
    """Whether ops outside of a piece use a tensor on the devices, and whether ops outside use it on the host."""
    outside = [op for op in tensor.consumers() if op not in inside]
    returned = any(tensor is output for output in tensor.graph.outputs)
    on_devices = returned or any(not kinds.is_for_host(op) for op in outside)
    return on_devices, any(kinds.is_for_host(op) for op in outside)


def _groups(waiting: Sequence[Waiting]) -> list[list[Waiting]]:
    """The groups of connected ops, each in the order of the program."""
    group_of: list[int] = list(range(len(waiting)))
    maker = {value: index for index, each in enumerate(waiting) for value in each.outputs}
    made_of = {each.op: index for index, each in enumerate(waiting) if each.alias is None}

    effects: list[int] = []  # the last op with effects

    def root(index: int) -> int:
        while group_of[index] != index:
            index = group_of[index]
        return index

    for index, each in enumerate(waiting):
        before = [maker[value] for value in each.inputs if value in maker]
        before += [made_of[op] for op in each.op.control_inputs if op in made_of]
        if each.alias is None and each.op.op_def.is_stateful:  # they keep their order in one piece
            before += effects
            effects = [index]
        for other in before:
            first, last = sorted((root(index), root(other)))
            group_of[last] = first
    groups: dict[int, list[Waiting]] = {}
    for index, each in enumerate(waiting):
        groups.setdefault(root(index), []).append(each)
    return list(groups.values())
