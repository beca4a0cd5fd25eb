"""Misuse of the names of 2018."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError


class ContribError(ReplicaEngineError, ValueError):
    """A method of the contrib `TPUStrategy` was called as it cannot be."""

    @classmethod
    def bad_aggregation(cls, given: object, known: Sequence[str]) -> ContribError:
        """No aggregation that reduces."""
        return cls(f"Values cannot be reduced with the aggregation {given}; it is one of {', '.join(known)}.")

    @classmethod
    def none_in_tower_context(cls, name: str) -> ContribError:
        """An output that is not aggregated, in tower context."""
        return cls(
            f"The output {name!r} is set in tower context and needs an aggregation: SUM, MEAN or ONLY_FIRST_TOWER. For "
            "each tower's value set it in the step function itself, which is in cross-tower context."
        )

    @classmethod
    def bad_destination(cls, given: str, host: str) -> ContribError:
        """A device that results do not go to."""
        return cls(
            f"A reduced value cannot be put on {given!r}: outside a step all values are on the host. Write {host!r}, "
            "distribution.get_host_cpu_device(0), or a variable of this strategy."
        )

    @classmethod
    def no_host(cls, given: object, count: int) -> ContribError:
        """A host that is not there."""
        return cls(f"There is no host {given}; hosts are numbered from 0 to {count - 1}.")
