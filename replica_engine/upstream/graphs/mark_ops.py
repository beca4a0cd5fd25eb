"""Marks: ops that note, while a graph runs, when it has come to a place. Any thread can read them meanwhile.

A mark is the time, assigned to a scalar variable of its own. The variable is found by its name, and captured by no
graph: functions take no more arguments, loops no more loop variables, and a SavedModel needs to track nothing. An op of
the graph never waits for a mark, except through `hold_back`. TensorFlow keeps ops with effects in order; marks are left
out of that order (`run_independently`), because replicas would wait for each other there.

The names are used again when their graph is gone. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

# config: whether ops must be deterministic.
from tensorflow.python.framework import config as _config

from replica_engine.upstream.eager import no_tape
from replica_engine.upstream.graphs import graph_walk

_WRITES = "Assign", "Resource", "Scatter"
"""How the types of ops that write variables begin, if their first input is a variable."""

_ALL = "all"  # the gate of all devices
_numbers = itertools.count()
_free: dict[tuple[str, Any], list[str]] = {}  # names without a graph, by device and dtype


class Mark:
    """One mark of a graph.

    Args:
        name: the name of its variable.
        device: the device of its variable.
        op: the op that writes it. The mark refers to it weakly: it must not keep the graph alive.
        dtype: what it counts in: a time in float64, or a number in int64.
    """

    __slots__ = ("_dtype", "_graph", "_handle", "_name", "_op", "device")

    def __init__(self, name: str, device: str, op: tf.Operation, dtype: Any):
        self._name, self.device, self._dtype = name, device, dtype
        self._graph, self._op = weakref.ref(op.graph), op.name
        self._handle: Any = None

    @property
    def op(self) -> tf.Operation:
        """The op that writes the mark."""
        graph = self._graph()
        assert graph is not None, "asked while the graph is traced or runs"
        return graph.get_operation_by_name(self._op)

    def read(self) -> float:
        """The value now: the time in seconds since the epoch, or the count; 0 if the graph has not come there."""
        if self._handle is None:
            with tf.init_scope(), tf.device(self.device):
                self._handle = _variable(self._name, self._dtype)
        if not tf.executing_eagerly():
            with tf.init_scope():
                return self.read()
        return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)._numpy_internal().item()


def may_ask() -> bool:
    """Whether a graph may ask for the time: under `tf.config.experimental.enable_op_determinism` the op is an error."""
    return not _config.is_op_determinism_enabled()


def can_mark(graph: Any) -> bool:
    """Whether the graph is that of a function whose ops with effects TensorFlow keeps, and may ask for the time."""
    is_function = isinstance(graph, tf.__internal__.FuncGraph)
    return may_ask() and is_function and getattr(graph, "experimental_acd_manager", None) is not None


def time(device: str, after: Iterable[Any]) -> Mark:
    """Adds a mark to the default graph: the time at which some ops are done.

    Args:
        device: the device of the mark; it should be that of the ops, because another one costs a transfer.
        after: the ops, or tensors of them; those of other graphs are left out.
    """
    graph = tf.compat.v1.get_default_graph()
    name = _name(device, tf.float64)
    with no_tape(), tf.device(device):
        with tf.control_dependencies(select_from_graph(graph, after)):
            now = tf.raw_ops.Timestamp()
        handle = _variable(name, tf.float64)
        op = tf.raw_ops.AssignVariableOp(resource=handle, value=now)
    return _kept(graph, Mark(name, device, op, tf.float64), now.op, handle.op, op)


def count(device: str, after: Iterable[Any]) -> Mark:
    """Adds a mark that counts how often some ops were done; see `time`."""
    graph = tf.compat.v1.get_default_graph()
    name = _name(device, tf.int64)
    with no_tape(), tf.device(device):
        handle = _variable(name, tf.int64)
        with tf.control_dependencies(select_from_graph(graph, after)):
            op = tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.constant(1, tf.int64))
    return _kept(graph, Mark(name, device, op, tf.int64), handle.op, op)


def select_from_graph(graph: Any, found: Iterable[Any]) -> list[Any]:
    """The ops and tensors among some values that are of a graph."""
    leaves = tf.nest.flatten(list(found), expand_composites=True)
    nodes = (each for each in leaves if isinstance(each, (tf.Tensor, tf.Operation)))
    return [each for each in nodes if getattr(each, "graph", None) is graph]  # an eager tensor has none


def effects_in(graph: Any, begin: int, end: int | None = None) -> list[tf.Operation]:
    """The ops of a graph that have effects, from the `begin`-th to the one before the `end`-th."""
    return [op for op in graph.get_operations()[begin:end] if _has_effect(op)]


def writes(op: tf.Operation) -> bool:
    """Whether an op writes a variable, itself or in a branch, a loop or a call."""
    if not op.inputs or not graph_walk.is_stateful(op):
        return False
    if op.type in graph_walk.FUNCTION_ATTRIBUTES:
        return any(writes(each) for graph in graph_walk.list_inner_graphs(op) for each in graph.get_operations())
    return op.type.startswith(_WRITES) and op.type not in graph_walk.READS and op.inputs[0].dtype == tf.resource


def hold_back(ops: Sequence[tf.Operation], marks: Sequence[Mark], gates: dict[str, tf.Operation]) -> None:
    """Makes ops wait until all of some marks are written.

    The marks of several devices are joined on one, and their end is told to each device once.

    Args:
        ops: the ops.
        marks: the marks.
        gates: what is made for the devices of the ops; empty at first, and given again for further ops.
    """
    for op in ops:
        gate = gates.get(op.device)
        if gate is None:
            if _ALL not in gates:
                with tf.device(marks[0].device), tf.control_dependencies([mark.op for mark in marks]):
                    gates[_ALL] = tf.no_op("all_there")
            with tf.device(op.device), tf.control_dependencies([gates[_ALL]]):
                gate = gates[op.device] = tf.no_op("held_back")
        op._add_control_input(gate)


def _has_effect(op: tf.Operation) -> bool:
    is_effect = graph_walk.is_stateful(op) and op.type not in (*graph_walk.READS, "VarHandleOp", "Placeholder")
    return is_effect and op._get_control_flow_context() is None


def _variable(name: str, dtype: Any) -> tf.Tensor:
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=[], shared_name=name)


def _name(device: str, dtype: Any) -> str:
    """The name of a variable that has a value and that no graph uses."""
    names = _free.get((device, dtype))
    if names:
        return names.pop()
    name = f"replica_engine_mark_{next(_numbers)}"
    with tf.init_scope(), tf.device(device):
        tf.raw_ops.AssignVariableOp(resource=_variable(name, dtype), value=tf.zeros([], dtype))
    return name


def _kept(graph: Any, mark: Mark, *ops: tf.Operation) -> Mark:
    for op in ops:
        graph.experimental_acd_manager.run_independently(op)
    free = _free.setdefault((mark.device, mark._dtype), [])
    weakref.finalize(graph, free.append, mark._name).atexit = False
    return mark
