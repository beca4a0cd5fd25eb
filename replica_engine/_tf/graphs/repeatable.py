"""Which ops do the same again when they are copied, with other inputs. Checked on TensorFlow 2.21.0.

An op without state does. So does one whose state is in a resource that is an input, because the copy has the resource
of its replica; a random op, whose seed is known; and a call, a branch or a loop around such ops. Other ops may have
state of their own, or an effect that belongs to one op: they are not known to be copied rightly.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

# OpDef by name: what ops of a type have.
from tensorflow.python.framework import op_def_registry as _op_def_registry

from replica_engine._tf.graphs import subgraphs

_STATELESS_ENOUGH = frozenset(
    (
        *("Assert", "CheckNumerics", "CheckNumericsV2", "Print", "PrintV2", "Timestamp"),
        *("Case", "If", "StatefulPartitionedCall", "While"),
    )
)
"""Types that are marked as having state, and have none."""

_WORDS = {
    "EagerPyFunc": "tf.py_function",
    "PyFunc": "tf.numpy_function",
    "PyFuncStateless": "tf.numpy_function",
    "VarHandleOp": "a variable that belongs to a graph",
    **dict.fromkeys(("Enter", "RefEnter", "Switch", "RefSwitch", "Merge", "RefMerge"), "control flow of TensorFlow 1"),
}
_STATES = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)


def refused(op: tf.Operation, known: dict[str, str | None]) -> str | None:
    """In words, what an op does that a copy may not do; None for an op that can be copied.

    Args:
        op: the op.
        known: the answers for functions that were looked at before, by name; new answers are added.
    """
    found = _refused_kind(op.type)
    if found is None and _calls(op.type):
        found = _refused_calls(op.graph, op.node_def, known)
    return found


@functools.cache
def _refused_kind(kind: str) -> str | None:
    if kind in _WORDS:
        return _WORDS[kind]
    if "Collective" in kind:
        return "a collective operation"
    definition = _op_def_registry.get(kind)
    if definition is None:
        return f"an operation of a type that is not known, {kind}"
    if not definition.is_stateful or kind in _STATELESS_ENOUGH:
        return None
    has_seed = any(attribute.name == "seed2" for attribute in definition.attr)
    has_resource = any(argument.type in _STATES for argument in definition.input_arg)
    return None if has_seed or has_resource else f"an operation with a state of its own, {kind}"


@functools.cache
def _calls(kind: str) -> bool:
    return any(attribute.type in ("func", "list(func)") for attribute in _op_def_registry.get(kind).attr)


def _refused_calls(graph: Any, node: Any, known: dict[str, str | None]) -> str | None:
    """In words, what the functions that a node calls do that a copy may not do; None if they can be copied."""
    for name in subgraphs.called(node):
        if name not in known:
            known[name] = None  # for a function that calls itself
            inside = subgraphs.definition(graph, name).node_def
            known[name] = next(filter(None, (_refused_node(graph, each, known) for each in inside)), None)
        if known[name] is not None:
            return known[name]
    return None


def _refused_node(graph: Any, node: Any, known: dict[str, str | None]) -> str | None:
    found = _refused_kind(node.op)
    return _refused_calls(graph, node, known) if found is None and _calls(node.op) else found
