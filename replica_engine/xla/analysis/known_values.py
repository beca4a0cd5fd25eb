"""Values of a body that are known before it runs: those that depend on constants, shapes and the replica id only.

A graph is evaluated from the tensor that is asked for backwards, so that only the ops behind it run, eagerly on the
host. Branches whose condition is known take that branch; loops whose condition is known run as often as in the program.
A value that depends on anything else is unknown, which is None. Unknown is always a correct answer. So evaluation gives
up early: at large tensors, at ops with effects, and after a number of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs

Value = Any
"""An eager tensor, or what a rule returned; None if the value is unknown."""


class Rule(NamedTuple):
    """How to compute the outputs of an op, instead of running it.

    Attributes:
        compute: takes the op and the values of the inputs that it needs.
        inputs: the indices of these inputs.
        of_lists: whether the rule is only for lists of tensors, and not for tensors.
    """

    compute: Callable[[tf.Operation, list[Value]], list[Value]]
    inputs: Sequence[int]
    of_lists: bool = False


Place = tuple[tuple[str, int], ...]
"""Where an execution takes place: for each branch, loop and call around it, its name and its branch or iteration."""

_LARGEST = 1 << 12  # elements; conditions, counters and sizes are small
_STEPS = 1_000_000  # a few seconds; an iteration of a loop counts as about 100 steps
_RUN = 10  # steps that running an op counts as
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """All evaluation happens inside: eagerly, on the host."""
    with tf.init_scope(), tf.device("CPU:0"):
        yield


class Evaluation:
    """The rules and the limit of one evaluation of a body.

    Args:
        rules: how to compute the outputs of ops of some types.
        common: what is known of a value that is one of several; only for values that rules made.
        steps: the limit; an iteration of a loop counts as about 100 steps.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule],
        common: Callable[[list[Value]], Value] = lambda values: None,
        steps: int = _STEPS,
    ):
        self._rules = rules
        self._common = common
        self._left = steps
        self._runners: dict[int, Callable[[list[Any]], list[Any]]] = {}
        self._computes: dict[int, bool] = {}
        self._constants: dict[int, Value] = {}
        self._behind: dict[int, tuple[tf.Tensor, frozenset[int]]] = {}

    def of(self, graph: Any) -> GraphExecution:
        """The execution of a whole body."""
        return GraphExecution(self, graph, lambda index: _outside(graph.inputs[index]), ())

    @property
    def has_given_up(self) -> bool:
        """Whether the limit is reached. All further values are unknown."""
        return self._left <= 0

    def spend(self, steps: int) -> None:
        """Counts steps."""
        self._left -= steps

    def give_up(self) -> None:
        """Makes all further values unknown."""
        self._left = 0

    def constant(self, op: tf.Operation) -> Value:
        """The value of a Const op, if it is small."""
        if id(op) not in self._constants:
            self._constants[id(op)] = host_ops.constant_of(op) if _is_small(op.outputs[0]) else None
        return self._constants[id(op)]

    def computes(self, op: tf.Operation) -> bool:
        """Whether an op only computes, from small tensors."""
        if id(op) not in self._computes:
            self._computes[id(op)] = _only_computes(op)
        return self._computes[id(op)]

    def run(self, op: tf.Operation, inputs: list[Any]) -> list[Any]:
        """The outputs of an op that only computes."""
        self.spend(_RUN)
        if id(op) not in self._runners:
            self._runners[id(op)] = host_ops.runner(op)
        try:
            return self._runners[id(op)](inputs)
        except tf.errors.OpError:  # on a device the op may have a result all the same
            return [None] * len(op.outputs)

    def rule_of(self, op: tf.Operation) -> Rule | None:
        """The rule for an op."""
        rule = self._rules.get(op.type)
        return None if rule is None or (rule.of_lists and op.outputs[0].dtype != tf.variant) else rule

    def inputs(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """The inputs of an op that must be known to compute one of its outputs."""
        op = tensor.op
        rule = self.rule_of(op)
        if rule is not None:
            return [op.inputs[index] for index in rule.inputs]
        if op.type == "IdentityN":  # tf.custom_gradient puts results and arguments into one
            return [op.inputs[tensor.value_index]]
        if op.type in _SHAPES and all(each.shape.is_fully_defined() for each in op.inputs):
            return []
        return op.inputs

    def inputs_behind(self, graph: Any, tensor: tf.Tensor) -> frozenset[int]:
        """Which inputs of a function graph one of its tensors depends on."""
        if id(tensor) not in self._behind:
            numbers = {id(inside): index for index, inside in enumerate(graph.inputs)}
            pending, seen = [tensor], set()
            while pending:
                each = pending.pop()
                if id(each) not in seen:
                    seen.add(id(each))
                    pending += self.inputs(each)
            self._behind[id(tensor)] = tensor, frozenset(numbers[each] for each in seen & numbers.keys())
        return self._behind[id(tensor)][1]

    def carried(self, condition: Any, body: Any, wanted: Iterable[int]) -> set[int]:
        """The indices of a loop's values that its condition and the wanted values depend on."""
        needed: set[int] = set()
        pending = {*wanted, *self.inputs_behind(condition, condition.outputs[0])}
        while pending:
            index = pending.pop()
            if index not in needed:
                needed.add(index)
                pending |= self.inputs_behind(body, body.outputs[index])
        return needed

    def common(self, values: list[Value]) -> Value:
        """The value that is one of several; None if they differ."""
        first, *others = values
        if not all(isinstance(each, tf.Tensor) for each in values):
            return self._common(values)
        is_equal = all(each.shape == first.shape and (each.numpy() == first.numpy()).all() for each in others)
        return first if is_equal else None


class GraphExecution:
    """One execution of a function graph on one replica.

    Args:
        evaluation: the rules.
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
            self._evaluation.give_up()
            return None

    def _value(self, tensor: tf.Tensor) -> Value:
        pending = [tensor]
        while pending:
            each = pending[-1]
            if id(each) in self._values:
                pending.pop()
                continue
            self._evaluation.spend(1)
            if self._evaluation.has_given_up:
                return None
            if id(each) in self._numbers:
                self._values[id(each)] = self._argument(self._numbers[id(each)])
            elif subgraphs.runs_functions(each.op):
                self._values[id(each)] = self._of_functions(each.op, each.value_index)
            elif missing := [one for one in self._evaluation.inputs(each) if id(one) not in self._values]:
                pending += missing
            elif each.op.type == "IdentityN":
                self._values[id(each)] = self._values[id(each.op.inputs[each.value_index])]
            else:
                outputs = self._outputs(each.op)
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
            number is None if the condition is unknown. Then the body is entered once more, with what is known of the
            values in all iterations.
        """
        condition, body = subgraphs.functions_of(op)
        needed = self._evaluation.carried(condition, body, wanted)
        begin = values = [self.value(each) if index in needed else None for index, each in enumerate(op.inputs)]
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
                return None, self._unknown_iteration(op, body, begin, enter)
            execution = self._iteration(op, body, values, (op.name, count))
            if enter is not None:
                enter(execution)
            values = [execution.value(output) if index in needed else None for index, output in enumerate(body.outputs)]
            count += 1

    def _unknown_iteration(
        self, op: tf.Operation, body: Any, begin: list[Value], enter: Callable[[GraphExecution], None] | None
    ) -> list[Value]:
        """Runs an iteration that stands for all. Returns what is known of the values before and after it."""
        values = [value if isinstance(value, tf.Tensor) else self._evaluation.common([value, value]) for value in begin]
        while True:
            execution = self._iteration(op, body, values, (op.name, 0))
            after = [None if value is None else execution.value(body.outputs[i]) for i, value in enumerate(values)]
            joined = [
                None if one is None or other is None else self._evaluation.common([one, other])
                for one, other in zip(values, after, strict=True)
            ]
            if joined == values:
                break
            values = joined
        if enter is not None:
            enter(execution)
        return values

    def _iteration(self, op: tf.Operation, function: Any, values: list[Value], step: tuple[str, int]) -> GraphExecution:
        def argument(index: int) -> Value:
            if index >= len(values):
                return None
            return self.value(op.inputs[index]) if is_passed_on(body, index) else values[index]

        body = subgraphs.functions_of(op)[1]
        return GraphExecution(self._evaluation, function, argument, (*self.place, step))

    def _outputs(self, op: tf.Operation) -> Sequence[Value]:
        inputs = [self._values[id(each)] for each in self._evaluation.inputs(op.outputs[0])]
        rule = self._evaluation.rule_of(op)
        if rule is not None:
            return rule.compute(op, inputs)
        if op.type == "Identity":
            return inputs
        if op.type == "Const":
            return [self._evaluation.constant(op)]
        if op.type in _SHAPES and len(inputs) < len(op.inputs):
            return [_shape_value(op, tensor) for tensor in op.inputs]
        if op.type in ("LogicalAnd", "LogicalOr"):
            decides = op.type == "LogicalOr"
            for each in inputs:
                if each is not None and each.shape.rank == 0 and bool(each) is decides:
                    return [each]
        if any(value is None for value in inputs) or not self._evaluation.computes(op):
            return [None] * len(op.outputs)
        return self._evaluation.run(op, inputs)

    def _of_functions(self, op: tf.Operation, index: int) -> Value:
        """The value of an output of a branch, a loop or a call."""
        functions = subgraphs.functions_of(op)
        if not functions:
            return None
        if op.type.endswith("While"):
            if is_passed_on(functions[1], index):
                return self.value(op.inputs[index])
            return self.iterations(op, [index])[1][index]
        taken = 0 if op.type.endswith("PartitionedCall") else self.branch_taken(op)
        numbers = range(len(functions)) if taken is None else [taken]
        return self._evaluation.common(
            [self.inside(op, number).value(functions[number].outputs[index]) for number in numbers]
        )


def is_passed_on(body: Any, index: int) -> bool:
    """Whether an iteration leaves a value of a loop unchanged."""
    output = body.outputs[index]
    while output.op.type in ("Identity", "IdentityN"):
        output = output.op.inputs[output.value_index]
    return output is body.inputs[index]


def _outside(inside: tf.Tensor) -> Value:
    """The value of an input of the body, if the input is a small eager tensor from outside."""
    outside = subgraphs.captured(inside)
    is_known = isinstance(outside, tf.Tensor) and not tf.is_symbolic_tensor(outside) and _is_small(outside)
    return outside if is_known else None


def _is_small(tensor: tf.Tensor) -> bool:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return False
    return (tensor.shape.num_elements() if tensor.shape.is_fully_defined() else 0) <= _LARGEST


def _only_computes(op: tf.Operation) -> bool:
    return (
        not op.op_def.is_stateful
        and not op.type.startswith("Xla")
        and op.type != "Placeholder"
        and all(map(_is_small, (*op.inputs, *op.outputs)))
        and host_ops.has_host_kernel(op)
    )


def _shape_value(op: tf.Operation, tensor: tf.Tensor) -> tf.Tensor:
    if op.type == "Rank":
        return tf.constant(tensor.shape.rank)
    sizes: Any = tensor.shape.num_elements() if op.type == "Size" else tensor.shape.as_list()
    return tf.constant(sizes, op.get_attr("out_type"))
