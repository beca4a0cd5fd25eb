"""What replicas decide, as far as it is known before a body runs: which branch they take, how many iterations they run.

A value is known if it depends on constants and the replica id only. The body is followed on all replicas at once. The
ops that conditions depend on run eagerly on the host, once for all replicas that give them the same values. Branches
whose condition is known take that branch; loops whose condition is known run as often as in the program. A value that
depends on anything else is unknown, which is None. Unknown is always a correct answer. So a value is given up early: at
large tensors, at ops with effects, and after a number of steps.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from replica_engine.upstream.graphs import graph_walk, host_kernels

Found = TypeVar("Found")
Visit = Callable[[tf.Operation, list[Found]], Sequence[Found]]
Value: TypeAlias = "tf.Tensor | None"
"""An eager tensor; None if the value is unknown."""

_ReplicaValues = Sequence[Value]  # the value of each replica
_LARGEST = 1 << 12  # elements; conditions and counters are small
_STEPS = 1_000_000  # of a replica: a few seconds
_RUN = 10  # steps that running an op counts as
_PASSING = ("Identity", "IdentityN")  # tf.custom_gradient puts results and arguments into one IdentityN


def followed(
    graph: Any, ops: Iterable[tf.Operation], inputs: Sequence[Found], unknown: Found, visit: Visit[Found]
) -> list[Found]:
    """Goes through a function graph, and finds something of each of its tensors.

    Args:
        graph: the graph.
        ops: those of its ops that are looked at, each after those that it depends on.
        inputs: what is found of its inputs.
        unknown: what is found of all other tensors.
        visit: takes an op and what is found of its inputs; returns what is found of its outputs.

    Returns:
        What is found of the graph's results.
    """
    # A function that was differentiated may have got more inputs and outputs since an op called it.
    found = dict(zip(map(id, graph.inputs), inputs, strict=False))
    for op in ops:
        if not op.outputs or id(op.outputs[0]) not in found:
            given = [found.get(id(each), unknown) for each in op.inputs]
            found.update(zip(map(id, op.outputs), visit(op, given), strict=False))
    return [found.get(id(each), unknown) for each in graph.outputs]


class Decisions:
    """Finds out which branch each replica takes, and how many iterations it runs.

    Args:
        graph: the body.
        suspects: the branches and loops to look at.
        size: the number of replicas.
        list_ops: the ops of a graph, each after those that it depends on.

    Attributes:
        found: by the id of each suspect, for each time that all replicas execute it: of each replica the branch or the
            number of iterations; None if that is unknown.
    """

    def __init__(
        self, graph: Any, suspects: Sequence[tf.Operation], size: int, list_ops: Callable[[Any], Iterable[tf.Operation]]
    ):
        self.found: dict[int, list[list[int | None]]] = {id(op): [] for op in suspects}
        self._unknown: list[Value] = [None] * size
        self._left = _STEPS * size
        self._runner = functools.cache(host_kernels.runner)
        self._computes = functools.cache(_only_computes)
        self._constant = functools.cache(_constant)
        self._running: dict[Any, list[tf.Operation]] = {}  # the ops that run a function, by its graph
        for op in graph_walk.everywhere(graph):
            for function in graph_walk.list_inner_graphs(op):
                self._running.setdefault(function, []).append(op)
        entered = list(graph_walk.reached(suspects, lambda op: self._running.get(op.graph, ())))
        conditions = [_condition(op) for op in entered if op.type not in graph_walk.CALLS]
        wanted = {id(op) for op in entered} | {id(each) for each in graph_walk.reached(conditions, self._behind)}
        self._ops = functools.cache(
            lambda graph: [op for op in list_ops(graph) if not wanted.isdisjoint(map(id, (op, *op.outputs)))]
        )
        with tf.init_scope(), tf.device("CPU:0"):
            self._ids = [tf.constant(replica) for replica in range(size)]
            captures = {id(inside): outside for outside, inside in getattr(graph, "captures", ())}
            inputs = [[_known(captures.get(id(inside)))] * size for inside in graph.inputs]
            self._run(graph, inputs, [True] * size)

    def _behind(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """The tensors from which a tensor is computed, in functions and around them."""
        op, index, functions = tensor.op, tensor.value_index, graph_walk.list_inner_graphs(tensor.op)
        if functions:
            decides = [] if op.type in graph_walk.CALLS else [_condition(op)]
            begins = [op.inputs[index]] if op.type in graph_walk.LOOPS else []
            return [*decides, *begins, *(each.outputs[index] for each in functions[len(begins) :])]
        if op.type in _PASSING:
            return [op.inputs[index]]
        inputs = op.graph.inputs if op.type == "Placeholder" else ()
        place = next((place for place, each in enumerate(inputs) if each is tensor), None)
        if place is None:
            return list(op.inputs)
        found = []
        for runs in self._running.get(op.graph, ()):
            # A function that was differentiated may have got more inputs since an op called it.
            found += list(runs.inputs)[place + (runs.type in graph_walk.BRANCHES) :][:1]
            if runs.type in graph_walk.LOOPS:
                found.append(graph_walk.list_inner_graphs(runs)[1].outputs[place])
        return found

    def _run(self, graph: Any, inputs: Sequence[_ReplicaValues], active: Sequence[bool]) -> list[_ReplicaValues]:
        """Goes through a function graph on the replicas that are `active`; returns what is known of its results."""
        ops = self._counted(graph) if any(active) else ()
        return followed(graph, ops, inputs, self._unknown, lambda op, given: self._visit(op, given, active))

    def _counted(self, graph: Any) -> Iterator[tf.Operation]:
        """The ops of a graph, each of which is one of the steps that are left, known or not."""
        for op in self._ops(graph):
            self._left -= 1
            yield op

    def _visit(self, op: tf.Operation, given: list[_ReplicaValues], active: Sequence[bool]) -> Sequence[_ReplicaValues]:
        functions = graph_walk.list_inner_graphs(op)
        if not functions:
            return self._computed(op, given, active)
        if op.type in graph_walk.CALLS:
            return self._run(functions[0], given, active)
        if op.type in graph_walk.LOOPS:
            return self._loop(op, given, active)
        taken = [None if chosen is None else _branch(op, chosen.numpy(), len(functions)) for chosen in given[0]]
        self._note(op, taken, active)
        columns = []
        for number, function in enumerate(functions):
            takes = [each and one in (None, number) for each, one in zip(active, taken, strict=True)]
            columns.append(self._run(function, given[1:], takes))
        return [
            [None if number is None else rows[number][replica] for replica, number in enumerate(taken)]
            for rows in zip(*columns, strict=False)
        ]

    def _loop(self, op: tf.Operation, values: list[_ReplicaValues], active: Sequence[bool]) -> list[_ReplicaValues]:
        """Runs a loop. If its condition is unknown, the body stands for all further iterations, and runs once more."""
        condition, body = graph_walk.list_inner_graphs(op)
        kept = [graph_walk.is_passed_on(body, index) for index in range(len(body.outputs))]
        counts: list[Any] = [0] * len(active)
        going = active
        while any(going):
            self._left -= 1
            (test,) = self._run(condition, values, going)
            lost = [on and (each is None or self._left <= 0) for on, each in zip(going, test, strict=True)]
            going = [on and not is_lost and bool(each) for on, is_lost, each in zip(going, lost, test, strict=True)]
            values = [
                row if keeps else _where(lost, self._unknown, row) for keeps, row in zip(kept, values, strict=False)
            ]
            after = self._run(body, values, list(map(operator.or_, lost, going)))
            values = [_where(going, new, row) for new, row in zip(after, values, strict=False)]
            counts = [
                None if is_lost else count + 1 if on else count
                for is_lost, on, count in zip(lost, going, counts, strict=True)
            ]
        self._note(op, counts, active)
        return values

    def _note(self, op: tf.Operation, taken: list[int | None], active: Sequence[bool]) -> None:
        """Notes what replicas decide. Where only some come, the fault is further out."""
        if all(active) and id(op) in self.found:
            self.found[id(op)].append(taken)

    def _computed(
        self, op: tf.Operation, given: list[_ReplicaValues], active: Sequence[bool]
    ) -> Sequence[_ReplicaValues]:
        """The outputs of an op without functions."""
        if op.type in _PASSING:
            return given
        if op.type == "XlaReplicaId":
            return [self._ids]
        made: dict[tuple[int, ...], list[Value]] = {}
        columns = []
        for replica, is_active in enumerate(active):
            inputs = [row[replica] if is_active else None for row in given]
            key = tuple(map(id, inputs))
            if key not in made:
                made[key] = self._outputs(op, inputs)
            columns.append(made[key])
        return list(zip(*columns, strict=True))

    def _outputs(self, op: tf.Operation, inputs: list[Value]) -> list[Value]:
        if op.type == "Const":
            return [self._constant(op)]
        if op.type in ("LogicalAnd", "LogicalOr"):
            decides = op.type == "LogicalOr"
            for each in inputs:
                if each is not None and each.shape.rank == 0 and bool(each) is decides:
                    return [each]
        if self._left <= 0 or any(value is None for value in inputs) or not self._computes(op):
            return [None] * len(op.outputs)
        self._left -= _RUN
        try:
            return self._runner(op)(inputs)
        except tf.errors.OpError:  # on a device the op may have a result all the same
            return [None] * len(op.outputs)


def _where(chosen: Sequence[bool], one: _ReplicaValues, other: _ReplicaValues) -> list[Value]:
    """Of each replica that is chosen what it has in `one`, of the others what they have in `other`."""
    return [a if each else b for each, a, b in zip(chosen, one, other, strict=True)]


def _condition(op: tf.Operation) -> tf.Tensor:
    """What decides in a branch or a loop."""
    return graph_walk.list_inner_graphs(op)[0].outputs[0] if op.type in graph_walk.LOOPS else op.inputs[0]


def _branch(op: tf.Operation, number: Any, count: int) -> int:
    """Which function a branch runs."""
    if op.type.endswith("Case"):
        return int(number) if 0 <= number < count else count - 1
    return 0 if number else 1


def _known(outside: Any) -> Value:
    """The value that an input of the body has outside, if that is a small eager tensor."""
    is_known = isinstance(outside, tf.Tensor) and not tf.is_symbolic_tensor(outside) and _is_small(outside)
    return outside if is_known else None


def _is_small(tensor: tf.Tensor) -> bool:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return False
    return (tensor.shape.num_elements() if tensor.shape.is_fully_defined() else 0) <= _LARGEST


def _constant(op: tf.Operation) -> Value:
    return host_kernels.read_constant(op) if _is_small(op.outputs[0]) else None


def _only_computes(op: tf.Operation) -> bool:
    return (
        not op.op_def.is_stateful
        and not graph_walk.runs_functions(op)  # a call of a function without a graph: nobody knows how long it takes
        and not op.type.startswith("Xla")
        and op.type != "Placeholder"
        and all(map(_is_small, (*op.inputs, *op.outputs)))
        and host_kernels.has_host_kernel(op)
    )
