"""The first stage: a Python function becomes a graph that stands for all replicas at once.

A function is traced once, for any number of replicas. If it creates variables it is traced a second time, as
`tf.function` does. A variable that is created lazily, once, exists by then. A function that would create new variables
in each call raises an error.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replica_engine import errors
from replica_engine.diagnostics import flight_record, observer, tracebacks, user_frames
from replica_engine.errors import base, program_errors, run_errors, timeouts
from replica_engine.upstream import eager as variable_handles
from replica_engine.upstream.distribute import DistributedVariable
from replica_engine.upstream.graphs import autograph, graph_walk, xla_ops
from replica_engine.watch.watchdog import format_thread_stack
from replica_engine.xla.arguments import Arguments, Outputs, Shapes, named
from replica_engine.xla.body import Body
from replica_engine.xla.collectives import SharedSums
from replica_engine.xla.function_spec import FunctionSpec
from replica_engine.xla.host_calls.host_call import HostCalls
from replica_engine.xla.soft_placement import host_op_kinds
from replica_engine.xla.stages import body_graph, collective_meetings, lowered
from replica_engine.xla.stages.collective_meetings import Differences, Reason
from replica_engine.xla.state import device_value, host_variable

_logger = logging.getLogger("replica_engine")

Enter = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context manager that a strategy puts around the body while it is traced: its scope, a replica context."""


class Traced(body_graph.BodyGraph):
    """A replica body as a graph, the first of the stages that users can look at."""

    def lower(self, shapes: Sequence[Any] | None = None, captured: Sequence[Any] | None = None) -> lowered.Lowered:
        """The second stage: the body as a StableHLO program.

        Args:
            shapes: static shapes of the slots; None if those of the trace are static.
            captured: static shapes of the captured tensors; None if those of the trace are static.

        Raises:
            InputsError: there are more or fewer shapes than slots, or than captured tensors.
            LoweringError: the body has an op that XLA cannot compile, or a shape that is not static.
        """
        slots = self._reshaped("shapes", "slot", self.slots, shapes)
        tensors = self._reshaped("captured", "captured tensor", self.tensors, captured)
        with self._lock, self.body.compiling(f"lower {self.name}"):
            return lowered.lower(self, slots, tensors)

    def _reshaped(self, name: str, what: str, described: Sequence[Any], shapes: Any) -> list[tf.TensorSpec]:
        if shapes is None:
            return [tf.TensorSpec(each.shape, each.dtype) for each in described]
        given = len(shapes) if isinstance(shapes, (list, tuple)) else base.brief(shapes)
        if given != len(described):
            now = ", ".join(str(each.shape) for each in described) or "none"
            raise errors.InputsError(
                f"lower takes a list of shapes, one for each {what} of `{self.name}`: {len(described)}, which are "
                f"traced as {now}. Got {given}. Write {name}=None for these."
            )
        return [tf.TensorSpec(shape, each.dtype) for shape, each in zip(shapes, described, strict=True)]


def trace(source: FunctionSpec, arguments: Arguments, shapes: Shapes, body: Body, enter: Enter) -> Traced:
    """Traces a function.

    Args:
        source: the function.
        arguments: the arguments it is called with.
        shapes: the shapes to trace the slots for, as general as the trace should be.
        body: the replicas to trace for.
        enter: makes the context manager around the body.

    Raises:
        VariableCreationError: the function creates new variables each time.
        CaptureError: the function uses something from outside that cannot be on a device.
        Exception: the function raised it.
    """
    thread = threading.current_thread()

    def describe(seconds: float) -> str:
        row = errors.CoordinatorRow(thread.name, "tracing", seconds, format_thread_stack(thread.ident))
        return (
            f"`{source.name}` has been traced for {seconds:.3g} s:\n{timeouts.table([], row, stacks=True)}\n"
            "While a body is traced, all of its Python code runs, including both sides of a branch. Functions that run "
            "on the host are traced with it, unless they declare what they return (xla.returns)."
        )

    with body.compiling(f"trace {source.name}", describe):
        return _trace(source, arguments, shapes, body, enter)


def _trace(source: FunctionSpec, arguments: Arguments, shapes: Shapes, body: Body, enter: Enter) -> Traced:
    for slot in arguments.slots:
        if xla_ops.is_host_only(slot.dtype) and not (body.moves_ops and slot.dtype == tf.string):
            raise errors.LoweringError.host_only(source.name, slot.name, slot.dtype.name)
    traced, created = _trace_once(source, arguments, shapes, body, enter)
    if created:
        traced, again = _trace_once(source, arguments, shapes, body, enter)
        if again:
            names = ", ".join(f"{variable.name.removesuffix(':0')}{base.at(where)}" for variable, where in again)
            raise errors.VariableCreationError(
                f"`{traced.name}` creates variables ({names}) each time it runs, but it is traced once for all runs. "
                "Create them once: before the run, under `with strategy.scope():`, or in the first run only, and keep "
                "them in an attribute (`if self.w is None: self.w = tf.Variable(...)`)."
            )
    _check_meetings(traced, arguments)
    traced.late = [weakref.ref(variable) for variable, _ in created]
    return traced


def _trace_once(
    source: FunctionSpec, arguments: Arguments, shapes: Shapes, body: Body, enter: Enter
) -> tuple[Traced, list[tuple[Any, str]]]:
    """Traces once. Returns the trace, and the variables that were created in it with the user's lines."""
    body_graph.count("traces")
    converted = autograph.convert_always(source.fn) if source.autograph else source.fn
    specs = [tf.TensorSpec(shape, slot.dtype) for shape, slot in zip(shapes, arguments.slots, strict=True)]
    created: list[tuple[Any, str]] = []
    outputs: list[Outputs] = []
    host_calls = HostCalls(body.size, body.order)
    collectives: list[flight_record.CollectiveCall] = []
    sums = SharedSums()
    watched = None
    if observer.current is not None:
        watched = observer.current.begin(source.name, body.device_names)

    def flat(*placeholders: tf.Tensor) -> list[tf.Tensor]:
        args, kwargs = arguments.rebuild(placeholders)
        names = [slot.name for slot in arguments.slots]
        with (
            body.entered(host_calls, collectives),
            named(source.fn, placeholders, names),
            host_variable.run_stateful_ops_once(),
            enter(),
            _recorded(created),
            host_op_kinds.bound(arguments, placeholders),
            sums.noted(placeholders),
        ):
            results = converted(*args, **kwargs) if watched is None else watched.call(None, converted, args, kwargs)
            outputs.append(Outputs(results, source.returns_tensors))
        return outputs[-1].tensors

    try:
        # In a copy of the context: a context variable that the function sets is set only inside the body.
        with _additions_noted() as added:
            graph = contextvars.copy_context().run(xla_ops.trace, source.name, flat, specs)
    # The user's function may raise anything.
    except Exception as error:
        failure = _find_unknown_results_error(tracebacks.as_raised(error))
    else:
        for closure in host_calls.closures:
            closure.settle()
        return Traced(source, graph, body, arguments, outputs[-1], host_calls, collectives, added, sums), created
    # Not in the handler, where the error that TensorFlow has raised would become its context.
    raise failure


def _find_unknown_results_error(error: Exception) -> Exception:
    """The error of unknown results of a host function, if TensorFlow has put one of its own in its place.

    TensorFlow also takes its cause away where it shortens the traceback.
    """
    inner: BaseException | None = error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    while inner is not None and frames and user_frames.is_internal(frames[-1].f_code.co_filename):
        if isinstance(inner, errors.HostResultError):
            inner.__cause__ = inner.__cause__ or inner.failure
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def _check_meetings(traced: Traced, arguments: Arguments) -> None:
    """Looks for collectives that only some replicas reach.

    Raises:
        CollectiveError: not all replicas reach a collective.
    """
    graph = traced.graph
    own = [any(value is not slot.values[0] for value in slot.values) for slot in arguments.slots]

    def cause(index: int) -> Reason:
        if index < len(own):
            return Reason.OWN_DATA if own[index] else Reason.NONE
        outside = graph_walk.captured(graph.inputs[index])
        return Reason.OWN_DATA if device_value.differs_by_replica(outside) else Reason.NONE

    names = {each.where: each.kind for each in traced.collectives}
    traced.apart = collective_meetings.check(graph, traced.body.size, cause, names)
    if traced.body.mesh is not None and traced.body.size > 1:
        traced.diverges = collective_meetings.diverging(graph, cause)
    new = [row for row in traced.apart if row not in traced.body.told]
    if new:
        traced.body.told.update(new)
        _logger.warning(program_errors.may_wait_forever(traced.name, new))
    if traced.body.size > 1 and traced.body.of_strategy:
        _check_plain_variables(traced, cause)


def _check_plain_variables(traced: Traced, cause: Callable[[int], Reason]) -> None:
    """Warns that replicas write a variable made outside the scope: only one replica's write is kept.

    The user wants that if all replicas write the result of a collective. If their values may differ, or if they add
    something of their own, such as a number of samples, the writes of the others are lost.
    """
    plain = {}
    for variable in traced.graph.variables:
        # Not TensorFlow's `value_container`, which would ask for its handle. A function that was loaded in a scope has
        # the distributed variables themselves here.
        if host_variable.HostVariable.device_value(variable) is None and not isinstance(variable, DistributedVariable):
            plain[id(variable_handles.raw_handle(variable))] = variable
    indices = {
        index: plain[id(outside)]
        for index, each in enumerate(traced.graph.inputs)
        if each.dtype == tf.resource
        and id(outside := graph_walk.captured(each)) in plain
        and not device_value.differs_by_replica(outside)
    }
    if not indices:
        return
    differences = Differences(traced.graph, cause)
    for index, variable in indices.items():
        handle = id(variable_handles.raw_handle(variable))
        name, where = variable.name.removesuffix(":0"), traced.added.get(handle, "")
        differs = differences.variables[index] & (Reason.REPLICA_ID | Reason.OWN_DATA)
        # Each replica adds as much to the count of a seed. In a branch of its own, what a replica draws is lost: the
        # next step may draw the same numbers again, which `differs` says.
        adds = handle in traced.added and index in differences.added and "seed_generator" not in name
        if differs or adds:
            if not where and index in differences.writers:  # it is assigned, as by Keras, which adds so too
                where = user_frames.user_line(differences.writers[index])
            traced.body.shared.warn(variable, functools.partial(run_errors.warn_shared_variable, name, where))


@contextlib.contextmanager
def _additions_noted() -> Iterator[dict[int, str]]:
    """Notes, inside a block in which one trace stands for all replicas, to which variables the replicas add.

    Yields:
        By the id of a variable's handle, the user's line that adds to it first. Not that of a merge function, which
        adds once for all replicas.
    """
    added: dict[int, str] = {}

    def see(op: tf.Operation) -> None:
        if not tf.distribute.in_cross_replica_context():
            added.setdefault(id(graph_walk.outermost(op.inputs[0])), user_frames.here())

    with graph_walk.seen(dict.fromkeys(graph_walk.ADDING, see)):
        yield added


@contextlib.contextmanager
def _recorded(created: list[tuple[Any, str]]) -> Iterator[None]:
    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = next_creator(**host_variable.outside(kwargs))
        created.append((variable, user_frames.here()))
        return variable

    with tf.variable_creator_scope(creator):
        yield
