"""Gradients of joint operators: backward is a sync point too.

A replica's gradient is that of its own outputs with respect to its own inputs, as if the operator were its own. There
are two ways to it, as for each op in TensorFlow:

- A tape on the replica's thread. The replica tells its tape what the outputs depend on (`recorded`). When the tape is
  asked, all replicas meet, and the coordinator differentiates the operator once for all of them (`build_backward`).
- A gradient op that TensorFlow builds, for an operator inside another. Each replica visits the If, Case or While op;
  they meet there, and the coordinator calls TensorFlow's gradient of that op once (`build_operator`).

Both end in TensorFlow's gradient of an If or a While, which makes a graph for each branch or body and computes
gradients there. In the place of that computation each replica computes its own part on its own thread
(`by_replicas`), where all-reduces and custom gradients may merge. Nothing goes through what a merge function
computed, except an all-reduce and an all-gather, which have gradients of their own.

A tape outside the replicas sees all of them at once: it differentiates through the ops, as through any others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine._tf.graphs import control_flow
from replica_engine.errors import MergeCallGraphError, NotInReplicaError
from replica_engine.threads.joint.graphs import Notes, notes_of, owner_inside
from replica_engine.threads.joint.operator import Built, JointOperator, differentiable, flat_tensors, now_building


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """What it takes to differentiate a joint operator.

    Attributes:
        graph: the graph in which the operator stands.
        outputs: the outputs of each replica that can have a gradient.
        inputs: for each replica, the tensors on which its outputs can depend.
        shared: the handles of variables that several replicas use in the operator.
        tapes: in eager mode, the tapes that recorded the operator, one for each order of gradients.
        variables: in eager mode, the variables that the operator read.
    """

    graph: Any
    outputs: Sequence[Sequence[tf.Tensor]]
    inputs: Sequence[Sequence[tf.Tensor]]
    shared: Sequence[tf.Tensor] = ()
    tapes: Sequence[tf.GradientTape] = ()
    variables: Sequence[Any] = ()


class Asked(NamedTuple):
    """What a replica brings when its tape is asked: the operator, and the gradients of the replica's outputs."""

    backward: Backward
    upstream: list[Any]


class Visited(NamedTuple):
    """What a replica brings when a gradient visits the op: TensorFlow's gradient of it, the op, and its arguments."""

    gradient: Callable[..., list[Any]]
    op: tf.Operation
    upstream: Sequence[Any]


def recorded(context: Any, built: Built) -> Any:
    """Tells the tapes of a replica's thread what its part of an operator depends on; returns that part."""
    backward, index = built.backward, context.index
    if backward is None:
        return built.value
    outputs, inputs = backward.outputs[index], built.inputs
    if not outputs or not inputs:
        return built.value
    graph = thread_state.default_graph()
    if not backward.tapes and hasattr(graph, "capture"):
        inputs = [graph.capture(each) for each in inputs]  # tells tapes where the handles of variables come from
    for variable in backward.variables:
        if variable.device == context.device:
            control_flow.variable_accessed(variable)

    def asked(*upstream: Any) -> Any:
        if context.attempts is None:
            raise NotInReplicaError(
                "A gradient tape was asked for the gradient of an operator with merge calls after strategy.run had "
                "returned. All replicas compute it together, so ask the tape inside the function that strategy.run "
                "runs, and return the gradients."
            )
        for source in context.attempts.asked_for:
            if any(getattr(source, "handle", source) is handle for handle in backward.shared):
                name = getattr(source, "name", "a variable")
                raise MergeCallGraphError(
                    f"The gradient of the variable {name!r} for {context.replica} alone cannot be told, at "
                    f"{context.here()}: several replicas read this one variable in a tf.cond, tf.while_loop or "
                    "tf.function with merge calls, which has one gradient for it. Create the variable under `with "
                    "strategy.scope():`: then each replica has a component of its own."
                )
        return context.enter_operator("gradient", build_backward, Asked(backward, list(upstream)), of=backward)

    control_flow.record_operation("JointOperator", *context.in_order(outputs, inputs, asked))
    return built.value


def build_backward(operator: JointOperator) -> list[Built]:
    """Differentiates an operator once for all replicas, because their tapes were asked."""
    payloads: list[Asked] = operator.payloads
    backward = payloads[0].backward
    pairs = [
        (output, upstream)
        for payload, outputs in zip(payloads, backward.outputs, strict=True)
        for output, upstream in zip(outputs, payload.upstream, strict=True)
        if upstream is not None
    ]
    inputs = list({id(each): each for of in backward.inputs for each in of}.values())
    with operator.building():
        found = _gradients(backward, pairs, inputs)
    of_input = {id(each): gradient for each, gradient in zip(inputs, found, strict=True)}
    own = _own if not backward.tapes else lambda gradient: gradient  # an identity that no tape records ends the path
    results = [[own(of_input[id(each)]) for each in of] for of in backward.inputs]
    sources = [[*payload.upstream, *of] for payload, of in zip(payloads, backward.inputs, strict=True)]
    sources = [[each for each in of if isinstance(each, tf.Tensor)] for of in sources]
    if backward.tapes and not backward.tapes[1:]:
        return [Built(of) for of in results]
    again = Backward(operator.outer, [differentiable(of) for of in results], sources, tapes=backward.tapes[1:])
    return [Built(of, again, source) for of, source in zip(results, sources, strict=True)]


def _gradients(backward: Backward, pairs: Sequence[tuple], inputs: Sequence[tf.Tensor]) -> list[Any]:
    outputs, upstream = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if backward.tapes:
        with recording(backward.tapes[1:], upstream):
            return backward.tapes[0].gradient(outputs, inputs, output_gradients=upstream)
    inside = [backward.graph.capture(each) if hasattr(backward.graph, "capture") else each for each in inputs]
    return control_flow.gradients_of_ops(outputs, inside, upstream, stop_gradients=inside, src_graph=backward.graph)


@contextlib.contextmanager
def recording(tapes: Sequence[tf.GradientTape], sources: Any) -> Iterator[None]:
    """Inside the block, tapes record what is computed of some tensors, in addition to what they have recorded."""
    with contextlib.ExitStack() as stack:
        for tape in reversed(tapes):
            stack.enter_context(tape)
            tape.watch(sources)
        yield


def _own(gradient: Any) -> Any:
    """The gradient as a tensor of its own: two replicas may get the same one, for a variable that both read."""
    return tf.identity(gradient) if isinstance(gradient, tf.Tensor) else gradient


def build_operator(operator: JointOperator) -> list[Built]:
    """Calls TensorFlow's gradient of an If, Case or While op once for all replicas, which visit it."""
    payloads: list[Visited] = operator.payloads
    op = payloads[0].op
    upstream = []
    for position in range(len(payloads[0].upstream)):
        owner = owner_inside(op, "outputs", position)
        upstream.append(None if owner is None else payloads[owner].upstream[position])
    with operator.building():
        found = payloads[0].gradient(op, *upstream)
    first = 0 if "While" in op.type else 1  # the branches do not get the condition
    owners = [owner_inside(op, "inputs", position - first) or 0 for position in range(len(found))]
    return [
        Built([each if owner == replica else None for each, owner in zip(found, owners, strict=True)])
        for replica in range(len(operator.parts))
    ]


def by_replicas(original: Callable[..., list[Any]], ys: Any, xs: Any, *args: Any, **options: Any) -> list[Any]:
    """In the place of `original`, the gradients of ops: in a joint graph, each replica computes its own part."""
    operator, source = now_building(), options.get("src_graph")
    notes = notes_of(source)
    if operator is None or notes is None or args or options.get("grad_ys") is None:
        return original(ys, xs, *args, **options)
    missing = options.pop("unconnected_gradients", "none")
    upstream = options["grad_ys"]
    graph = thread_state.default_graph()
    own: list[list[tuple[Any, Any]]] = [[] for _ in operator.parts]
    for y, gradient in zip(ys, upstream, strict=True):
        owner = notes.owner(y)
        if owner is not None and gradient is not None:
            own[owner].append((y, gradient))
            if getattr(gradient, "graph", None) is graph:
                Notes.on(graph).give(owner, flat_tensors(gradient))

    def differentiated(pairs: list[tuple[Any, Any]]) -> list[Any]:
        if not pairs:
            return [None] * len(xs)
        outputs, of = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return control_flow.gradients_of_ops(outputs, xs, of, stop_gradients=notes.constants, src_graph=source)

    found = operator.trace([functools.partial(differentiated, pairs) for pairs in own], aliases=False)
    sums = [_sum([each for each in of if each is not None]) for of in zip(*found, strict=True)]
    unconnected = [x for x, each in zip(xs, sums, strict=True) if each is None]
    if missing in ("none", None) or not unconnected:
        return sums
    zeros = iter(original([], unconnected, grad_ys=[], src_graph=source, unconnected_gradients=missing))
    return [next(zeros) if each is None else each for each in sums]


def _sum(gradients: list[Any]) -> Any:
    """The sum of the gradients of one tensor by several replicas: only a variable that all read has several."""
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    return tf.add_n([tf.convert_to_tensor(each) for each in gradients])
