"""What a replica computes, as far as debug mode looks at it: what is finite, written, drawn and reduced.

In eager mode each op is noted as it runs (`EagerTrail`). Of a graph, the ops are looked at when it has been traced
(`GraphTrail`). The program then also computes which numbers are finite, and digests of others.
"""

from __future__ import annotations

import dis
import hashlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.user_frames import OURS, WRAPPERS, here, is_users, user_line
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import autograph, function_graphs, graph_walk
from replica_engine.values import structure

_NUMBERS = frozenset((tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128))
_GIVEN = frozenset(("Const", "Placeholder", "ReadVariableOp", "Identity", "IdentityN", "StopGradient"))
_COLLECTIVES = ("XlaAllReduce", "XlaReduceScatter", "Collective", "NcclAllReduce", "XlaCustomCall", "AddN")
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
_RANDOM = ("Random", "StatelessRandom", "TruncatedNormal", "StatelessTruncated", "Multinomial")
_MASKS = frozenset(("GreaterEqual", "Greater", "Less", "LessEqual"))  # what dropout makes of what it draws
_LINEAR = frozenset(("Mul", "RealDiv", "DivNoNan", "AddV2", "Sub", "Identity", "Cast", "Reshape", "Neg", "Pack"))
"""Ops after which a random number is still one, and a sum over replicas still that of all."""


class Op(NamedTuple):
    """An op that computes numbers.

    Attributes:
        kind: its type.
        where: the user's line.
        inputs, outputs: the numbers of its tensors in the trail.
    """

    kind: str
    where: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def crosses(self) -> bool:
        """Whether its result depends on what other replicas have."""
        return self.kind.startswith(_COLLECTIVES)


class Write(NamedTuple):
    """A write to a variable: its handle, and the user's line, which is "" for a read."""

    handle: Any
    where: str


class Reduction:
    """A reduction over all replicas.

    Attributes:
        kind: "SUM", "MEAN", "MIN" or "MAX".
        where: the user's line.
        again: the reduction whose result this one sums once more; None in the usual case.
        is_used: whether anything uses the result.
    """

    def __init__(self, kind: str, value: Any, result: Any):
        self.kind, self.where = kind, here()
        self.values, self.results = map(tensors_in, (value, result))
        self.again: Reduction | None = None
        self.is_used = not (tf.executing_eagerly() and _is_dropped())


class Trail:
    """The ops of one replica, in their order.

    Attributes:
        ops: those that compute numbers.
        writes: what it wrote to variables.
        drawn: of each random op from which a mask is made, its type, the user's line and a digest of what it drew.
        reductions: what it reduced.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.writes: list[Write] = []
        self.drawn: list[tuple[str, str, Any]] = []
        self.reductions: list[Reduction] = []

    def first_maker(self, is_finite: Sequence[bool], returned: Iterable[int]) -> Op | None:
        """The op that made the first number that is not finite out of finite ones, and that reaches the end.

        One that goes into an op whose result is finite was masked.

        Args:
            is_finite: for each tensor, whether it is finite.
            returned: the tensors that the replica returned.
        """
        makers: dict[int, Op | None] = {}
        used: set[int] = set()
        for op in self.ops:
            bad = [each for each in op.inputs if not is_finite[each]]
            used.update(bad)
            for each in op.outputs:
                if not is_finite[each]:
                    own = None if op.kind in _GIVEN else op
                    makers[each] = next((makers[one] for one in bad if makers.get(one)), None) if bad else own
        last = [*(each for each in makers if each not in used), *(each for each in returned if each in makers)]
        found = {id(makers[each]) for each in last if makers[each] is not None}
        return next((op for op in self.ops if id(op) in found), None)


class EagerTrail(Trail):
    """The ops of one replica in eager mode. Of tensors, only those that are not finite have numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._numbers: dict[int, int] = {}
        self._drawn: dict[int, tuple[str, str, Any]] = {}  # by the tensor that a random op drew, or one made of it
        self._reduced: dict[int, Reduction] = {}  # by a result, or by a tensor that is as equal on all replicas
        self._kept: list[tf.Tensor] = []  # so that no later tensor has the id of one of these

    def note(self, kind: str, inputs: Sequence[Any], _: Any, outputs: Sequence[Any], **of: Any) -> None:
        """Called after each op; with a `graph` where one is traced."""
        if of.get("graph") is not None:
            return
        bad = [self._numbers[id(each)] for each in inputs if id(each) in self._numbers]
        made = [self._number(each) for each in outputs if _is_number(each) and not _is_finite(each)]
        if made and not bad:  # what the step was given may not be finite
            bad = [self._number(each) for each in inputs if _is_number(each) and not _is_finite(each)]
        if made or bad:
            self.ops.append(Op(kind, "" if bad else here(), tuple(bad), tuple(made)))
        if kind == "ReadVariableOp" or (kind.startswith(_WRITES) and inputs):
            self.writes.append(Write(inputs[0], "" if kind == "ReadVariableOp" else here()))
        drawn = [self._drawn[id(each)] for each in inputs if id(each) in self._drawn]
        if kind.startswith(_RANDOM) and outputs and outputs[0].shape.num_elements() > 1:
            self._keep(self._drawn, outputs, (kind, here(), digest_of(outputs[0].numpy())))
        elif drawn and kind in _LINEAR:
            self._keep(self._drawn, outputs, drawn[0])
        elif drawn and kind in _MASKS:
            self.drawn.append(drawn[0])
        if self._reduced and kind in _LINEAR and not _divides(kind, inputs, self._size):
            known = [self._reduced.get(id(each)) for each in inputs if each.shape.rank]
            if known and all(known):
                self._keep(self._reduced, outputs, known[0])

    def reduced(self, reduction: Reduction) -> None:
        """Called after each reduction; in a nested function its tensors have no values."""
        if not tf.executing_eagerly():
            reduction.values = reduction.results = []
        found = [self._reduced[id(each)] for each in reduction.values if id(each) in self._reduced]
        reduction.again = found[0] if found and reduction.kind == "SUM" else None
        self._keep(self._reduced, [each for each in reduction.results if each.shape.rank], reduction)
        self.reductions.append(reduction)

    def maker(self, results: Iterable[Any]) -> Op | None:
        """See `first_maker`, for what the replica returned."""
        returned = [self._numbers[id(each)] for each in results if id(each) in self._numbers]
        return self.first_maker([False] * len(self._numbers), returned)

    def _keep(self, known: dict[int, Any], tensors: Sequence[tf.Tensor], what: Any) -> None:
        for each in tensors:
            known[id(each)] = what
            self._kept.append(each)

    def _number(self, tensor: tf.Tensor) -> int:
        self._kept.append(tensor)
        return self._numbers.setdefault(id(tensor), len(self._numbers))


class GraphTrail(Trail):
    """The ops of one replica in a graph that has been traced.

    Args:
        ops: its ops.
        results: the tensors that it returned.
        reductions: its reductions.
        size: the number of replicas.

    Attributes:
        finite: for each tensor, whether it is finite: tensors.
        returned: the numbers of the tensors that it returned.
    """

    def __init__(self, ops: Sequence[tf.Operation], results: Sequence[Any], reductions: list[Reduction], size: int):
        super().__init__()
        self.reductions = reductions
        self._note_reductions(results, size)
        self._note_drawn(ops)
        self.finite: list[tf.Tensor] = []
        numbers: dict[int, int] = {}

        def number(tensor: tf.Tensor) -> int:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(numbers)
                self.finite.append(_all_finite(tensor))
            return numbers[id(tensor)]

        for op in ops:
            inputs, outputs = (tuple(map(number, filter(_is_number, each))) for each in (op.inputs, op.outputs))
            if inputs or outputs:
                self.ops.append(Op(op.type, _line(op), inputs, outputs))
            if op.type == "ReadVariableOp" or (op.type.startswith(_WRITES) and op.inputs):
                where = "" if op.type == "ReadVariableOp" else _line(op)
                self.writes.append(Write(op.inputs[0], where))
        self.returned = [numbers[id(each)] for each in results if id(each) in numbers]

    def _note_reductions(self, results: Sequence[Any], size: int) -> None:
        returned, known = set(map(id, results)), dict[int, Reduction]()
        for each in self.reductions:
            if each.kind == "SUM":
                each.again = next(filter(None, (_behind(value, known, size) for value in each.values)), None)
            known |= {id(result): each for result in each.results if result.shape.rank != 0}
            each.is_used = not all(map(tf.is_symbolic_tensor, each.results)) or any(
                id(result) in returned or result.consumers() for result in each.results
            )

    def _note_drawn(self, ops: Sequence[tf.Operation]) -> None:
        for op in ops:
            for tensor in op.outputs:
                own = function_graphs.original(tensor)
                source = op if own is None else own.op  # it may have been replaced
                is_drawn = source.type.startswith(_RANDOM) and tensor.dtype in _NUMBERS and tensor.shape.rank != 0
                if is_drawn and any(use.type in _MASKS for use in _uses(tensor)):
                    self.drawn.append((source.type, _line(source), digest(tensor)))


def _line(op: tf.Operation) -> str:
    """The user's line that made an op; the name of the op if there is none, as for a layer of Keras in `fit`."""
    line = user_line(op)
    file, _, place = line.partition(":")
    if autograph.is_generated(file):  # of a merge function, which another thread has converted
        line = autograph.written_at(file, int(place.partition(" ")[0])) or line
    return line or op.name


def _behind(tensor: tf.Tensor, known: dict[int, Reduction], size: int) -> Reduction | None:
    """The reduction of which a tensor is made, and of nothing else but constants and single numbers."""
    if not known or id(tensor) in known:
        return known.get(id(tensor))
    if (
        not tf.is_symbolic_tensor(tensor)
        or tensor.op.type not in _LINEAR
        or _divides(tensor.op.type, tensor.op.inputs, size)
    ):
        return None
    found = [_behind(each, known, size) for each in tensor.op.inputs if each.shape.rank]
    return found[0] if found and all(found) else None


def _divides(kind: str, inputs: Sequence[Any], size: int) -> bool:
    """Whether an op divides by the number of replicas."""
    single = [tf.get_static_value(each) for each in inputs if each.shape.rank == 0 and _is_number(each)]
    divisor = 1 / size if kind == "Mul" else size
    return kind in ("Mul", "RealDiv", "DivNoNan") and any(
        each is not None and abs(each - divisor) < 1e-6 for each in single
    )


def _uses(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops that take a random tensor, also scaled and shifted."""

    def further(op: tf.Operation) -> list[tf.Operation]:
        return op.outputs[0].consumers() if op.type in _LINEAR else []

    return graph_walk.reached(tensor.consumers(), further)


def calling_frame(skipped: str) -> FrameType | None:
    """The frame that has called, if it is the user's; `skipped` is a folder whose frames may stand between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(skipped) or frame.f_code.co_name in WRAPPERS):
        frame = frame.f_back
    return frame if frame is not None and is_users(frame, (threading.get_ident(),)) else None


def _is_dropped() -> bool:
    """Whether the user's line that is running drops the result of its call."""
    frame = calling_frame(OURS)
    if frame is None:
        return False  # an optimizer reduces
    names = {each.offset: each.opname for each in dis.get_instructions(frame.f_code)}
    later = [offset for offset in sorted(names) if offset > frame.f_lasti]
    return bool(later) and names[later[0]] == "POP_TOP"


def _is_number(tensor: Any) -> bool:
    return getattr(tensor, "dtype", None) in _NUMBERS


def _is_finite(tensor: tf.Tensor) -> bool:
    return bool(np.isfinite(tensor.numpy()).all())


def _all_finite(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_complex:
        return _all_finite(tf.math.real(tensor)) & _all_finite(tf.math.imag(tensor))
    return tf.reduce_all(tf.math.is_finite(tensor))


def tensors_in(values: object) -> list[tf.Tensor]:
    """The tensors in a structure."""
    leaves, _ = structure.flatten(values, what="the values")  # dicts may have keys of several types
    flat = [each for leaf in leaves for each in tf.nest.flatten(leaf, expand_composites=True)]
    return [each for each in flat if isinstance(each, tf.Tensor)]


def digest_all(tensors: Sequence[tf.Tensor], graph: tf.Graph | None = None) -> Any:
    """A digest of several tensors: of their values in eager mode; in a graph, of those that are not in an inner one."""
    if graph is None:
        return hash(tuple(digest_of(each.numpy()) for each in tensors))
    return tf.add_n(
        [tf.constant(0, tf.int64), *(digest(each) for each in tensors if getattr(each, "graph", None) is graph)]
    )


def digest(tensor: tf.Tensor) -> tf.Tensor:
    """A number that is equal for equal bits, as a scalar int64 tensor; for texts and handles always 0."""
    if not (tensor.dtype in _NUMBERS or tensor.dtype.is_integer or tensor.dtype.is_bool):
        return tf.constant(0, tf.int64)
    if tensor.dtype.is_complex:
        return digest(tf.math.real(tensor)) + 3 * digest(tf.math.imag(tensor))
    if tensor.dtype.is_floating:
        tensor = tf.bitcast(tensor, {2: tf.int16, 4: tf.int32, 8: tf.int64}[tensor.dtype.size])
    bits = tf.reshape(tf.cast(tensor, tf.int64), [-1])
    places = tf.range(tf.size(bits, tf.int64))
    return tf.reduce_sum((bits + 0x9E3779B9) * (2 * places + 1))


def digest_of(array: np.ndarray) -> int:
    """A number that is equal for equal bits of an array."""
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()[:8], "little", signed=True)


class Used(NamedTuple):
    """A trainable variable with equal copies that a step uses.

    Attributes:
        variable: the variable.
        handle: the handle of a copy, as the step has it.
        where: the user's line that wrote it last; "" if none has.
    """

    variable: Any
    handle: Any
    where: str

    @property
    def name(self) -> str:
        """The name of the variable."""
        return str(self.variable.name.removesuffix(":0"))


def used_variables(writes: Sequence[Write]) -> list[Used]:
    """The trainable variables with equal copies that a step uses.

    Others may differ: the statistics of a batch normalization are those of each replica's shards.
    """
    found: dict[int, Used] = {}
    for handle, where in writes:
        variable = eager.find_container(graph_walk.outermost(handle))
        if variable is not None and eager.is_mirrored(variable) and variable.trainable:
            known = found.get(id(variable))
            found[id(variable)] = Used(variable, handle, where or (known.where if known else ""))
    return list(found.values())
