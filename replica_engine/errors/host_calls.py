"""Host calls of compiled bodies (`outside_compilation`): wrong calls, wrong results, and notes on failures."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, at


class NestedHostCallError(ReplicaEngineError, NotImplementedError):
    """outside_compilation was called inside a function that outside_compilation runs.

    Raised while the body is traced. Call the inner function directly: the code already runs on the host.
    """


class HostResultError(ReplicaEngineError, ValueError, TypeError):
    """A host function returned a value that the compiled body cannot use, or its declaration is not one of tensors.

    Raised by `xla.returns`, while the body is traced, or in a run whose result differs from what the body was compiled
    for. Return tensors of the same structure, dtype and shape each time, or declare them with `xla.returns`.

    Attributes:
        failure: what tracing the host function raised, if that is why its results are not known.
    """

    failure: Exception | None = None


class HostAccessError(ReplicaEngineError, RuntimeError):
    """A host function, or the iterator of a device loop, uses what the running program keeps on the devices.

    The devices run one program at a time, and the running program waits for the host function. Pass values of variables
    and tensors as arguments, assign results in the body, and use devices before or after the run.
    """

    @classmethod
    def variable(cls, name: str, where: str) -> HostAccessError:
        """The host function uses a variable whose values are on the devices."""
        return cls(
            f"The function that outside_compilation{at(where)} runs on the host uses the variable {name!r}, whose "
            "values are on the devices while the body runs. Pass the variable's value as an argument, "
            "outside_compilation(fn, variable.read_value()), and assign results in the body."
        )

    @classmethod
    def in_inputs(cls) -> HostAccessError:
        """The iterator of a device loop uses devices while the loop runs."""
        return cls(
            "The iterator of a device loop uses devices: it runs a compiled body, or accesses a variable of a "
            "strategy. The devices run one program at a time, and the loop waits for the iterator. Use the devices "
            "before or after run_steps."
        )


def at_result(name: str) -> str:
    """Where in the structure that a host function returned; "" for a single tensor."""
    return f" at result{name}" if name else ""


def moved_to_host(fn: str, pieces: Sequence[tuple[str, str, bool]]) -> str:
    """The warning, logged once for each body, that some ops of the body run on the host.

    Args:
        fn: the name of the body.
        pieces: the ops of each host call, the user's line, and whether the call is in a loop.
    """
    lines = [
        f"  {ops}{at(where)}" + (": in a loop, so each iteration may make a call" if in_loop else "")
        for ops, where, in_loop in pieces
    ]
    said = (
        f"XLA cannot compile all of `{fn}`. Each replica's program calls the host for these ops (for checks, only when "
        "they fail; soft_placement=False makes the other ops an error):"
    )
    return "\n".join([said, *lines])
