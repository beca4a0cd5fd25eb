"""Conditions of a joint operator: all replicas go the same way, so their values must be equal.

Equal by construction, such as one tensor or equal constants, costs nothing. Otherwise an op compares the values when
the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine.engine import Replica
from replica_engine.errors import ReplicaMismatchError


def agreed(values: Sequence[Any], what: str, where: str, replicas: Sequence[Replica]) -> Any:
    """Returns one value for all replicas: replica 0's, after a check that the others are equal.

    Args:
        values: the condition, branch index or number of iterations of each replica.
        what: the operator, such as "tf.cond".
        where: the user's line.
        replicas: the replicas.

    Raises:
        ReplicaMismatchError: constants that differ. Values that differ when the graph runs raise
            tf.errors.InvalidArgumentError with the same text.
    """
    if all(value is values[0] for value in values):
        return values[0]
    tensors = [tf.convert_to_tensor(value) for value in values]
    static = [tf.get_static_value(tensor) for tensor in tensors]
    if any(value is None for value in static):
        return _compared(tensors, what, where, replicas)
    if any(value != static[0] for value in static):
        rows = list(zip(map(str, replicas), map(str, static), strict=True))
        raise ReplicaMismatchError.of_conditions(what, where, rows)
    return tensors[0]


def _compared(tensors: Sequence[tf.Tensor], what: str, where: str, replicas: Sequence[Replica]) -> tf.Tensor:
    """Replica 0's value. When the graph runs, it waits for ops that compare the values."""
    rows = [(str(replica), "") for replica in replicas]
    head, *lines, tail = str(ReplicaMismatchError.of_conditions(what, where, rows)).split("\n")
    with tf.device("CPU:0"):
        scalars = [tf.reshape(tensor, []) for tensor in tensors]
        data: list[Any] = [head]
        for line, scalar in zip(lines, scalars, strict=True):
            data += [line, scalar]
        alike = tf.reduce_all(tf.equal(tf.stack(scalars[1:]), scalars[0]))
        # raw_ops: tf.debugging.Assert makes a branch for the message, which costs more than the check.
        texts = [tf.convert_to_tensor(each) for each in [*data, tail]]
        check = tf.raw_ops.Assert(condition=alike, data=texts, summarize=1)
        with tf.control_dependencies([check]):
            return tf.identity(scalars[0])
