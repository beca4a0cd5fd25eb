"""Whether a tensor of a body that is being traced is equal on all replicas, as far as the few ops before it tell.

`differences` knows more, once a body is traced. This is asked while ops are made, to leave out a collective that would
give each replica the value that it has: a counter of steps is such a value.
"""

from __future__ import annotations

import tensorflow as tf

from replica_engine.xla.state.device_value import home_of

_PLAIN = frozenset(("Add", "AddV2", "Cast", "Identity", "Maximum", "Minimum", "Mul", "Neg", "Sub"))
_MOST = 16  # ops that are looked at


def is_equal_everywhere(tensor: tf.Tensor) -> bool:
    """Whether a tensor is known to be computed of constants, and of variables that have one value on all replicas."""
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
