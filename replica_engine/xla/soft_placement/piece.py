"""A piece: ops that run on the host in one call.

A piece is a list of ops. Each op has the numbers of the registers that it takes its inputs from and puts its outputs
into. The registers are filled from six kinds of `Source`. Values that a device can have come and go through the
program. Other values (strings, tables, tensors whose shape depends on data) stay on the host: a piece that makes such a
value stores it under a number, once for each replica, and later pieces of the same launch find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine._tf.graphs import host_ops
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.errors import HostResultError
from replica_engine.errors.base import at
from replica_engine.xla.host_calls.call import HostCall, HostCalls
from replica_engine.xla.host_calls.session import Kept, Session


class HostOp(NamedTuple):
    """An op of a piece.

    Attributes:
        kind: its type.
        where: the user's line.
        run: takes the inputs, the values that the replica keeps on the host, and the replica; returns the outputs.
        inputs: the registers of its inputs.
        outputs: the registers of its outputs.
    """

    kind: str
    where: str
    run: Callable[[list[Any], Kept, int], list[Any]]
    inputs: list[int]
    outputs: list[int]


class Source(NamedTuple):
    """The origin of a register's value before the first op runs.

    Attributes:
        kind: "operand" (the program passes it), "stored" (another piece left it), "argument" (an argument of the body
            that no device can have), "fixed" (the same in every launch), "variable" (a variable of the strategy that
            no device can have and that the body writes: each replica has its own) or "writer" (of the caller's
            summaries).
        what: the number of the operand, of the stored value or of the argument, or the fixed value itself.
    """

    kind: str
    what: Any


class Piece(HostCall):
    """A host call that runs ops.

    Args:
        calls: the host calls of the body.
        ops: the ops, in the order of the program.
        sources: the origins of the registers that are filled before the first op, by register.
        results: the registers of the values that the program goes on with, and their specs.
        stores: the values that stay on the host, each as a pair of number and register.
        in_loop: whether the piece is in a loop.
    """

    def __init__(
        self,
        calls: HostCalls,
        ops: list[HostOp],
        sources: dict[int, Source],
        results: list[tuple[int, tf.TensorSpec]],
        stores: list[tuple[int, int]],
        in_loop: bool,
    ):
        # An Identity stands for the way out of the body or of a branch; its line is the line of the user's `run` call.
        written = [op for op in ops if op.kind != "Identity"] or ops
        where = next((op.where for op in reversed(written) if op.where), "")
        super().__init__(calls, calls.new_name(), where, [spec for _, spec in results])
        self.ops = ops
        self.in_loop = in_loop
        self._sources = sources
        self._taken = [register for register, _ in results]
        self._stores = stores

    def describe(self) -> str:
        """The piece in words, for messages."""
        return f"{in_words(self.ops)}{at(self.where)}, which soft placement runs on the host"

    def say(self) -> tuple[str, str, bool]:
        """The piece for the line that is logged once for a body: ops, the user's line, whether it is in a loop."""
        return in_words(self.ops), self.where, self.in_loop

    def compute(self, kept: Kept, position: int, token: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the ops."""
        run = self.calls.run
        assert run is not None, "set before the launch"
        replica = position % run.size
        values = {each: _value(*source, run, kept, replica, tensors) for each, source in self._sources.items()}
        with tf.device("CPU:0"):
            for op in self.ops:
                outputs = op.run([values[register] for register in op.inputs], kept, replica)
                values.update(zip(op.outputs, outputs, strict=True))
        for number, register in self._stores:
            kept.on_host[number] = values[register]
        return [values[register] for register in self._taken]

    def unlike(self, result: int, given: str, wanted: str) -> HostResultError:
        """The error for a result that is not as the body was compiled for."""
        register = self._taken[result]
        made_by = next((f"{op.kind}{at(op.where)}" for op in self.ops if register in op.outputs), "A host op")
        return HostResultError(f"{made_by} returned {given}, where the body declares {wanted}.")


def _value(kind: str, what: Any, run: Session, kept: Kept, replica: int, tensors: list[tf.Tensor]) -> Any:
    """The value of a register before the first op runs; see `Source`."""
    if kind == "operand":
        return tensors[what]
    if kind == "stored":
        return kept.on_host[what]
    if kind == "argument":
        return tf.constant(run.argument(what, replica))
    if kind == "variable":
        return run.host_variables.handle(what, replica)
    return thread_state.summary_state()[0] if kind == "writer" else what


def in_words(ops: Sequence[HostOp]) -> str:
    """The types of the ops, each once."""
    return ", ".join(dict.fromkeys(op.kind for op in ops if op.kind != "Identity")) or "Identity"


def host_op(op: tf.Operation, inputs: list[int], outputs: list[int]) -> HostOp:
    """An op of a graph, in the form that a piece runs."""
    return HostOp(op.type, user_line(op), _runner(op), inputs, outputs)


def _runner(op: tf.Operation) -> Callable[[list[Any], Kept, int], list[Any]]:
    if not host_ops.PythonFunction.is_of(op):
        run = host_ops.runner(op)
        return lambda inputs, kept, replica: run(inputs, kept.manager)
    function = host_ops.PythonFunction(op)
    if (forward := function.gradient_of) is not None:
        return lambda inputs, kept, replica: function.differentiate(_tape(kept, forward), inputs)

    def call(inputs: list[Any], kept: Kept, replica: int) -> list[Any]:
        results, taped = function(inputs, replica)
        if taped is not None and function.is_differentiated:
            kept.tapes.setdefault(function.token, []).append(taped)
        return results

    return call


def _tape(kept: Kept, token: str) -> Any:
    """The tape that the latest call of a Python function left. Its gradient may ask for it once, as in TensorFlow."""
    tapes = kept.tapes.get(token)
    if not tapes:
        raise RuntimeError("The gradient of a tf.py_function was asked for twice; write xla.outside_compilation.")
    return tapes.pop()
