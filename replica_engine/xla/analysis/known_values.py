"""Values of a body that are known before it runs: those that depend on constants and the replica id only.

A graph is evaluated from the tensor that is asked for backwards, so that only the ops behind it run, eagerly on the
host. Branches whose condition is known take that branch; loops whose condition is known run as often as in the program.
A value that depends on anything else is unknown, which is None. Unknown is always a correct answer. So evaluation gives
up early: at large tensors, at ops with effects, and after a number of steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs

Value: TypeAlias = Any
"""An eager tensor; None if the value is unknown."""

Place = tuple[tuple[str, int], ...]
"""Where an execution takes place: for each branch, loop and call around it, its name and its branch or iteration."""

_LARGEST = 1 << 12  # elements; conditions and counters are small
_STEPS = 1_000_000  # a few seconds; an iteration of a loop counts as about 100 steps
_RUN = 10  # steps that running an op counts as


class Evaluation:
    """What is known of a body on one replica, and the limit of looking for it; used in eager mode, on the host.

    Args:
        replica: the id of the replica.

    Attributes:
        left: how many steps are left.
    """

    def __init__(self, replica: int):
        self._replica = tf.constant(replica)
        self.left = _STEPS
        self._runner = functools.cache(host_ops.runner)
        self._computes = functools.cache(_only_computes)
        self._constant = functools.cache(_constant)
        self.carried = functools.cache(_carried)  # the body of an outer loop is executed often

    def of(self, graph: Any) -> GraphExecution:
        """The execution of a whole body."""
        return GraphExecution(self, graph, lambda index: _outside(graph.inputs[index]), ())

    @property
    def has_given_up(self) -> bool:
        """Whether the limit is reached. All further values are unknown."""
        return self.left <= 0

    def outputs(self, op: tf.Operation, inputs: Sequence[Value]) -> Sequence[Value]:
        """The outputs of an op without functions, from the values of `_inputs`."""
        if op.type == "XlaReplicaId":
            return [self._replica]
        if op.type == "Const":
            return [self._constant(op)]
        if op.type in ("LogicalAnd", "LogicalOr"):
            decides = op.type == "LogicalOr"
            for each in inputs:
                if each is not None and each.shape.rank == 0 and bool(each) is decides:
                    return [each]
        if any(value is None for value in inputs) or not self._computes(op):
            return [None] * len(op.outputs)
        self.left -= _RUN
        try:
            return self._runner(op)(list(inputs))
        except tf.errors.OpError:  # on a device the op may have a result all the same
            return [None] * len(op.outputs)


class GraphExecution:
    """One execution of a function graph on one replica.

    Args:
        evaluation: what is known of the body.
        graph: the function graph.
        argument: computes the value of an input of the graph.
        place: where it takes place.
    """

    def __init__(self, evaluation: Evaluation, graph: Any, argument: Callable[[int], Value], place: Place):
        self.graph = graph
        self.place = place
        self._evaluation = evaluation
        self._argument = argument
        self._numbers = {id(inside): index for index, inside in enumerate(graph.inputs)}
        self._values: dict[int, Value] = {}
        self._inner: dict[tuple[str, int], GraphExecution] = {}

    def value(self, tensor: tf.Tensor) -> Value:
        """The value of a tensor of the graph; None if it is unknown."""
        try:
            return self._value(tensor)
        except RecursionError:  # hundreds of branches, each of which needs the result of the one before
            self._evaluation.left = 0
            return None

    def _value(self, tensor: tf.Tensor) -> Value:
        pending = [tensor]
        while pending:
            each = pending[-1]
            if id(each) in self._values:
                pending.pop()
                continue
            self._evaluation.left -= 1
            if self._evaluation.has_given_up:
                return None
            if id(each) in self._numbers:
                self._values[id(each)] = self._argument(self._numbers[id(each)])
            elif subgraphs.runs_functions(each.op):
                self._values[id(each)] = self._of_functions(each.op, each.value_index)
            elif missing := [one for one in _inputs(each) if id(one) not in self._values]:
                pending += missing
            else:
                inputs = [self._values[id(one)] for one in _inputs(each)]
                if _only_passes(each.op):
                    self._values[id(each)] = inputs[0]
                else:
                    outputs = self._evaluation.outputs(each.op, inputs)
                    self._values.update((id(one), value) for one, value in zip(each.op.outputs, outputs, strict=True))
        return self._values[id(tensor)]

    def branch_taken(self, op: tf.Operation) -> int | None:
        """The number of the function that a branch runs; None if that is unknown."""
        chosen = self.value(op.inputs[0])
        if chosen is None:
            return None
        number = chosen.numpy()
        count = len(subgraphs.functions_of(op))
        if op.type.endswith("Case"):
            return int(number) if 0 <= number < count else count - 1
        return 0 if number else 1

    def inside(self, op: tf.Operation, number: int) -> GraphExecution:
        """The execution of a function of a branch or of a call."""
        key = op.name, number
        if key not in self._inner:
            given = list(op.inputs)[0 if op.type.endswith("PartitionedCall") else 1 :]
            self._inner[key] = GraphExecution(
                self._evaluation,
                subgraphs.functions_of(op)[number],
                # A function that was differentiated may have got more inputs since the op called it.
                lambda index: self.value(given[index]) if index < len(given) else None,
                (*self.place, key),
            )
        return self._inner[key]

    def iterations(
        self, op: tf.Operation, wanted: Iterable[int] = (), enter: Callable[[GraphExecution], None] | None = None
    ) -> tuple[int | None, list[Value]]:
        """Runs a loop.

        Args:
            op: the loop.
            wanted: the indices of the values that must be computed.
            enter: called with each execution of the condition and of the body.

        Returns:
            The number of iterations, and the values after the loop; the values that are not wanted may be unknown. The
            number is None if the condition is unknown. Then the body is entered once more, and stands for all further
            iterations: only what no iteration changes is known in it.
        """
        condition, body = subgraphs.functions_of(op)
        needed = self._evaluation.carried(condition, body, frozenset(wanted))
        values = [self.value(each) if index in needed else None for index, each in enumerate(op.inputs)]
        count = 0
        while True:
            test = self._iteration(op, condition, values, (f"{op.name} condition", count))
            decided = test.value(condition.outputs[0])
            if enter is not None:
                enter(test)
            is_unknown = decided is None or self._evaluation.has_given_up
            if not is_unknown and not decided.numpy():
                return count, values
            if is_unknown:
                values = [None] * len(values)
            execution = self._iteration(op, body, values, (op.name, count))
            if enter is not None:
                enter(execution)
            if is_unknown:
                return None, values
            values = [execution.value(output) if index in needed else None for index, output in enumerate(body.outputs)]
            count += 1

    def _iteration(self, op: tf.Operation, function: Any, values: list[Value], step: tuple[str, int]) -> GraphExecution:
        def argument(index: int) -> Value:
            if index >= len(values):
                return None
            return self.value(op.inputs[index]) if subgraphs.is_passed_on(body, index) else values[index]

        body = subgraphs.functions_of(op)[1]
        return GraphExecution(self._evaluation, function, argument, (*self.place, step))

    def _of_functions(self, op: tf.Operation, index: int) -> Value:
        """The value of an output of a branch, a loop or a call."""
        functions = subgraphs.functions_of(op)
        if not functions:
            return None
        if op.type.endswith("While"):
            if subgraphs.is_passed_on(functions[1], index):
                return self.value(op.inputs[index])
            return self.iterations(op, [index])[1][index]
        taken = 0 if op.type.endswith("PartitionedCall") else self.branch_taken(op)
        return None if taken is None else self.inside(op, taken).value(functions[taken].outputs[index])


def _inputs(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    """The inputs of an op that must be known to compute one of its outputs."""
    return [tensor.op.inputs[tensor.value_index]] if _only_passes(tensor.op) else tensor.op.inputs


def _only_passes(op: tf.Operation) -> bool:
    return op.type in ("Identity", "IdentityN")  # tf.custom_gradient puts results and arguments into one IdentityN


def _inputs_behind(graph: Any, tensor: tf.Tensor) -> set[int]:
    """Which inputs of a function graph one of its tensors depends on."""
    numbers = {id(inside): index for index, inside in enumerate(graph.inputs)}
    return {numbers[id(each)] for each in subgraphs.reached([tensor], _inputs) if id(each) in numbers}


def _carried(condition: Any, body: Any, wanted: frozenset[int]) -> set[int]:
    """The indices of a loop's values that its condition and the wanted values depend on."""
    start = wanted | _inputs_behind(condition, condition.outputs[0])
    return set(subgraphs.reached(start, lambda index: _inputs_behind(body, body.outputs[index]), int))


def _outside(inside: tf.Tensor) -> Value:
    """The value of an input of the body, if the input is a small eager tensor from outside."""
    outside = subgraphs.captured(inside)
    is_known = isinstance(outside, tf.Tensor) and not tf.is_symbolic_tensor(outside) and _is_small(outside)
    return outside if is_known else None


def _is_small(tensor: tf.Tensor) -> bool:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return False
    return (tensor.shape.num_elements() if tensor.shape.is_fully_defined() else 0) <= _LARGEST


def _constant(op: tf.Operation) -> Value:
    return host_ops.constant_of(op) if _is_small(op.outputs[0]) else None


def _only_computes(op: tf.Operation) -> bool:
    return (
        not op.op_def.is_stateful
        and not op.type.startswith("Xla")
        and op.type != "Placeholder"
        and all(map(_is_small, (*op.inputs, *op.outputs)))
        and host_ops.has_host_kernel(op)
    )
