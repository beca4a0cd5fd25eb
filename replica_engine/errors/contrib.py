"""Misuse of TensorFlow's contrib API of 2018."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError


class ContribError(ReplicaEngineError, ValueError):
    """A method of the contrib `TPUStrategy` was called with unusable arguments.

    Raised by the methods that take the place of those of 2018: aggregations, destinations and hosts. Pass one of the
    values that the message names, or move the call to today's name.
    """

    @classmethod
    def bad_aggregation(cls, given: object, known: Sequence[str]) -> ContribError:
        """The aggregation is unknown, or does not reduce."""
        return cls(
            f"Values cannot be reduced with the aggregation {given}. The aggregation must be one of {', '.join(known)}."
        )
