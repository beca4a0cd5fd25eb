"""What may differ between the replicas of a body, and collectives that only some of them reach.

A collective in a branch or a loop whose condition differs from replica to replica may be reached by only some of them,
and those wait forever for the others. So the conditions around each collective are looked at while the body is traced.
A condition that is equal on all replicas is never reported. One that is known to differ is an error. One that may
differ is a warning if it depends on the replica id, or on values that each replica has of its own. Only results of the
host are left out, since nothing is known about them.

A collective whose result nothing needs is not in the program, so nobody waits in it. It is an error nevertheless where
it is known that only some replicas reach it, as on replica threads: whether a result is used must not change what is
right. No warning is given of one that perhaps not all replicas reach.

`Differences` finds which tensors may differ; `check` looks at the conditions.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.user_frames import merge_line, user_line
from replica_engine.errors import CollectiveError, base
from replica_engine.pjrt.stablehlo.markers import COLLECTIVES, HOST_CALL, PREFIX
from replica_engine.upstream.graphs import graph_walk, host_kernels, xla_ops
from replica_engine.xla.stages.known_values import Decisions, followed
from replica_engine.xla.state.device_value import find_device_value

# Shapes are equal on all replicas, and so is what depends on a shape only.
_EQUAL_EVERYWHERE = frozenset(("Shape", "ShapeN", "Size", "Rank", "TensorListLength", "ZerosLike", "OnesLike"))

_PLAIN = frozenset(("Add", "AddV2", "Cast", "Identity", "Maximum", "Minimum", "Mul", "Neg", "Sub"))
_MOST = 16  # ops that are looked at

ListOps = Callable[[Any], list[tf.Operation]]  # takes a graph, and returns those of its ops that are looked at


class Reason(enum.Flag):
    """Why a tensor may differ from replica to replica."""

    NONE = 0
    REPLICA_ID = enum.auto()
    OWN_DATA = enum.auto()
    """Values that each replica has of its own: parts of arguments, random numbers, components of variables."""
    UNKNOWN = enum.auto()
    """Results of the host, which may be equal or not."""


class CollectiveOp:
    """What an op is to other replicas.

    Attributes:
        name: "all_reduce", "all_gather", ...
        groups: the groups of replicas that meet there; None for one group of all.
    """

    def __init__(self, name: str, groups: list[list[int]] | None):
        self.name = name
        self.groups = groups if groups and len(groups) > 1 else None

    @staticmethod
    def from_op(op: tf.Operation) -> CollectiveOp | None:
        """The collective that an op is; None for any other op."""
        if op.type == "XlaAllReduce":
            groups = tf.get_static_value(op.inputs[1])
            return CollectiveOp("all_reduce", None if groups is None else np.asarray(groups).tolist())
        name = xla_ops.marker_name(op).removeprefix(PREFIX)
        if name not in COLLECTIVES:
            return None
        return CollectiveOp(name, json.loads(xla_ops.marker_parameters(op)).get("groups"))


class Differences:
    """The causes of the tensors of a body: why each may differ from replica to replica.

    This is a data flow analysis of the graph. Each tensor gets a set of causes. A tensor without a cause is equal on
    all replicas. Causes flow from the inputs of an op to its outputs, from a condition to the results of its branches,
    and around loops until nothing changes. A result of a collective over all replicas has no cause, whatever went in.

    A cause means that a tensor depends on something that differs, not that the tensor differs.

    Args:
        graph: the body.
        of_input: the cause of an input of the graph, by its index. For a variable it is the cause of its value.
        list_ops: the ops of a graph to look at, each after those that it depends on.

    Attributes:
        conditions: the causes of the condition of each branch and loop, by the id of its op.
        variables: by the index of the input that is a variable's handle, the causes of the variable's value.
        added: the indices of variables to which values are added that come from no collective and no variable. They
            may be meant as the sum over the replicas, also if they are equal.
        writers: by the index of a variable, the first op that writes a value to it that may differ.
    """

    def __init__(self, graph: Any, of_input: Callable[[int], Reason], list_ops: ListOps = host_kernels.needed_ops):
        self.conditions: dict[int, Reason] = {}
        self.added: set[int] = set()
        self.writers: dict[int, tf.Operation] = {}
        self._list_ops = functools.cache(list_ops)
        self.variables = {
            index: of_input(index) for index, each in enumerate(graph.inputs) if each.dtype == tf.resource
        }
        inputs = [
            _Known(Reason.NONE, frozenset([index])) if index in self.variables else _Known(of_input(index))
            for index in range(len(graph.inputs))
        ]
        while True:  # what is assigned late in an iteration or in a branch is read early in the next
            before = dict(self.variables)
            self.added.clear()
            self._run(graph, inputs, Reason.NONE)
            if self.variables == before:
                return

    def _run(self, graph: Any, inputs: Sequence[_Known], around: Reason) -> list[_Known]:
        """Goes through a function graph; `around` is the cause of the conditions around it. Returns the results'."""
        return followed(
            graph, self._list_ops(graph), inputs, _UNKNOWN, lambda op, given: self._visit(op, given, around)
        )

    def _visit(self, op: tf.Operation, given: list[_Known], around: Reason) -> Sequence[_Known]:
        functions = graph_walk.list_inner_graphs(op)
        if op.type.endswith("PartitionedCall") and functions:
            return self._run(functions[0], given, around)
        if op.type.endswith("While") and functions:
            return self._loop(op, functions[0], functions[1], given, around)
        if functions:
            return self._branches(op, functions, given, around)
        if op.type == "IdentityN":  # tf.custom_gradient puts results and arguments into one
            return given
        if xla_ops.marker_name(op) == HOST_CALL:
            # Its first operand and result are positions among all calls.
            return [_Known(_joined(given[1:]).cause | Reason.UNKNOWN, settled=True)] * len(op.outputs)
        cause, variables = self._cause(op, given, around), _join_variables(given)
        settled = any(each.settled for each in given)
        if op.type in graph_walk.ADDING and not settled and not _is_one(op.inputs[1]):  # one counts steps, not samples
            self.added |= variables
        settled |= bool(variables) or CollectiveOp.from_op(op) is not None
        # What was read from a variable is not the variable: an op that writes it elsewhere does not write this one.
        handle, value = _Known(cause, variables), _Known(cause, settled=settled)
        return [handle if each.dtype == tf.resource else value for each in op.outputs]

    def _branches(self, op: tf.Operation, functions: list[Any], given: list[_Known], around: Reason) -> list[_Known]:
        cause = given[0].cause
        self.conditions[id(op)] = self.conditions.get(id(op), Reason.NONE) | cause
        columns = [self._run(function, given[1:], around | cause) for function in functions]
        return [_joined([*values, _Known(cause)]) for values in zip(*columns, strict=False)]

    def _loop(self, op: tf.Operation, condition: Any, body: Any, given: list[_Known], around: Reason) -> list[_Known]:
        values, added = given, set(self.added)
        while True:
            self.added = set(added)  # what seemed so before all iterations were known does not count
            (test,) = self._run(condition, values, around)
            cause = test.cause
            after = self._run(body, values, around | cause)
            joined = [
                _joined([before, new, _Known(Reason.NONE if graph_walk.is_passed_on(body, index) else cause)])
                for index, (before, new) in enumerate(zip(values, after, strict=False))
            ]
            if joined == values:
                self.conditions[id(op)] = self.conditions.get(id(op), Reason.NONE) | cause
                return joined
            values = joined

    def _cause(self, op: tf.Operation, given: list[_Known], around: Reason) -> Reason:
        """The cause of the outputs of an op without functions."""
        if op.type == "XlaReplicaId":
            return Reason.REPLICA_ID
        if op.type in _EQUAL_EVERYWHERE:
            return Reason.NONE
        cause = _joined(given).cause
        collective = CollectiveOp.from_op(op)
        if collective is not None:
            if COLLECTIVES[collective.name].gives_parts:
                return cause | Reason.REPLICA_ID
            return Reason.NONE if collective.groups is None else cause
        variables = _join_variables(given)
        for variable in variables:
            if not op.outputs:  # it writes
                self.variables[variable] |= cause | around
                if (cause | around) & (Reason.REPLICA_ID | Reason.OWN_DATA):
                    self.writers.setdefault(variable, op)
            cause |= self.variables[variable]
        if op.op_def.is_stateful and not variables and op.type != "Placeholder":
            cause |= Reason.UNKNOWN
        return cause


class _Known(NamedTuple):
    """What is known of a tensor.

    Attributes:
        cause: why it may differ.
        variables: the indices of the variables whose handle it is.
        settled: whether it comes from a collective, in which the replicas have agreed, or from a variable; True too if
            that is not known.
    """

    cause: Reason
    variables: frozenset[int] = frozenset()
    settled: bool = False


_UNKNOWN = _Known(Reason.UNKNOWN, settled=True)


def _joined(values: Sequence[_Known]) -> _Known:
    cause = Reason.NONE
    for value in values:
        cause |= value.cause
    return _Known(cause, _join_variables(values), any(value.settled for value in values))


def _join_variables(values: Sequence[_Known]) -> frozenset[int]:
    return frozenset().union(*(value.variables for value in values))


def _is_one(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and bool(np.all(value == 1))


def is_equal_everywhere(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a body is computed of constants and of variables with one value, as the last ops tell.

    `Differences` knows more, once a body is traced. This is asked while ops are made, to leave out a collective that
    would give each replica the value that it has: a counter of steps is such a value.
    """
    pending, seen = [tensor], 0
    while pending:
        op = pending.pop().op
        seen += 1
        if seen > _MOST:
            return False
        if op.type == "ReadVariableOp":
            if not _has_one_value(op.inputs[0]):
                return False
        elif op.type in _PLAIN and not op.control_inputs:
            pending += op.inputs
        elif op.type != "Const":
            return False
    return True


def _has_one_value(handle: tf.Tensor) -> bool:
    """Whether the variable behind a handle has one value, and what replicas assign to it is made equal."""
    outside = next((given for given, inside in handle.graph.captures if inside is handle), handle)
    value = find_device_value(outside)
    return value is not None and value.kept_equal


class UnmetCollective(NamedTuple):
    """A collective that perhaps not all replicas reach.

    Attributes:
        name: "all_reduce", "all_gather", ..., or "merge_call" if a merge function of the user's makes it.
        where: its line.
        is_loop: whether the condition is that of a loop, rather than of a branch.
        condition: the line of the condition.
        by_replica_id: whether the condition depends on the replica id, rather than on a replica's own values only.
    """

    name: str
    where: str
    is_loop: bool
    condition: str
    by_replica_id: bool


def diverging(graph: Any, of_input: Callable[[int], Reason]) -> str:
    """The line of a branch or loop whose condition may differ between replicas, for the arguments of `check`."""
    causes = Differences(graph, of_input).conditions
    for op in graph_walk.everywhere(graph):
        if causes.get(id(op), Reason.NONE) & (Reason.REPLICA_ID | Reason.OWN_DATA):
            return user_line(op) or "an unknown line"
    return ""


def check(graph: Any, size: int, of_input: Callable[[int], Reason], names: dict[str, str]) -> list[UnmetCollective]:
    """Looks at the conditions around the collectives of a body.

    Args:
        graph: the body.
        size: the number of replicas.
        of_input: as for `Differences`.
        names: by the line of the user's program, what the user called there.

    Returns:
        The collectives that may be reached by some replicas only, one for each condition.

    Raises:
        CollectiveError: not all replicas reach a collective.
    """
    # First all that the body has made, and below those that its program needs.
    inner = _Collectives(host_kernels.made_ops)
    entered = inner.everywhere(graph) if size > 1 else []
    if not entered:
        return []
    causes = Differences(graph, of_input, host_kernels.made_ops).conditions
    suspects = [op for op in entered if causes.get(id(op))]
    if not suspects:
        return []
    needed = _Collectives(host_kernels.needed_ops)
    in_program = {id(op) for op in needed.everywhere(graph)}
    decisions = Decisions(graph, suspects, size, host_kernels.made_ops).found
    found: list[UnmetCollective] = []
    seen: list[tf.Tensor] = []
    for op in suspects:
        unknown = False
        for taken in decisions[id(op)]:
            unknown = unknown or None in taken
            _check_known(op, taken, inner, names)
        condition = op.inputs[0]  # that of a branch also belongs to the gradient of the branch
        is_seen = op.type not in graph_walk.LOOPS and any(condition is each for each in seen)
        may_differ = unknown and causes[id(op)] & (Reason.REPLICA_ID | Reason.OWN_DATA)
        if may_differ and id(op) in in_program and not is_seen:
            seen.append(condition)
            _, first, collective = needed.list_collectives(op)[0]
            name, where = _called(first, collective, names)
            is_loop, by_id = op.type in graph_walk.LOOPS, bool(causes[id(op)] & Reason.REPLICA_ID)
            found.append(UnmetCollective(name, where, is_loop, user_line(op), by_id))
    return list(dict.fromkeys(found))


def _check_known(op: tf.Operation, taken: Sequence[int | None], inner: _Collectives, names: dict[str, str]) -> None:
    """Raises an error if some replicas of a group reach a collective of a branch or loop, and others do not."""
    is_loop = op.type in graph_walk.LOOPS
    for number, collective_op, collective in inner.list_collectives(op):
        for group in collective.groups or [list(range(len(taken)))]:
            decided = [each for each in (taken[replica] for replica in group) if each is not None]
            counts = decided if is_loop else [int(each == number) for each in decided]
            if len(counts) == len(group) and len(set(counts)) > 1:
                name, where = _called(collective_op, collective, names)
                raise _not_by_all(name, where, user_line(op), is_loop, dict(zip(group, counts, strict=True)))


def _called(op: tf.Operation, collective: CollectiveOp, names: dict[str, str]) -> tuple[str, str]:
    """What the user called that made the op of a collective, and the line of it."""
    if merged := merge_line(op):
        return "merge_call", merged
    where = user_line(op)
    return names.get(where, collective.name), where


_TIMES = {0: "never", 1: "once", 2: "twice"}
_SAME_BRANCH = "Move it out of the branch, and choose its result there: tf.where(replica_id == 0, total, x)."
_SAME_LOOP = "Let all replicas run as many iterations, and ignore the results of some: tf.where(step < n, total, x)."


def _not_by_all(name: str, where: str, condition: str, is_loop: bool, times: dict[int, int]) -> CollectiveError:
    """The error for a collective that each replica reaches so many times."""
    by_times: dict[int, list[int]] = {}
    for replica, count in times.items():
        by_times.setdefault(count, []).append(replica)
    rows = " and ".join(
        f"{_TIMES.get(count, f'{count} times')} by {_replicas(replicas)}"
        for count, replicas in sorted(by_times.items(), reverse=True)[:4]
    )
    kind, instead = ("loop", _SAME_LOOP) if is_loop else ("branch", _SAME_BRANCH)
    return CollectiveError(
        f"{name}{base.at(where)} is in a {kind} whose condition{base.at(condition)} depends on the replica id: it is "
        f"reached {rows}. Replicas that reach it would wait forever for the others. {instead}"
    )


def _replicas(numbers: Sequence[int]) -> str:
    """Replicas as text: "replica 0", "replicas 1, 2 and 5 more"."""
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    rest = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"replicas {', '.join(map(str, numbers[:8]))}{rest}"


class _Collectives:
    """The collectives in the functions of a body, each looked up once.

    Args:
        list_ops: the ops of a graph to look at.
    """

    def __init__(self, list_ops: ListOps):
        self._list_ops = functools.cache(list_ops)
        self.list_collectives = functools.cache(self._list_collectives)

    def _list_collectives(self, op: tf.Operation) -> list[tuple[int, tf.Operation, CollectiveOp]]:
        """The collectives in the functions of a branch, loop or call, with the number of the function."""
        found = []
        for number, graph in enumerate(graph_walk.list_inner_graphs(op)):
            for inner in self._list_ops(graph):
                if (collective := CollectiveOp.from_op(inner)) is not None:
                    found.append((number, inner, collective))
                else:
                    found += [(number, *each[1:]) for each in self.list_collectives(inner)]
        return found

    def everywhere(self, graph: Any) -> list[tf.Operation]:
        """All branches and loops of a body with collectives in them, the outer ones before the inner ones."""
        found: dict[int, tf.Operation] = {}
        pending = [graph]
        for each in pending:
            for op in filter(self.list_collectives, self._list_ops(each)):
                if op.type not in graph_walk.CALLS:
                    found[id(op)] = op
                pending += graph_walk.list_inner_graphs(op)
        return list(found.values())
