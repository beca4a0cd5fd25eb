"""Host ops that wait to be emitted, all in one call.

The copy of a graph is made in the order of the program. A host op is not emitted when its turn comes: it waits here,
and the next host op joins it, whatever ops of the devices lie between. All ops that wait are emitted, as one call, when
an op on the devices needs a result of one of them; before a branch, a loop or a host call of the user; and at the end
of the graph. So a call never waits for an op that waits for that call, effects keep the order of the program, and a
replica makes no more calls than it must.
"""

from __future__ import annotations

import tensorflow as tf

from replica_engine._tf.graphs import host_ops
from replica_engine.xla.host_calls.call import HostCalls
from replica_engine.xla.soft_placement import kinds
from replica_engine.xla.soft_placement.piece import HostOp, Piece, Source, host_op
from replica_engine.xla.soft_placement.values import Value


class Pending:
    """The ops that wait in one graph of the copy.

    Args:
        calls: the host calls of the body.
        in_loop: whether the graph is a loop, or inside a loop.
        in_condition: whether the graph is the condition of a loop.

    Attributes:
        constants: the constants that the copy has so far.
        again: what the host computes although the devices have it, by the value on the devices.
    """

    def __init__(self, calls: HostCalls, in_loop: bool = False, in_condition: bool = False):
        self.calls = calls
        self.in_loop = in_loop
        self.in_condition = in_condition
        self.constants: dict[Value, tf.Tensor] = {}
        self.again: dict[Value, Value] = {}
        self._emitted = False
        self._waiting: list[tuple[tf.Operation, list[Value], list[Value]]] = []
        self._kept: list[tuple[Value, int]] = []

    def add(self, op: tf.Operation, inputs: list[Value], outputs: list[Value]) -> None:
        """Adds an op that waits."""
        self._waiting.append((op, inputs, outputs))

    def keep(self, value: Value, number: int) -> None:
        """Has the next call store a value on the host under a number."""
        self._kept.append((value, number))

    def flush(self) -> None:
        """Emits all waiting ops as one call."""
        if not self._waiting and not self._kept:
            return
        (waiting, self._waiting), (kept, self._kept) = (self._waiting, []), (self._kept, [])
        registers: dict[Value, int] = {}
        sources: dict[int, Source] = {}
        operands: list[tf.Tensor] = []
        ops: list[HostOp] = []

        def taken(value: Value) -> int:
            if value not in registers:
                registers[value] = len(registers)
                if value.source is None and value.maker is not None and value.is_constant:
                    value.source = Source("fixed", host_ops.constant_of(value.maker))
                if value.source is None:
                    assert value.tensor is not None, "emitted before"
                    operands.append(value.tensor)
                sources[registers[value]] = value.source or Source("operand", len(operands) - 1)
            return registers[value]

        users: dict[Value, list[tf.Operation]] = {}
        for op, inputs, outputs in waiting:
            for value in inputs:
                users.setdefault(value, []).append(op)
            before = list(map(taken, inputs))
            ops.append(host_op(op, before, [registers.setdefault(value, len(registers)) for value in outputs]))
        results: list[Value] = []
        stores = [(number, taken(value)) for value, number in kept]
        for op, _, outputs in waiting:
            for value, tensor in zip(outputs, op.outputs, strict=True):
                others = [each for each in tensor.consumers() if each not in users.get(value, ())]
                returned = any(tensor is output for output in tensor.graph.outputs)
                if value.fits_device and (returned or not all(map(kinds.stays_for_host, others))):
                    results.append(value)
                elif returned or others:
                    value.source = Source("stored", self.calls.new_number())
                    stores.append((value.source.what, registers[value]))
        specs = [(registers[value], tf.TensorSpec(value.shape, value.dtype)) for value in results]
        piece = Piece(self.calls, ops, sources, specs, stores, self.in_loop)
        for value, tensor in zip(results, self._emit(piece, operands), strict=True):
            value.tensor = tensor

    def hold(self, result: tf.Tensor) -> tf.Tensor:
        """The result of a loop's condition, passed through the host if the condition has host calls.

        XLA drops everything that the result does not depend on. The result depends on this call, which depends on the
        calls before it.
        """
        if not self._emitted:
            return result
        specs = [(0, tf.TensorSpec([], result.dtype))]
        piece = Piece(self.calls, [], {0: Source("operand", 0)}, specs, [], self.in_loop)
        return self._emit(piece, [result])[0]

    def _emit(self, piece: Piece, operands: list[tf.Tensor]) -> list[tf.Tensor]:
        self._emitted = True
        return self.calls.emit(piece, operands)[1]
