"""A body with its host ops moved, and the description of its host calls for the user."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import thread_state, variables
from replica_engine._tf.graphs import xla_ops
from replica_engine.xla.host_calls.call import HostCall, HostCalls
from replica_engine.xla.soft_placement.piece import Piece, Source
from replica_engine.xla.soft_placement.rewrite import Rewriter
from replica_engine.xla.soft_placement.values import Value

_numbers = itertools.count()


class HostCallInfo(NamedTuple):
    """A host call of a program, in `Lowered.host_calls`.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine import xla
        >>> (call,) = xla.lower(lambda x: tf.print(x), [[1.0], [2.0]]).host_calls
        >>> [op for op, line in call.ops]
        ['StringFormat', 'PrintV2']
        >>> call.moved, call.in_loop
        (True, False)

    Attributes:
        name: the name of its cluster: "0", "1", ...; a gradient of cluster "0" has the name "0.0".
        ops: the ops that run on the host, each as its type and the user's line; empty for a function of the user.
        where: the user's line.
        moved: whether soft placement moved ops there; False for `outside_compilation`.
        in_loop: whether it is in a loop of the body, and happens in each iteration. Known only for moved ops.
        results: specs of the results that the program gets back.
    """

    name: str
    ops: tuple[tuple[str, str], ...]
    where: str
    moved: bool
    in_loop: bool
    results: tuple[tf.TensorSpec, ...]

    @classmethod
    def of(cls, call: HostCall) -> HostCallInfo:
        """The description of a call."""
        results = tuple(call.results)
        if isinstance(call, Piece):
            ops = tuple((op.kind, op.where) for op in call.ops)
            return cls(call.name, ops, call.where, True, call.in_loop, results)
        return cls(call.name, (), call.where, False, False, results)


class MovedBody(NamedTuple):
    """A body whose host ops are in host calls.

    Attributes:
        registered: its graph, as a function that TensorFlow can find by name.
        pieces: the host calls.
        host_results: the results that stay on the host: the number under which each is stored, by its index.
        originals: the original op of each copied op, by the name of the copy.
    """

    registered: Any
    pieces: list[Piece]
    host_results: dict[int, int]
    originals: dict[str, tf.Operation]


class Inputs(NamedTuple):
    """The inputs of the graph of a body, and their counterparts in the copy.

    Attributes:
        specs: for each slot and captured tensor that is a parameter, the tensor of the graph and its spec.
        variables: for each variable, the tensor of the graph that is its handle, and the handle itself.
        on_host: for each tensor of the graph that no device can have, its shape and where the host has it.
    """

    specs: list[tuple[tf.Tensor, tf.TensorSpec]]
    variables: list[tuple[tf.Tensor, Any]]
    on_host: list[tuple[tf.Tensor, tf.TensorShape, Source]]


def move(name: str, graph: Any, calls: HostCalls, inputs: Inputs) -> MovedBody:
    """Moves the host ops of a body.

    Args:
        name: the name of the body.
        graph: its graph.
        calls: its host calls; the pieces are added to them.
        inputs: the inputs of the graph.

    Raises:
        LoweringError: the devices need a value that cannot leave the host, the host needs one that cannot leave the
            devices, or a branch or a loop of the user works with strings.
    """
    rewriter = Rewriter(name, calls, graph)
    begin = len(calls.calls)
    host_results: dict[int, int] = {}

    def build(*placeholders: tf.Tensor) -> list[tf.Tensor]:
        values: dict[int, Value] = {}
        for (inside, _), placeholder in zip(inputs.specs, placeholders, strict=True):
            values[id(inside)] = Value.of(placeholder)
        for inside, handle in inputs.variables:
            variables.graph().capture(handle)
            # The handle itself, which each graph captures: ops on a variable keep their order if all use one tensor.
            value = values[id(inside)] = Value.of(handle)
            if handle is calls.order:
                rewriter.order = value
        for inside, shape, source in inputs.on_host:
            values[id(inside)] = Value(inside.dtype, shape, source=source)
        with xla_ops.xla_context():
            results, stored = rewriter.copy(values)
        host_results.update(stored)
        return results

    with thread_state.unobserved():
        copy = xla_ops.trace(name, build, [spec for _, spec in inputs.specs])
    handles = [copy.capture(handle) for _, handle in inputs.variables]
    copy.inputs[:] = [*copy.inputs[: len(inputs.specs)], *handles]
    with tf.init_scope():
        registered = xla_ops.register(f"replica_body_{name}_on_host_{next(_numbers)}", copy)
    pieces = [call for call in calls.calls[begin:] if isinstance(call, Piece)]
    return MovedBody(registered, pieces, host_results, rewriter.originals)
