"""Replicas on threads: what goes wrong between them, and what is added to a user's exception."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replica_engine.errors.base import ReplicaEngineError, add_note


@dataclass(frozen=True)
class ReplicaRow:
    """What is known of one replica when something went wrong; a row in an error's table.

    Attributes:
        replica: its index in the run, from 0.
        size: how many replicas the run has.
        device: its device, in the short form "CPU:1".
        state: what it is doing, in words.
        merge_calls: how many sync points it has reached in this run.
        where: its last sync point with file and line, or "" when it reached none.
    """

    replica: int
    size: int
    device: str
    state: str
    merge_calls: int
    where: str

    def __str__(self) -> str:
        calls = f"{self.merge_calls} merge call{'' if self.merge_calls == 1 else 's'}"
        where = f", last: {self.where}" if self.where else ""
        return f"replica {self.replica} of {self.size} ({self.device}): {self.state}; {calls}{where}"


def _table(rows: Iterable[ReplicaRow]) -> str:
    return "\n".join(f"  {row}" for row in rows)


class MergeCallMismatchError(ReplicaEngineError, RuntimeError):
    """The replicas of one run did not meet at the same merge calls.

    Raised out of `strategy.run` when some replicas finish while others wait in a merge call, or when they
    wait in different merge functions. `rows` has one `ReplicaRow` a replica.

    Example:
        >>> row = ReplicaRow(0, 1, "CPU:0", "finished", 0, "")
        >>> MergeCallMismatchError.different_counts([row]).rows == (row,)
        True
    """

    def __init__(self, message: str, rows: Sequence[ReplicaRow] = ()):
        super().__init__(message)
        self.rows = tuple(rows)

    @classmethod
    def different_counts(cls, rows: Sequence[ReplicaRow]) -> MergeCallMismatchError:
        """Some replicas finished, others wait for them in a merge call."""
        return cls(
            "Some replicas made a different number of merge_call() calls:\n"
            f"{_table(rows)}\n"
            "Every replica must make the same merge calls in the same order; all_reduce, all_gather, "
            "optimizer.apply_gradients and assignments to aggregated variables are merge calls too. "
            "Move the call out of the branch that only some replicas take, or let every replica make it "
            "(with zeros, say, where there is nothing to add).",
            rows,
        )

    @classmethod
    def different_functions(cls, rows: Sequence[ReplicaRow]) -> MergeCallMismatchError:
        """All replicas wait, but not in the same merge function."""
        return cls(
            "The replicas met in different merge functions:\n"
            f"{_table(rows)}\n"
            "A merge call runs one function for all replicas, so every replica must pass the same one. "
            "Choose the function before the branch on the replica id, or pass what differs as an argument: "
            "merge_call(merge_fn, args=(value,)).",
            rows,
        )


class StructureMismatchError(ReplicaEngineError, ValueError, AssertionError):
    """Replicas returned, or passed to a merge call, values of different structure.

    It is an AssertionError as well because `tf.distribute` raises that here. `path` says where in the
    structure, `replicas` names the two that differ.
    """

    def __init__(self, what: str, path: str, replicas: tuple[int, int], details: tuple[str, str]):
        first, second = replicas
        super().__init__(
            f"{what} differ in structure at `{path}`: replica {first} has {details[0]}, "
            f"replica {second} has {details[1]}. Every replica must give the same structure: the same "
            "lengths, the same keys, the same kinds of containers. Put None where a replica has nothing."
        )
        self.path = path
        self.replicas = replicas


class MergeCallGraphError(ReplicaEngineError, RuntimeError):
    """merge_call was made while another graph was being built than the one `run` was called in."""

    def __init__(self, replica: str, where: str):
        super().__init__(
            f"`merge_call` called while defining a new graph or a tf.function, by {replica}, at {where}. "
            "The merge function runs where `strategy.run` was called and cannot see tensors of a graph that "
            "is still being built inside one replica. The usual causes: a nested @tf.function, a tf.cond or "
            "a tf.while_loop (AutoGraph makes them from `if` and `while` on tensors) around all_reduce, "
            "apply_gradients or merge_call. Write instead:\n"
            "    @tf.function\n"
            "    def step(batch):\n"
            "        return strategy.run(fn, args=(batch,))   # and no tf.function inside fn\n"
            "and move the control flow out of fn, or the merge call out of the control flow. The replica id is a "
            "tensor; to branch on it in Python: tf.get_static_value(context.replica_id_in_sync_group)."
        )


class NotInReplicaError(ReplicaEngineError, RuntimeError):
    """A replica's context was used from a thread that is not running that replica."""

    def __init__(self, thread: str):
        super().__init__(
            f"merge_call was made from thread {thread!r}, which is not running a replica of this context. Call it "
            "from the function that strategy.run runs, on the thread that runs it: a thread of your own "
            "can compute values, and the replica passes them to merge_call."
        )


class VariableMismatchError(ReplicaEngineError, RuntimeError):
    """A replica asked for a variable that the first replica did not create."""

    def __init__(self, name: str | None, replica: int, created: Sequence[str]):
        name = name or "without a name"
        made = ", ".join(created) if created else "none"
        super().__init__(
            f"Tried to create variable {name} with mismatching name on device {replica}: replica 0, which "
            f"creates each variable for all replicas, has not created it in this run (it created: {made}). "
            "Create the same variables, in the same order and under the same names, on every replica; "
            "best before the run, under `with strategy.scope():`."
        )


class ReplicaTimeoutError(ReplicaEngineError, TimeoutError):
    """A replica did not come back in `timeout` seconds. `rows` has one `ReplicaRow` a replica."""

    def __init__(self, timeout: float, rows: Sequence[ReplicaRow], stacks: str = ""):
        super().__init__(
            f"A replica did not reach its next sync point in {timeout:g} s:\n{_table(rows)}\n"
            f"Where it was:\n{stacks}\n"
            "It was given up; pass a longer timeout= if the step needs it."
        )
        self.rows = tuple(rows)


class ReplicaUnwound(BaseException):
    """Raised inside a replica whose run is over because another failed. Let it pass.

    A replica paused in a merge call is left in no state to go on; this exception takes its stack down, so
    that `finally` blocks and context managers run. It never leaves `strategy.run`.
    """

    def __init__(self) -> None:
        super().__init__("This run was given up because another replica, or the merge function, failed.")


def slow_replicas(seconds: float, rows: Sequence[ReplicaRow], stacks: str) -> str:
    """The warning about replicas that have been running for long; `seconds` since their last sync point."""
    return (
        f"A replica has not reached its next sync point for {seconds:g} s:\n{_table(rows)}\n"
        f"Stacks of the replicas that run:\n{stacks}"
    )


def note_failure(error: BaseException, row: ReplicaRow, others: Iterable[tuple[ReplicaRow, BaseException]]) -> None:
    """Adds to a user's exception which replica raised it, and what else failed in the same run."""
    calls = f"{row.merge_calls} merge call{'' if row.merge_calls == 1 else 's'}"
    where = f" (the last: {row.where})" if row.where else ""
    add_note(error, f"replica {row.replica} of {row.size}, {row.device}, after {calls}{where}")
    for other, raised in others:
        what = "".join(traceback.format_exception_only(raised)).strip()
        add_note(error, f"also failed: replica {other.replica} of {other.size}, {other.device}: {what}")


def note_merge_failure(error: BaseException, name: str, where: str) -> None:
    """Adds to an exception out of a merge function where the replicas had met."""
    add_note(error, f"raised in merge function {name}, in cross-replica context; the replicas met at {where}")


def note_abandoned(error: BaseException, rows: Sequence[ReplicaRow]) -> None:
    """Adds to an exception which replicas could not be taken down and were left behind."""
    for row in rows:
        add_note(error, f"abandoned, it did not come back: {row}")
