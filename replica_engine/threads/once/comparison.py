"""`trace_once="checked"`: compares what replicas 0 and 1 have traced, before the operations of replica 0 are copied.

Replica 1 traces a template of its own. Its operations must have the types, attributes and inputs of replica 0's
operations, in the same order. Its holes must stand for the same values. From outside it must use the same values, or
its own components of the same variables. Operations that only make variables are left out, because replica 0 alone
makes variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import components, distribute, eager
from replica_engine._tf.graphs import nodes, subgraphs
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.errors import TraceOnceError
from replica_engine.errors.base import shown
from replica_engine.threads.once.template import Segment, Template
from replica_engine.values.structure import open_level

_SEED = "seed2"


class Comparison:
    """Compares what two replicas trace, segment by segment.

    Args:
        first: the template of replica 0.
        second: the template of replica 1.
    """

    def __init__(self, first: Template, second: Template):
        self._first, self._second = first, second
        self._names: dict[str, str] = {}  # by the name of an op of the second, the name of its counterpart
        self._holes = 0

    def segments(self, first: Segment, second: Segment, where: str) -> None:
        """Compares what both have traced since the last time.

        Args:
            first: the segment of replica 0.
            second: the segment of replica 1.
            where: the user's line at the end of the segments.

        Raises:
            TraceOnceError: they differ.
        """
        self._compare_holes(where)
        made = _without_making(first.operations, self._first.made_for_variables)
        self._compare_captures(first, second, made, where)
        for one, other in zip(made, second.operations, strict=False):
            found = nodes.difference(one, other, self._renamed, _SEED if _draw(first, one, second, other) else None)
            if found is not None:
                raise TraceOnceError.differs(found, user_line(other) or where)
            self._names[other.name] = one.name
        if len(made) != len(second.operations):
            longer = max(made, second.operations, key=len)
            more = longer[min(len(made), len(second.operations))]
            who = 0 if longer is made else 1
            raise TraceOnceError.differs(f"replica {who} alone makes {more.type}", user_line(more) or where)

    def values(self, first: Any, second: Any, what: str, where: str) -> None:
        """Compares what both have given to a merge function, or returned.

        Args:
            first: that of replica 0.
            second: that of replica 1.
            what: what it is.
            where: the user's line.

        Raises:
            TraceOnceError: they differ.
        """
        if isinstance(first, tf.Tensor) and not eager.is_eager(first) and first.graph is self._first.graph:
            same = isinstance(second, tf.Tensor) and not eager.is_eager(second)
            same = same and self._renamed(second.op.name) == first.op.name and second.value_index == first.value_index
            if same:
                return self.values(eager.attributes(first), eager.attributes(second), what, where)
        elif isinstance(first, tf.Operation):
            same = isinstance(second, tf.Operation) and self._renamed(second.name) == first.name
        elif isinstance(first, distribute.UnreadVariable):
            same = isinstance(second, distribute.UnreadVariable) and _same_value(first._handle, second._handle)
            if same:
                return self.values(first._parent_op, second._parent_op, what, where)
        elif isinstance(first, tf.Variable) and isinstance(second, tf.Variable) and first is not second:
            same = hasattr(first, "_handle") and hasattr(second, "_handle")
            same = same and _same_value(first._handle, second._handle)
        elif isinstance(first, np.ndarray):
            same = type(first) is type(second) and (first.dtype, first.shape) == (second.dtype, second.shape)
            same = same and repr(first.tolist()) == repr(second.tolist())
        elif tf.is_tensor(first) and not isinstance(first, tf.Variable) and hasattr(first, "_type_spec"):
            same = getattr(second, "_type_spec", None) == first._type_spec
            if same:
                one, other = (tf.nest.flatten(each, expand_composites=True) for each in (first, second))
                return self.values(one, other, what, where)
        else:
            levels = open_level(first), open_level(second)
            if levels[0] is not None and levels[1] is not None and levels[0][0].key == levels[1][0].key:
                for one, other in zip(levels[0][1], levels[1][1], strict=True):
                    self.values(one, other, what, where)
                return None
            same = first is second or (type(first) is type(second) and repr(first) == repr(second))
        if not same:
            raise TraceOnceError.differs(f"{what} are {shown(second)}, and on replica 0 {shown(first)}", where)
        return None

    def original(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """The tensor of the second template for which tensors stand, one in each copy of the first; None if none is."""
        found = self._first.original(tensors)
        if found is None:
            return None
        name = next((second for second, first in self._names.items() if first == found.op.name), found.op.name)
        return self._second.graph.get_operation_by_name(name).outputs[found.value_index]

    def _compare_holes(self, where: str) -> None:
        holes = self._first.holes[self._holes :], self._second.holes[self._holes :]
        if len(holes[0]) != len(holes[1]):
            raise TraceOnceError.differs("only one of them uses the replica id", where)
        for one, other in zip(*holes, strict=True):
            self._names[other.name] = one.name
        self._holes = len(self._first.holes)

    def _compare_captures(self, first: Segment, second: Segment, made: Sequence[tf.Operation], where: str) -> None:
        captures = first.captures
        if self._first.made_for_variables:
            used = {tensor.op.name for op in made for tensor in op.inputs}
            captures = [each for each in captures if each[1].op.name in used]
        if len(captures) != len(second.captures):
            counts = len(second.captures), len(captures)
            raise TraceOnceError.differs("it uses {} values from outside, and replica 0 {}".format(*counts), where)
        for (one, inside), (other, twin) in zip(captures, second.captures, strict=True):
            if not _same_value(one, other):
                told = f"it uses {shown(other)} from outside, and replica 0 {shown(one)}"
                raise TraceOnceError.differs(told, where)
            self._names[twin.op.name] = inside.op.name

    def _renamed(self, name: str) -> str:
        return self._names.get(name, name)


def _same_value(one: Any, other: Any) -> bool:
    """Whether two replicas use the same value from outside, or each its own component of a variable."""
    found, twin = components.component(one), components.component(other)
    if found is None or twin is None or not (found.is_twin and twin.is_twin):
        return one is other
    return found.variable() is twin.variable() and (found.replica, twin.replica) == (0, 1)


def _draw(first: Segment, one: tf.Operation, second: Segment, other: tf.Operation) -> bool:
    """Whether both are random ops whose seeds were drawn for them."""
    return one.name in first.seeds and other.name in second.seeds


def _without_making(operations: Sequence[tf.Operation], making: set[str]) -> list[tf.Operation]:
    """The ops without those that only the making of variables needs; `making` gets the names of these as well."""
    if making:
        for op in reversed(operations):
            users = [user.name for tensor in op.outputs for user in tensor.consumers()]
            if users and making.issuperset(users) and not subgraphs.is_stateful(op):
                making.add(op.name)
    return [op for op in operations if op.name not in making]
