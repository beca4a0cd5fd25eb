"""The first stage: a Python function becomes a graph that stands for all replicas at once.

A function is traced once, whatever the number of replicas. If it creates variables it is traced a second
time, as `tf.function` does: what is created once, lazily, exists by then, and a function that would create
new variables in each call is told so.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._compat import autograph, eager, xla_ops
from replica_engine.errors import (
    CaptureError,
    CoordinatorRow,
    HostAccessError,
    LoweringError,
    VariableCreationError,
    moved_to_host,
    slow_trace,
)
from replica_engine.replica.tracebacks import as_raised
from replica_engine.telemetry import timeline
from replica_engine.telemetry.stacks import stack_of
from replica_engine.telemetry.trace_file import Track
from replica_engine.telemetry.watchdog import Watch
from replica_engine.xla import argument_names, initial_values, soft_placement
from replica_engine.xla.arguments import Arguments, Shapes
from replica_engine.xla.body import Body, Collective
from replica_engine.xla.counts import count
from replica_engine.xla.host_call import HostCalls
from replica_engine.xla.lower import Lowered, lower
from replica_engine.xla.outputs import Outputs
from replica_engine.xla.soft_placement.piece import Source
from replica_engine.xla.source import Source as FunctionSource
from replica_engine.xla.user_lines import here, user_line

Enter = Callable[[], contextlib.AbstractContextManager[Any]]
"""What a strategy puts around the body while it is traced: its scope and a replica context."""

_numbers = itertools.count()
_logger = logging.getLogger("replica_engine")


class Traced:
    """A replica body as a graph.

    Attributes:
        name: the function's name.
        graph: the function graph. Its inputs are the slots of the arguments, captured tensors, and captured
            variables, in this order.
        body: the replicas it was traced for.
        key: of the arguments that it serves.
        slots: specs of the tensors among the arguments; dimensions may be unknown.
        tensors: captured tensors, eager or of an outer graph.
        captured: which of them are parameters of the program; the rest are compiled in.
        handles: handles of captured variables.
        outputs: specs of the tensors among the results.
        rebuild: the structure that the function returned, with other tensors.
        host_calls: its calls to the host.
        collectives: where its replicas meet.
        moves: whether ops of it run on the host by soft placement.
        host_slots: which arguments stay on the host; they are no parameters of the program.
        sparse_slots: which of them are components of sparse tensors, of which only host ops need the values.
    """

    def __init__(
        self,
        name: str,
        graph: Any,
        body: Body,
        arguments: Arguments,
        outputs: Outputs,
        host_calls: HostCalls,
        collectives: list[Collective],
        kept: list[Any],
    ):
        specs = [tf.TensorSpec(inside.shape, inside.dtype) for inside in graph.inputs[: len(arguments.slots)]]
        self.name = name
        self.graph = graph
        self.body = body
        self.key = arguments.key
        self.slots = specs
        self.slot_names = [slot.name for slot in arguments.slots]
        self.outputs = [tf.TensorSpec(output.shape, output.dtype) for output in graph.outputs]
        self.rebuild = outputs.rebuild
        self.host_calls = host_calls
        self.collectives = collectives
        self._kept = kept
        self.writer = arguments.summary_writer
        slots = list(zip(arguments.slots, graph.inputs, strict=False)) if body.moves_ops else []
        self.sparse_slots = frozenset(
            index
            for index, (slot, inside) in enumerate(slots)
            if slot.is_sparse and soft_placement.is_left_on_host(inside)
        )
        strings = [index for index, (slot, _) in enumerate(slots) if xla_ops.is_host_only(slot.dtype)]
        self.host_slots = self.sparse_slots.union(strings)
        self.moves = body.moves_ops and (bool(self.host_slots) or soft_placement.needs_host(graph))
        if self.moves:
            host_calls.can_fail = True
            graph.capture(host_calls.order)
        captures = list(graph.captures)
        self._on_host = [each for each in captures if self.moves and _stays_on_host(*each)]
        captures = [each for each in captures if not any(each is other for other in self._on_host)]
        data = [(outside, inside) for outside, inside in captures if inside.dtype != tf.resource]
        variables = [(outside, inside) for outside, inside in captures if inside.dtype == tf.resource]
        for outside, inside in captures:
            self._check_capture(outside, inside)
        for handle, where in host_calls.handles:
            if any(handle is outside for outside, _ in variables):
                raise HostAccessError.variable(str(xla_ops.variable_name(handle)), where)
        for index, output in enumerate(self.outputs):
            if xla_ops.is_host_only(output.dtype) and not self.moves:
                raise LoweringError.host_result(name, index, *_made_by(graph.outputs[index]))
        self.tensors = [outside for outside, _ in data]
        self.handles = [outside for outside, _ in variables]
        self.captured = list(range(len(self.tensors)))
        self._slots = list(graph.inputs[: len(self.slots)])
        self._tensors = [inside for _, inside in data]
        self._variables = [inside for _, inside in variables]
        self._registered: Any = None
        self._told = False
        self._also_moved: set[tf.Operation] = set()
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        """Whether a run leaves the variables as they were until it has ended well.

        It must if a host call may fail in it, and if somebody may stop waiting for it.
        """
        return self.host_calls.can_fail or self.body.limits.timeout is not None

    def lower(self, shapes: Sequence[Any] | None = None, captured: Sequence[Any] | None = None) -> Lowered:
        """The second stage: the body as a StableHLO program.

        Args:
            shapes: static shapes of the slots; None if those of the trace are static.
            captured: likewise, of the captured tensors.

        Raises:
            LoweringError: an op that XLA cannot compile, or a shape that is not static.
        """
        with self._lock, timeline.span(Track(self.body.name, "compile", order=-3), f"lower {self.name}", "compile"):
            return lower(self, _reshaped(self.slots, shapes), _reshaped(self.tensors, captured))

    def results(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """For each replica what it returned, of the replicas' values for each result."""
        tensors = [[_as_tensor(value) for value in column] for column in columns]
        return [self.rebuild([column[replica] for column in tensors]) for replica in range(self.body.size)]

    def registered(self) -> Any:
        """The graph as a function that TensorFlow knows by name."""
        if self._registered is None:
            self.graph.inputs[:] = [*self._slots, *(self._tensors[index] for index in self.captured), *self._variables]
            with tf.init_scope():
                self._registered = xla_ops.register(f"replica_body_{self.name}_{next(_numbers)}", self.graph)
        return self._registered

    def moved(self, slots: Sequence[tf.TensorSpec], tensors: Sequence[tf.TensorSpec]) -> soft_placement.MovedBody:
        """The graph with its host ops in host calls, for slots and captured tensors of these specs."""
        parameters = [
            (inside, spec)
            for index, (inside, spec) in enumerate(zip(self._slots, slots, strict=True))
            if index not in self.host_slots
        ]
        parameters += [(self._tensors[index], tensors[index]) for index in self.captured]
        on_host = [
            (
                self._slots[index],
                of_any_size(slots[index].shape) if index in self.sparse_slots else slots[index].shape,
                Source("argument", index),
            )
            for index in sorted(self.host_slots)
        ]
        on_host += [(inside, inside.shape, self._source(outside)) for outside, inside in self._on_host]
        inputs = soft_placement.Inputs(parameters, list(zip(self._variables, self.handles, strict=True)), on_host)
        moved = soft_placement.move(self.name, self.graph, self.host_calls, inputs, self._also_moved)
        if moved.pieces and not self._told:
            self._told = True
            _logger.info(moved_to_host(self.name, [piece.say() for piece in moved.pieces]))
        return moved

    def also_move(self, op: tf.Operation | None) -> bool:
        """Has an op run on the host that XLA cannot compile where it is; whether that is possible, and new."""
        if op is None or op in self._also_moved or not soft_placement.may_move(op):
            return False
        self._also_moved.add(op)
        return True

    def leave_no_sparse_on_host(self) -> bool:
        """The devices need what is sparse among the arguments; whether some of it was to stay on the host."""
        found = bool(self.sparse_slots)
        self.host_slots -= self.sparse_slots
        self.sparse_slots = frozenset()
        return found

    def _source(self, outside: Any) -> Source:
        if self.writer is not None and outside is self.writer:
            return Source("writer", None)
        return Source("fixed", outside)

    def bake_in(self) -> bool:
        """Compiles in small captured tensors, as shapes and axes must be; whether there were any."""
        kept = [index for index in self.captured if self._tensors[index].op.type != "Const"]
        baked = len(kept) < len(self.captured)
        self.captured, self._registered = kept, None
        return baked

    def _check_capture(self, outside: Any, inside: Any) -> None:
        if inside.dtype == tf.resource:
            described = xla_ops.variable_dtype_and_shape(outside)
            if described is None:
                raise CaptureError.not_a_variable(self.name, str(outside), _used_at(inside))
            if xla_ops.is_host_only(described[0]):
                name = xla_ops.variable_name(outside)
                raise CaptureError.host_only_variable(self.name, name, described[0].name, _used_at(inside))
            if not described[1].is_fully_defined():
                raise CaptureError.unknown_shape(self.name, str(described[1]), _used_at(inside))
        elif xla_ops.is_host_only(inside.dtype):
            raise CaptureError.host_only(self.name, inside.dtype.name, _used_at(inside))


def of_any_size(shape: Any) -> tf.TensorShape:
    """The shape of a component of a sparse tensor, whatever the number of its values."""
    return tf.TensorShape([None, *shape[1:]])


def _as_tensor(value: Any) -> tf.Tensor:
    return eager.tensor(value) if isinstance(value, np.ndarray) and value.dtype != object else tf.constant(value)


def _stays_on_host(outside: Any, inside: tf.Tensor) -> bool:
    """Whether something captured is for host ops alone: strings, tables, summary writers."""
    if tf.is_symbolic_tensor(outside) or callable(outside):
        return False
    if inside.dtype == tf.resource:
        return soft_placement.is_host_resource(outside) and not _is_iterator(outside)
    return xla_ops.is_host_only(inside.dtype)


def _is_iterator(handle: tf.Tensor) -> bool:
    return "Iterator" in str(handle)


def _made_by(output: tf.Tensor) -> tuple[str, str]:
    """The kind of op that made an output, and the user's line."""
    while output.op.type == "Identity":
        output = output.op.inputs[0]
    return output.op.type, user_line(output)


def _used_at(inside: tf.Tensor) -> str:
    return next((line for op in inside.consumers() if (line := user_line(op))), "")


def _reshaped(described: Sequence[Any], shapes: Sequence[Any] | None) -> list[tf.TensorSpec]:
    return [
        tf.TensorSpec(each.shape if shapes is None else shapes[index], each.dtype)
        for index, each in enumerate(described)
    ]


def trace(source: FunctionSource, arguments: Arguments, shapes: Shapes, body: Body, enter: Enter) -> Traced:
    """Traces a function.

    Args:
        source: the function.
        arguments: what it is called with.
        shapes: what to take for the shapes of the slots, as general as the trace is to be.
        body: the replicas to trace for.
        enter: what to put around the body.

    Raises:
        VariableCreationError: it creates new variables each time.
        CaptureError: it uses something from outside that cannot be on a device.
        Exception: whatever `fn` raised.
    """
    thread = threading.current_thread()

    def describe(seconds: float) -> str:
        row = CoordinatorRow(thread.name, "tracing", seconds, stack_of(thread.ident))
        return slow_trace(source.name, seconds, row)

    with (
        timeline.span(Track(body.name, "compile", order=-3), f"trace {source.name}", "compile"),
        Watch(describe, body.limits.warn_after),
    ):
        return _trace(source, arguments, shapes, body, enter)


def _trace(source: FunctionSource, arguments: Arguments, shapes: Shapes, body: Body, enter: Enter) -> Traced:
    for slot in arguments.slots:
        if xla_ops.is_host_only(slot.dtype) and not (body.moves_ops and slot.dtype == tf.string):
            raise LoweringError.host_only(source.name, slot.name, slot.dtype.name)
    traced, created = _trace_once(source, arguments, shapes, body, enter)
    if created:
        traced, again = _trace_once(source, arguments, shapes, body, enter)
        if again:
            named = [(variable.name.removesuffix(":0"), where) for variable, where in again]
            raise VariableCreationError.each_time(traced.name, named)
    return traced


def _trace_once(
    source: FunctionSource, arguments: Arguments, shapes: Shapes, body: Body, enter: Enter
) -> tuple[Traced, list[tuple[Any, str]]]:
    """One trace, and the variables that were created in it, with the user's lines."""
    count("traces")
    converted = autograph.convert_always(source.fn) if source.autograph else source.fn
    specs = [tf.TensorSpec(shape, slot.dtype) for shape, slot in zip(shapes, arguments.slots, strict=True)]
    created: list[tuple[Any, str]] = []
    outputs: list[Outputs] = []
    host_calls = HostCalls(body.size, body.order)
    collectives: list[Collective] = []

    def flat(*placeholders: tf.Tensor) -> list[tf.Tensor]:
        args, kwargs = arguments.rebuild(placeholders)
        names = [slot.name for slot in arguments.slots]
        with (
            body.entered(host_calls, collectives),
            argument_names.named(source.fn, placeholders, names),
            initial_values.of_one_trace(),
            enter(),
            _recorded(created),
            soft_placement.bound(arguments, placeholders),
        ):
            outputs.append(Outputs(converted(*args, **kwargs), source.returns_tensors))
        return outputs[-1].tensors

    try:
        # In a copy of the context: what the function sets in a context variable stays in the body.
        graph = contextvars.copy_context().run(xla_ops.trace, source.name, flat, specs)
    except Exception as error:
        failure = as_raised(error)
    else:
        for template in host_calls.templates:
            template.settle()
        kept = [source.fn, *(variable for variable, _ in created)]
        return Traced(source.name, graph, body, arguments, outputs[-1], host_calls, collectives, kept), created
    raise failure


@contextlib.contextmanager
def _recorded(created: list[tuple[Any, str]]) -> Iterator[None]:
    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = next_creator(**initial_values.outside(kwargs))
        created.append((variable, here()))
        return variable

    with tf.variable_creator_scope(creator):
        yield
