"""Which tensors of a body may differ from replica to replica, and why: a data flow analysis of its graph.

Each tensor gets a set of causes. A tensor without a cause is equal on all replicas. Causes flow from the inputs of an
op to its outputs, from a condition to the results of its branches, and around loops until nothing changes. A result of
a collective over all replicas has no cause, whatever went in.

A cause means that a tensor depends on something that differs, not that the tensor differs.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs, xla_ops
from replica_engine.pjrt.collectives import COLLECTIVES
from replica_engine.pjrt.markers import HOST_CALL, PREFIX
from replica_engine.xla.state.device_value import home_of

_EQUAL_EVERYWHERE = frozenset(("Shape", "ShapeN", "Size", "Rank", "TensorListLength", "ZerosLike", "OnesLike"))

_PLAIN = frozenset(("Add", "AddV2", "Cast", "Identity", "Maximum", "Minimum", "Mul", "Neg", "Sub"))
_MOST = 16  # ops that are looked at

OpsOf = Callable[[Any], list[tf.Operation]]  # takes a graph, and returns those of its ops that are looked at


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
    def of(op: tf.Operation) -> CollectiveOp | None:
        """The collective that an op is; None for any other op."""
        if op.type == "XlaAllReduce":
            groups = tf.get_static_value(op.inputs[1])
            return CollectiveOp("all_reduce", None if groups is None else np.asarray(groups).tolist())
        name = xla_ops.marker_name(op)
        if not name.startswith(PREFIX) or name == HOST_CALL:
            return None
        return CollectiveOp(name.removeprefix(PREFIX), json.loads(xla_ops.marker_parameters(op)).get("groups"))


class Differences:
    """The causes of the tensors of a body.

    Args:
        graph: the body.
        of_input: the cause of an input of the graph, by its index. For a variable it is the cause of its value.
        ops_of: the ops of a graph to look at, each after those that it depends on.

    Attributes:
        conditions: the causes of the condition of each branch and loop, by the id of its op.
        variables: by the index of the input that is a variable's handle, the causes of the variable's value.
        added: the indices of variables to which values are added that come from no collective and no variable. They
            may be meant as the sum over the replicas, also if they are equal.
        writers: by the index of a variable, the first op that writes a value to it that may differ.
    """

    def __init__(self, graph: Any, of_input: Callable[[int], Reason], ops_of: OpsOf = host_ops.needed_ops):
        self.conditions: dict[int, Reason] = {}
        self.added: set[int] = set()
        self.writers: dict[int, tf.Operation] = {}
        self._ops_of = functools.cache(ops_of)
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
        # A function that was differentiated may have got more inputs and outputs since an op called it.
        known = {id(inside): value for inside, value in zip(graph.inputs, inputs, strict=False)}
        for op in self._ops_of(graph):
            if not op.outputs or id(op.outputs[0]) not in known:
                given = [known.get(id(each), _UNKNOWN) for each in op.inputs]
                known.update(zip(map(id, op.outputs), self._visit(op, given, around), strict=False))
        return [known.get(id(output), _UNKNOWN) for output in graph.outputs]

    def _visit(self, op: tf.Operation, given: list[_Known], around: Reason) -> Sequence[_Known]:
        functions = subgraphs.functions_of(op)
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
        cause, variables = self._cause(op, given, around), _variables_of(given)
        settled = any(each.settled for each in given)
        if op.type in subgraphs.ADDING and not settled and not _is_one(op.inputs[1]):  # one counts steps, not samples
            self.added |= variables
        settled |= bool(variables) or CollectiveOp.of(op) is not None
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
                _joined([before, new, _Known(Reason.NONE if subgraphs.is_passed_on(body, index) else cause)])
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
        collective = CollectiveOp.of(op)
        if collective is not None:
            if COLLECTIVES[collective.name].gives_parts:
                return cause | Reason.REPLICA_ID
            return Reason.NONE if collective.groups is None else cause
        variables = _variables_of(given)
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
    return _Known(cause, _variables_of(values), any(value.settled for value in values))


def _variables_of(values: Sequence[_Known]) -> frozenset[int]:
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
    value = home_of(outside)
    return value is not None and value.kept_equal
