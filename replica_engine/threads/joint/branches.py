"""If, Case and While ops for all replicas, built by the coordinator.

TensorFlow builds the op and calls the branches, the condition and the body once each; the coordinator answers each call
with what all replicas traced, as a list with one entry for each replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.errors import ReplicaMismatchError
from replica_engine.threads.joint.gradients import Backward
from replica_engine.threads.joint.operator import Built, JointOperator, differentiable, flat_tensors


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
    return _built(operator, outs, [flat_tensors(each) for each in variables])


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
    backward = Backward(operator.outer, [differentiable(out) for out in outs], inputs, operator.captures.shared)
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
        raise ReplicaMismatchError.of_conditions(what, operator.where, rows)
    return tensors[0]


def _compared(operator: JointOperator, tensors: Sequence[tf.Tensor], what: str) -> tf.Tensor:
    """Replica 0's value. When the graph runs, it waits for ops that compare the values."""
    rows = [(str(replica), "") for replica in operator.run.replicas]
    head, *lines, tail = str(ReplicaMismatchError.of_conditions(what, operator.where, rows)).split("\n")
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
