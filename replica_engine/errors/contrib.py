"""Misuse of TensorFlow's contrib API of 2018."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError


class ContribError(ReplicaEngineError, ValueError):
    """A method of the contrib `TPUStrategy` was called with unusable arguments."""

    @classmethod
    def bad_aggregation(cls, given: object, known: Sequence[str]) -> ContribError:
        """The aggregation is unknown, or does not reduce."""
        return cls(
            f"Values cannot be reduced with the aggregation {given}. The aggregation must be one of {', '.join(known)}."
        )

    @classmethod
    def none_in_tower_context(cls, name: str) -> ContribError:
        """An output was set in tower context without an aggregation."""
        return cls(
            f"The output {name!r} is set in tower context and needs an aggregation: SUM, MEAN or ONLY_FIRST_TOWER. To "
            "keep the value of each tower, set the output in the step function itself, which runs in cross-tower "
            "context."
        )

    @classmethod
    def bad_destination(cls, given: str, host: str) -> ContribError:
        """The destination is a device that cannot hold a result outside a step."""
        return cls(
            f"A reduced value cannot be put on {given!r}: outside a step all values are on the host. Pass {host!r}, "
            "distribution.get_host_cpu_device(0), or a variable of this strategy as the destination."
        )

    @classmethod
    def no_host(cls, given: object, count: int) -> ContribError:
        """No host has this number."""
        return cls(f"There is no host {given}; hosts are numbered from 0 to {count - 1}.")
