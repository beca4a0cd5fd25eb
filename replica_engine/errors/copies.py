"""`MirroredStrategy(trace_once=...)`: what cannot be copied from replica 0 to the others."""

from __future__ import annotations

from replica_engine.errors.base import ReplicaEngineError, at

_INSTEAD = (
    "With trace_once, replica 0's Python code runs alone, and its operations are copied for the other replicas. Leave "
    "out trace_once, and each replica is traced."
)


class TraceOnceError(ReplicaEngineError, RuntimeError):
    """What replica 0 has traced cannot be copied for the other replicas.

    Before the first sync point there is no such error: each replica is traced, and a line is logged.

    Attributes:
        reason: what cannot be copied, and the user's line.
    """

    reason = ""

    @classmethod
    def not_copied(cls, what: str, where: str) -> TraceOnceError:
        """It is used after the first sync point, so that it is too late to trace each replica."""
        error = cls(f"The step uses {what}{at(where)} after a sync point, and that cannot be copied. {_INSTEAD}")
        error.reason = f"it uses {what}{at(where)}"
        return error

    @classmethod
    def with_variable(cls, reason: str) -> TraceOnceError:
        """It is used in the run that makes a variable, which cannot begin again."""
        return cls(
            f"The step makes a variable, and {reason}, which cannot be copied. Make variables before the first step: "
            f"build the model and the optimizer in strategy.scope(). {_INSTEAD}"
        )

    @classmethod
    def kept(cls, where: str) -> TraceOnceError:
        """A tensor of a replica is used outside the replicas."""
        return cls(
            f"A tensor of replica 0 is used{at(where)}, outside the run: it left the replica in a Python object. "
            "Return it from the function that the replicas run; strategy.run gives the value of each replica. "
            f"{_INSTEAD}"
        )

    @classmethod
    def own_gradient(cls, what: str, where: str) -> TraceOnceError:
        """A tape outside the replicas differentiates what has no gradient in copies."""
        return cls(
            f"The tape{at(where)} is outside the replicas and differentiates a {what} inside, whose gradient belongs "
            f"to replica 0: there is no copy of it. Put the tape into the function that the replicas run. {_INSTEAD}"
        )

    @classmethod
    def differs(cls, what: str, where: str) -> TraceOnceError:
        """With `trace_once="checked"`, replica 1 has traced something else than replica 0."""
        return cls(
            f'trace_once="checked": replica 1 does not do what replica 0 does{at(where)}: {what}. Python code that '
            f"depends on the replica, or on what an earlier call left behind, cannot be traced once. {_INSTEAD}"
        )


def traced_each(function: str, reason: str) -> str:
    """The log's line about a function of which each replica is traced, although `trace_once` is set."""
    return f"trace_once: each replica of {function} is traced by itself: {reason}"
