"""A piece of a body that runs on the host in one call: its ops and its values.

A piece is a list of ops. Each op has the numbers of the registers that it takes its inputs from and puts its outputs
into. The registers are filled from six kinds of `Source`. Values that a device can have come and go through the
program. Other values (strings, tables, tensors whose shape depends on data) stay on the host: a piece that makes such a
value stores it under a number, once for each replica, and later pieces of the same launch find it there.

While the graph of a body is copied, `Value` stands for each of its tensors, `Shapes` finds the shapes of what host ops
make, and `Pending` gathers the host ops for one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.diagnostics.user_frames import user_line
from replica_engine.errors import HostResultError, base
from replica_engine.upstream import thread_state
from replica_engine.upstream.graphs import graph_walk, host_kernels, xla_ops
from replica_engine.xla.corrected_ops import bounds
from replica_engine.xla.host_calls.host_call import HostCall, HostCalls
from replica_engine.xla.host_calls.session import Kept, Session
from replica_engine.xla.soft_placement import host_op_kinds


@dataclasses.dataclass(eq=False, repr=False, slots=True)  # its own would be of all that it is made of
class Value:
    """The counterpart, in the copy, of a tensor of the original graph.

    Attributes:
        dtype: its dtype.
        shape: its shape, as far as it is known.
        tensor: the tensor in the copy; None if the devices do not have it.
        source: where a host call finds it; None if the program must pass it.
        maker: the op of the original graph that makes it; None for an input.
        inputs: the inputs of that op.
        outputs: all its outputs.
        from_host: whether a host op made it, or made a value that it depends on. XLA cannot know such a value.
        by_data: whether the devices have it, in a shape that depends on data.
    """

    dtype: tf.DType
    shape: tf.TensorShape
    tensor: tf.Tensor | None = None
    source: Source | None = None
    maker: tf.Operation | None = None
    inputs: Sequence[Value] = ()
    outputs: Sequence[Value] = ()
    from_host: bool = False
    by_data: bool = False

    @classmethod
    def from_tensor(cls, tensor: tf.Tensor, maker: tf.Operation | None = None) -> Value:
        """The counterpart of a tensor that the devices have."""
        return cls(tensor.dtype, tensor.shape, tensor, maker=maker)

    @property
    def is_constant(self) -> bool:
        """Whether a Const op makes it, which is copied where it is used."""
        return self.maker is not None and self.maker.type == "Const"

    @property
    def fits_device(self) -> bool:
        """Whether a host call could return it to the program."""
        return not xla_ops.is_host_only(self.dtype) and self.shape.is_fully_defined()

    @property
    def stays_on_host(self) -> bool:
        """Whether no op on the devices can use it."""
        if self.tensor is not None:
            return False
        return xla_ops.is_host_only(self.dtype) if self.is_constant else not self.fits_device


class Shapes:
    """Finds the shapes of results of host ops.

    XLA must know the shape of each value that the devices use. The shape of a host op's result follows from three
    rules:

    - TensorFlow infers it from the shapes of the inputs, and from the constants among them.
    - The body declares it: `y.set_shape(...)` or `tf.ensure_shape(y, ...)`. Python functions, which have an unknown
      shape otherwise, are never called to find it out: they may take items from a queue, or write a file.
    - Ragged rows of words have as many rows as there are texts: so `ragged.to_tensor(shape=[None, 6])` has a known
      shape.

    Any other result stays on the host. What a host op returns is compared with the shape when it has run.
    """

    def __init__(self) -> None:
        self._scratch = tf.Graph()  # in which ops are made only to ask for their shapes
        self._python_inputs: dict[str, list[tf.TensorShape]] = {}  # of Python functions, by token

    def inferred(self, op: tf.Operation, inputs: Sequence[Value]) -> list[tf.TensorShape]:
        """What TensorFlow infers for these inputs, whatever the original graph says."""
        with self._scratch.as_default():
            stand_ins = [
                tf.compat.v1.placeholder(value.dtype, value.shape) if known is None else tf.constant(known, value.dtype)
                for value, known in zip(inputs, map(_known, inputs), strict=True)
            ]
            return [output.shape for output in graph_walk.apply_op(op, stand_ins).outputs]

    def infer_results(
        self, op: tf.Operation, inputs: Sequence[Value], values: dict[int, Value]
    ) -> list[tf.TensorShape]:
        """The shapes of the results of a host op, as far as the three rules tell.

        Args:
            op: the op.
            inputs: its inputs.
            values: the values of its graph, by the id of the tensor.
        """
        shapes = [_merged(*each) for each in zip(map(_declared, op.outputs), self.inferred(op, inputs), strict=True)]
        if op.type in graph_walk.PYTHON:
            function = host_kernels.PythonFunction(op)
            if function.forward_token is None:
                self._python_inputs[function.token] = [value.shape for value in inputs]
            else:
                shapes = list(map(_merged, shapes, self._python_inputs.get(function.forward_token, shapes)))
        elif (rows := _rows(op, inputs, values)) is not None:
            shapes[0] = _merged(shapes[0], tf.TensorShape([rows]).concatenate(shapes[0][1:]))
        return shapes


def _known(value: Value) -> Any:
    """The value itself, if it is a constant or a number that XLA computes from shapes; otherwise None."""
    if value.maker is not None and value.is_constant:
        return tf.make_ndarray(value.maker.get_attr("value"))
    is_number = value.tensor is not None and value.dtype.is_integer and value.shape.rank in (0, 1)
    return tf.get_static_value(value.tensor) if is_number else None


def _merged(shape: tf.TensorShape, other: tf.TensorShape) -> tf.TensorShape:
    return shape.merge_with(other) if shape.is_compatible_with(other) else shape


def _declared(output: tf.Tensor) -> tf.TensorShape:
    """The shape of a result that the body declares."""
    if any(op.type in graph_walk.BRANCHES and op.inputs[0] is output for op in output.consumers()):
        return tf.TensorShape([])
    ensured = (op.outputs[0].shape for op in output.consumers() if op.type == "EnsureShape")
    return next((shape for shape in (output.shape, *ensured) if shape.is_fully_defined()), output.shape)


def _rows(op: tf.Operation, inputs: Sequence[Value], values: dict[int, Value]) -> int | None:
    """The first dimension of the result of an op on ragged rows, from how many texts were split."""

    def known(number: tf.Tensor) -> Any:
        made = number.op
        if made.type == "StridedSlice" and made.inputs[0].op.type == "StringSplitV2":
            split = made.inputs[0].op
            if made.inputs[0] is split.outputs[2] and tf.get_static_value(made.inputs[1]) == [0]:
                return tf.compat.dimension_value(values[id(split.inputs[0])].shape[0])
        return tf.get_static_value(number)

    if op.type in ("Bincount", "DenseBincount") and inputs[0].shape.rank == 1:
        least, most = bounds(op.inputs[1], known)
        return least if least == most else None
    if op.type != "RaggedTensorToTensor":
        return None
    if op.get_attr("row_partition_types")[0] == b"FIRST_DIM_SIZE":
        return bounds(op.inputs[3], known)[0]
    splits = inputs[3].shape.num_elements()
    return None if splits is None else splits - 1


class Pending:
    """The ops that wait in one graph of the copy, to be emitted all in one call.

    The copy of a graph is made in the order of the program. A host op is not emitted when its turn comes: it waits
    here, and the next host op joins it, whatever ops of the devices lie between. All ops that wait are emitted, as one
    call, when an op on the devices needs a result of one of them; before a branch, a loop or a host call of the user;
    and at the end of the graph. So a call never waits for an op that waits for that call, effects keep the order of the
    program, and a replica makes no more calls than it must.

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
                    # A constant is part of the call, and the program need not pass it.
                    value.source = Source("fixed", host_kernels.read_constant(value.maker))
                if value.source is None:
                    assert value.tensor is not None, "emitted before"
                    operands.append(value.tensor)
                sources[registers[value]] = value.source or Source("operand", len(operands) - 1)
            return registers[value]

        # Which ops of this call take a value: what only they take never leaves the host.
        users: dict[Value, list[tf.Operation]] = {}
        for op, inputs, outputs in waiting:
            for value in inputs:
                users.setdefault(value, []).append(op)
            before = list(map(taken, inputs))
            after = [registers.setdefault(value, len(registers)) for value in outputs]
            ops.append(HostOp(op.type, user_line(op), _runner(op), before, after))
        results: list[Value] = []
        stores = [(number, taken(value)) for value, number in kept]
        for op, _, outputs in waiting:
            for value, tensor in zip(outputs, op.outputs, strict=True):
                # Those of the original graph: the copies of later ops do not exist yet.
                others = [each for each in tensor.consumers() if each not in users.get(value, ())]
                returned = any(tensor is output for output in tensor.graph.outputs)
                if value.fits_device and (returned or not all(map(host_op_kinds.stays_for_host, others))):
                    results.append(value)
                elif returned or others:
                    # No device can have it, or only other host calls take it: they find it on the host.
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
        results: the registers of the values that the program gets back, and their specs.
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
        """The piece as text, for messages."""
        return f"{in_words(self.ops)}{base.at(self.where)}, which soft placement runs on the host"

    def say(self) -> tuple[str, str, bool]:
        """The piece for the line that is logged once for a body: ops, the user's line, whether it is in a loop."""
        return in_words(self.ops), self.where, self.in_loop

    def compute(self, kept: Kept, position: int, token: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the ops."""
        run = self.calls.run
        assert run is not None, "set before the launch"
        replica = position % run.size
        values = {each: _value(*source, run, kept, replica, tensors) for each, source in self._sources.items()}
        # TensorFlow would choose a GPU that it sees, but the program has that.
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
        made_by = next((f"{op.kind}{base.at(op.where)}" for op in self.ops if register in op.outputs), "A host op")
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


def _runner(op: tf.Operation) -> Callable[[list[Any], Kept, int], list[Any]]:
    if op.type not in graph_walk.PYTHON:
        run = host_kernels.runner(op)
        # The manager ends an op that waits, for a queue for example, once the run has failed.
        return lambda inputs, kept, replica: run(inputs, kept.manager)
    function = host_kernels.PythonFunction(op)
    if (forward := function.forward_token) is not None:
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
