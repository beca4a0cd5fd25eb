"""Conditions of a joint operator: all replicas go the same way, so their values must be equal.

Equal by construction, such as one tensor or equal constants, costs nothing. Otherwise an op compares the values when
the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import control_flow
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
    agreement = Agreement(values, what, where, replicas)
    agreement.confirm()
    return agreement.value


class Agreement:
    """Like `agreed`, for an operator that may turn out not to be a joint one.

    Attributes:
        value: the value for all replicas. When the graph runs, it waits for the check.
    """

    def __init__(self, values: Sequence[Any], what: str, where: str, replicas: Sequence[Replica]):
        self._error: ReplicaMismatchError | None = None
        self._check: tf.Operation | None = None
        self.value = values[0]
        if all(value is self.value for value in values):
            return
        tensors = [tf.convert_to_tensor(value) for value in values]
        static = [tf.get_static_value(tensor) for tensor in tensors]
        self.value = tensors[0]
        if any(value is None for value in static):
            self._compare(tensors, what, where, replicas)
        elif any(value != static[0] for value in static):
            rows = list(zip(map(str, replicas), map(str, static), strict=True))
            self._error = ReplicaMismatchError.of_conditions(what, where, rows)

    def confirm(self) -> None:
        """The operator is a joint one: raises if constants differ."""
        if self._error is not None:
            raise self._error

    def withdraw(self) -> None:
        """The operator is not a joint one, so the values may differ: takes back the check."""
        if self._check is not None:
            control_flow.replace_input(self._check, 0, tf.constant(True))

    def _compare(self, tensors: Sequence[tf.Tensor], what: str, where: str, replicas: Sequence[Replica]) -> None:
        """Adds ops that compare the values when the graph runs."""
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
            self._check = tf.raw_ops.Assert(condition=alike, data=texts, summarize=1)
            with tf.control_dependencies([self._check]):
                self.value = tf.identity(scalars[0])
