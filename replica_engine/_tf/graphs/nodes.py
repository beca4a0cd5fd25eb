"""Compares operations of two graphs, with the functions that they call; whose a name scope is.

Checked on TensorFlow 2.21.0.

The names of ops and functions have numbers of this process in them, so names are compared by their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import subgraphs

# Attributes that are not compared: the number of a gradient in this process, and a list that follows from the body.
_OWN = ("_gradient_op_type", "_read_only_resource_inputs")


def difference(
    first: tf.Operation, second: tf.Operation, renamed: Callable[[str], str], ignored: str | None = None
) -> str | None:
    """In words, how two ops differ; None if they do not.

    Args:
        first: an op.
        second: the op in its place in another graph.
        renamed: takes the name of an op of the second graph; returns the name of its counterpart in the first one.
        ignored: an attribute that may differ.
    """
    if first.type != second.type:
        return f"it makes {second.type}, and replica 0 {first.type}"
    if first._node_def == second._node_def:
        return None
    one, other = (tf.compat.v1.NodeDef.FromString(each._node_def) for each in (first, second))
    if list(one.input) != [_translated(each, renamed) for each in other.input]:
        return f"the inputs of {first.type} are others"
    for graph, node in ((first.graph, one), (second.graph, other)):
        if ignored is not None and ignored in node.attr:
            del node.attr[ignored]
        _expand(graph, node, {})
    for key in sorted({*one.attr, *other.attr}):
        if key not in one.attr or key not in other.attr or one.attr[key] != other.attr[key]:
            return f"the attribute {key} of {first.type} is another"
    if one.device != other.device:
        return f"the device of {first.type} is another"
    return None


def is_scope_of(scope: str, name: str) -> bool:
    """Whether a name scope belongs to a layer; TensorFlow adds a number to a scope that is entered again."""
    return scope == name or (scope.startswith(f"{name}_") and scope[len(name) + 1 :].isdigit())


def _expand(graph: Any, node: Any, known: dict[str, bytes]) -> None:
    """Replaces the names of functions in a node by the bodies of these functions."""
    for attribute in node.attr.values():
        kind = attribute.WhichOneof("value")
        if kind == "func":
            attribute.s = _body(graph, attribute.func.name, known)
        elif kind == "list" and attribute.list.func:
            attribute.list.s.extend([_body(graph, each.name, known) for each in attribute.list.func])
            del attribute.list.func[:]
    for key in _OWN:
        if key in node.attr:
            del node.attr[key]


def _body(graph: Any, name: str, known: dict[str, bytes]) -> bytes:
    """The body of a function as bytes, without names."""
    if name in known:
        return known[name]
    found = subgraphs.definition(graph, name)
    copy = type(found)()
    copy.CopyFrom(found)
    signature = copy.signature
    signature.name = ""
    names = {arg.name: f"a{index}" for index, arg in enumerate(signature.input_arg)}
    names |= {node.name: f"n{index}" for index, node in enumerate(copy.node_def)}
    for node in copy.node_def:
        _expand(graph, node, known)
        node.name = names[node.name]
        node.ClearField("experimental_debug_info")
        node.input[:] = [_translated(each, lambda each: names.get(each, each)) for each in node.input]
    for arg in signature.input_arg:
        arg.name = names[arg.name]
    for arg in signature.output_arg:
        arg.name = _translated(copy.ret[arg.name], lambda each: names.get(each, each))
    signature.control_output[:] = sorted(names.get(each, each) for each in copy.control_ret.values())
    for field in (copy.ret, copy.control_ret, copy.attr, copy.arg_attr, copy.resource_arg_unique_id):
        field.clear()
    known[name] = copy.SerializeToString(deterministic=True)
    return known[name]


def _translated(text: str, renamed: Callable[[str], str]) -> str:
    """The name of an input: of an op, of one of its outputs, or of a control input."""
    control = "^" if text.startswith("^") else ""
    head, *tail = text.removeprefix("^").split(":")
    return control + ":".join([renamed(head), *tail])
