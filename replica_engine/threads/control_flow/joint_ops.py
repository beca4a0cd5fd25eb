"""If, Case, While and nested functions of all replicas, and their gradients.

TensorFlow builds an If, Case or While op and calls the branches, the condition and the body once each; the coordinator
answers each call with what all replicas traced, as a list with one entry for each replica.

A nested `tf.function` with merge calls is inlined in a graph: its Python function is called in the graph where the
replica stands, with its input signature and AutoGraph as the `tf.function` has them. In eager mode, one `tf.function`
with the same options goes around all replicas; it is remembered, so that later calls run its graph and no Python.

Backward is a sync point too. A replica's gradient is that of its own outputs with respect to its own inputs, as if the
operator were its own. There are two ways to it, as for each op in TensorFlow:

- A tape on the replica's thread. The replica tells its tape what the outputs depend on (`recorded`). When the tape is
  asked, all replicas meet, and the coordinator differentiates the operator once for all of them (`build_backward`).
- A gradient op that TensorFlow builds, for an operator inside another. Each replica visits the If, Case or While op;
  they meet there, and the coordinator calls TensorFlow's gradient of that op once (`build_operator`).

Both end in TensorFlow's gradient of an If or a While, which makes a graph for each branch or body and computes
gradients there. In the place of that computation each replica computes its own part on its own thread (`by_replicas`),
where all-reduces and custom gradients may merge. Nothing goes through what a merge function computed, except an
all-reduce and an all-gather, which have gradients of their own.

A tape outside the replicas sees all of them at once: it differentiates through the ops, as through any others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.errors import MergeCallGraphError, NotInReplicaError, ReplicaMismatchError
from replica_engine.process import interrupts
from replica_engine.threads.control_flow import joint_operator as joint
from replica_engine.threads.control_flow.joint_operator import Built, JointOperator, Notes
from replica_engine.threads.inherited_state import find_function_record
from replica_engine.upstream import distribute, thread_state
from replica_engine.upstream.graphs import autograph, function_calls, function_graphs, operators
from replica_engine.values.regroup import parts as replica_parts
from replica_engine.values.regroup import regroup


# Nested functions.
class FunctionCall(NamedTuple):
    """What a replica brings: a `tf.function`, and its arguments."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]


def inlined(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls the Python function of a `tf.function` in the current graph; returns tensors, as a `tf.function` does."""
    own_args, own_kwargs = function_calls.bound_arguments(fn, args, kwargs)
    return tf.nest.map_structure(_as_result, _plain(fn)(*own_args, **own_kwargs))


def own_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments as tensors that only this replica has, so that each replica has a gradient of its own for them."""

    def own(leaf: Any) -> Any:
        return tf.identity(leaf) if isinstance(leaf, tf.Tensor) and joint.is_differentiable(leaf) else leaf

    return tf.nest.map_structure(own, (args, kwargs))


def build_call(operator: JointOperator) -> list[Built]:
    """Calls a `tf.function` that goes around all replicas, in eager mode."""
    payloads: list[FunctionCall] = operator.payloads
    parts = operator.parts
    strategy, size = parts[0].context.strategy, len(parts)
    known = find_function_record(payloads[0].function).joint
    fns = [each.function for each in payloads]
    around, of = known.get(strategy, (None, ()))
    if [reference() for reference in of] != fns:
        around = function_graphs.clone_for_any(fns[0], _around(size))
        known[strategy] = around, [weakref.ref(fn) for fn in fns]
    what = f"The arguments of the tf.function ({operator.where})"
    args = regroup([each.args for each in payloads], what, "args")
    kwargs = regroup([each.kwargs for each in payloads], what, "kwargs")
    depth = max(len(part.context.attempts.recording_tapes()) for part in parts)
    is_taped = any(part.taped for part in parts)
    if is_taped and not depth:
        raise MergeCallGraphError(
            "A tf.autodiff.ForwardAccumulator is around a nested tf.function with merge calls, at "
            f"{operator.where}. Such a function runs once for all replicas, and has no forward-mode derivative for "
            "each. Call its Python function, f.python_function(x), or use tf.GradientTape."
        )
    with interrupts.set_for_block(_calling, "operator", operator):
        if not is_taped:
            return [Built(value) for value in replica_parts(around(*args, **kwargs), size, "result")]
        notes = joint.find_notes(around.get_concrete_function(*args, **kwargs).graph) or Notes()
        used = [joint.differentiable([each.args, each.kwargs]) for each in payloads]
        captured = [list(of) for of in used]
        for replica, tensor, alias in notes.closures:
            if joint.is_differentiable(tensor):
                used[replica].append(tensor)
                captured[replica].append(alias)
        # One tape for each order of gradients that the replicas' own tapes can be asked for.
        tapes = [tf.GradientTape(persistent=True) for _ in range(depth)]
        with operator.building(), recording(tapes, captured):
            values = replica_parts(around(*args, **kwargs), size, "result")
    variables = tapes[0].watched_variables()
    for replica, handle in notes.resources:
        if any(variable.handle is handle for variable in variables):
            used[replica].append(handle)
            captured[replica].append(handle)
    outputs = [joint.differentiable(value) for value in values]
    backward = Backward(None, outputs, captured, notes.shared, tapes, variables)
    return [Built(value, backward, of) for value, of in zip(values, used, strict=True)]


_calling = threading.local()


def _around(size: int) -> Callable[..., Any]:
    @autograph.artifact
    def on_all_replicas(*args: Any, **kwargs: Any) -> Any:
        """Traces each replica's function in one graph."""
        operator: JointOperator = _calling.operator
        own = list(zip(replica_parts(args, size, "args"), replica_parts(kwargs, size, "kwargs"), strict=True))
        graph = thread_state.default_graph()
        calls = [
            functools.partial(_plain(payload.function), *each_args, **each_kwargs)
            for payload, (each_args, each_kwargs) in zip(operator.payloads, own, strict=True)
        ]
        results = operator.trace(calls, own, creators=thread_state.variable_creators(graph))
        Notes.on(graph).shared = list(operator.captures.shared)
        return regroup(results)

    return on_all_replicas


def _plain(fn: Any) -> Callable[..., Any]:
    converts, _, _ = function_graphs.options(fn)
    return autograph.convert_always(fn.python_function) if converts else fn.python_function


def _as_result(value: Any) -> Any:
    is_result = value is None or (tf.is_tensor(value) and not isinstance(value, tf.Variable))
    return value if is_result else tf.convert_to_tensor(value)


# If, Case and While ops.
class Branches(NamedTuple):
    """What a replica brings to tf.cond and tf.switch_case.

    Attributes:
        selector: the condition, or the index of the branch.
        functions: the branches.
        make: TensorFlow's function that makes the op; takes the selector and the branches.
    """

    selector: Any
    functions: Sequence[Callable[[], Any]]
    make: Callable[..., Any]


class Loop(NamedTuple):
    """What a replica brings to tf.while_loop.

    Attributes:
        condition: whether to go on; takes the loop variables.
        body: the next loop variables.
        variables: the loop variables.
        options: the other arguments of `make`.
        make: TensorFlow's function that makes the op.
    """

    condition: Callable[..., Any]
    body: Callable[..., Any]
    variables: Sequence[Any]
    options: dict[str, Any]
    make: Callable[..., Any]


def build_branches(operator: JointOperator) -> list[Built]:
    """Builds one If or Case op."""
    payloads: list[Branches] = operator.payloads
    first = payloads[0]
    operator.check_equal([f"{len(each.functions)} branches" for each in payloads], "branch_fns")
    selector = _agreed(operator, [each.selector for each in payloads], operator.kind)

    def branch(number: int) -> Callable[[], list[Any]]:
        return lambda: operator.trace([each.functions[number] for each in payloads])

    return _built(operator, first.make(selector, [branch(number) for number in range(len(first.functions))]))


def build_loop(operator: JointOperator) -> list[Built]:
    """Builds one While op. Its loop variables are a list with the loop variables of each replica."""
    payloads: list[Loop] = operator.payloads
    first = payloads[0]
    options = first.options | {"return_same_structure": True}
    most = [each.options.get("maximum_iterations") for each in payloads]
    operator.check_equal(["None" if each is None else "a number" for each in most], "maximum_iterations")
    if most[0] is not None:
        options["maximum_iterations"] = _agreed(operator, most, "maximum_iterations")
    if options.get("shape_invariants") is not None:
        options["shape_invariants"] = [each.options["shape_invariants"] for each in payloads]
    variables = [each.variables for each in payloads]

    def condition(*own: Any) -> Any:
        calls = [functools.partial(payload.condition, *each) for payload, each in zip(payloads, own, strict=True)]
        return _agreed(operator, operator.trace(calls, own), operator.kind)

    def body(*own: Any) -> list[Any]:
        calls = [functools.partial(payload.body, *each) for payload, each in zip(payloads, own, strict=True)]
        outs = operator.trace(calls, own)
        return [out if tf.nest.is_nested(out) else [out] for out in outs]

    outs = first.make(condition, body, variables, **options)
    return _built(operator, outs, [joint.flat_tensors(each) for each in variables])


def build_trial(operator: JointOperator) -> list[Built]:
    """AutoGraph's trial of a loop's body, in a graph that is thrown away."""
    with tf.__internal__.FuncGraph("trial").as_default():
        operator.trace(operator.payloads)
    return [Built(None)] * len(operator.parts)


def _built(
    operator: JointOperator, outs: Sequence[Any], more: Sequence[Sequence[tf.Tensor]] | None = None
) -> list[Built]:
    """The results of all replicas, after the op was made."""
    inputs = operator.inputs(more)
    backward = Backward(operator.outer, [joint.differentiable(out) for out in outs], inputs, operator.captures.shared)
    return [Built(out, backward, of) for out, of in zip(outs, inputs, strict=True)]


def _agreed(operator: JointOperator, values: Sequence[Any], what: str) -> Any:
    """Returns one value for all replicas: replica 0's, after a check that the others are equal.

    Equal by construction, such as one tensor or equal constants, costs nothing. Otherwise an op compares the values
    when the graph runs.

    Args:
        operator: the operator.
        values: the condition, branch index or number of iterations of each replica.
        what: the operator or the argument, such as "tf.cond".

    Raises:
        ReplicaMismatchError: constants that differ. Values that differ when the graph runs raise
            tf.errors.InvalidArgumentError with the same text.
    """
    if all(value is values[0] for value in values):
        return values[0]
    tensors = [tf.convert_to_tensor(value) for value in values]
    static = [tf.get_static_value(tensor) for tensor in tensors]
    if any(value is None for value in static):
        return _compared(operator, tensors, what)
    if any(value != static[0] for value in static):
        rows = list(zip(map(str, operator.run.replicas), map(str, static), strict=True))
        raise ReplicaMismatchError.other_conditions(what, operator.where, rows)
    return tensors[0]


def _compared(operator: JointOperator, tensors: Sequence[tf.Tensor], what: str) -> tf.Tensor:
    """Replica 0's value. When the graph runs, it waits for ops that compare the values."""
    rows = [(str(replica), "") for replica in operator.run.replicas]
    head, *lines, tail = str(ReplicaMismatchError.other_conditions(what, operator.where, rows)).split("\n")
    with tf.device("CPU:0"):
        scalars = [tf.reshape(tensor, []) for tensor in tensors]
        data: list[Any] = [head]
        for line, scalar in zip(lines, scalars, strict=True):
            data += [line, scalar]
        alike = tf.reduce_all(tf.equal(tf.stack(scalars[1:]), scalars[0]))
        # raw_ops: tf.debugging.Assert makes a branch for the message, which costs more than the check.
        texts = [tf.convert_to_tensor(each) for each in [*data, tail]]
        check = tf.raw_ops.Assert(condition=alike, data=texts, summarize=1)
        with tf.control_dependencies([check]):
            return tf.identity(scalars[0])


# Gradients.
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
            operators.variable_accessed(variable)

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

    operators.record_operation("JointOperator", *context.in_order(outputs, inputs, asked))
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
    again = Backward(operator.outer, [joint.differentiable(of) for of in results], sources, tapes=backward.tapes[1:])
    return [Built(of, again, source) for of, source in zip(results, sources, strict=True)]


def _gradients(backward: Backward, pairs: Sequence[tuple], inputs: Sequence[tf.Tensor]) -> list[Any]:
    outputs, upstream = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if backward.tapes:
        with recording(backward.tapes[1:], upstream):
            return backward.tapes[0].gradient(outputs, inputs, output_gradients=upstream)
    inside = [backward.graph.capture(each) if hasattr(backward.graph, "capture") else each for each in inputs]
    return operators.gradients_of_ops(outputs, inside, upstream, stop_gradients=inside, src_graph=backward.graph)


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
        owner = joint.owner_inside(op, "outputs", position)
        upstream.append(None if owner is None else payloads[owner].upstream[position])
    with operator.building():
        found = payloads[0].gradient(op, *upstream)
    first = 0 if "While" in op.type else 1  # the branches do not get the condition
    owners = [joint.owner_inside(op, "inputs", position - first) or 0 for position in range(len(found))]
    return [
        Built([each if owner == replica else None for each, owner in zip(found, owners, strict=True)])
        for replica in range(len(operator.parts))
    ]


def by_replicas(original: Callable[..., list[Any]], ys: Any, xs: Any, *args: Any, **options: Any) -> list[Any]:
    """In the place of `original`, the gradients of ops: in a joint graph, each replica computes its own part."""
    operator, source = joint.now_building(), options.get("src_graph")
    notes = joint.find_notes(source)
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
                Notes.on(graph).give(owner, joint.flat_tensors(gradient))

    def differentiated(pairs: list[tuple[Any, Any]]) -> list[Any]:
        if not pairs:
            return [None] * len(xs)
        outputs, of = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return operators.gradients_of_ops(outputs, xs, of, stop_gradients=notes.constants, src_graph=source)

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
    return distribute.total([tf.convert_to_tensor(each) for each in gradients])
