"""Replicas on threads: replicas that do not meet or differ, and notes on a user's exception."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, in_words, is_alike
from replica_engine.errors.timeouts import ReplicaRow, count_of, table


class MergeCallMismatchError(ReplicaEngineError, RuntimeError):
    """The replicas of one run did not meet at the same merge calls.

    Raised out of `strategy.run` when some replicas finish while others wait in a merge call, or when the
    replicas wait in different merge functions. `rows` has one `ReplicaRow` for each replica.

    Example:
        >>> row = ReplicaRow(0, 1, "CPU:0", "finished", 0, "")
        >>> MergeCallMismatchError.different_counts([row]).rows == (row,)
        True
    """

    rows: tuple[ReplicaRow, ...] = ()

    @classmethod
    def different_counts(cls, rows: Sequence[ReplicaRow]) -> MergeCallMismatchError:
        """Some replicas finished, while others wait for them in a merge call."""
        error = cls(
            "Some replicas made a different number of merge_call() calls:\n"
            f"{table(rows)}\n"
            "Every replica must make the same merge calls in the same order; all_reduce, all_gather, "
            "optimizer.apply_gradients and assignments to aggregated variables are merge calls too. "
            "Move the call out of the branch that only some replicas take, or let every replica make it "
            "(with zeros, for example, if it has nothing to add)."
        )
        error.rows = tuple(rows)
        return error

    @classmethod
    def different_functions(cls, rows: Sequence[ReplicaRow]) -> MergeCallMismatchError:
        """All replicas wait, but in different merge functions."""
        error = cls(
            "The replicas met in different merge functions:\n"
            f"{table(rows)}\n"
            "A merge call runs one function for all replicas, so every replica must pass the same function. "
            "Choose the function before the branch on the replica id, or pass the value that differs as an argument: "
            "merge_call(merge_fn, args=(value,))."
        )
        error.rows = tuple(rows)
        return error


class StructureMismatchError(ReplicaEngineError, ValueError, AssertionError):
    """Replicas returned, or passed to a merge call, values of different structure.

    It is an AssertionError as well, because `tf.distribute` raises AssertionError in this case. `path` is the place
    in the structure, and `replicas` holds the indices of the two replicas that differ.
    """

    path = ""
    replicas: tuple[int, ...] = ()

    @classmethod
    def between(
        cls, what: str, path: str, replicas: tuple[int, int], details: tuple[str, str]
    ) -> StructureMismatchError:
        """Names two replicas that differ, and what each has at that place of the structure."""
        first, second = replicas
        error = cls(
            f"{what} differ in structure at `{path}`: replica {first} has {details[0]}, "
            f"replica {second} has {details[1]}. Every replica must give the same structure: the same "
            "lengths, the same keys, the same kinds of containers. Put None where a replica has nothing."
        )
        error.path, error.replicas = path, replicas
        return error


class MergeCallGraphError(ReplicaEngineError, RuntimeError):
    """merge_call was called while a graph was being built other than the graph in which `run` was called."""

    @classmethod
    def inside(cls, replica: str, where: str) -> MergeCallGraphError:
        """The call is in a graph that is being built inside a replica."""
        return cls(
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

    @classmethod
    def other_thread(cls, thread: str) -> NotInReplicaError:
        """The call comes from a thread that the user started."""
        return cls(
            f"merge_call was called on the thread {thread!r}, which is not running a replica of this context. Call it "
            "from the function that strategy.run runs, on the thread that runs it: another thread can compute values, "
            "and the replica's thread passes them to merge_call."
        )


class VariableMismatchError(ReplicaEngineError, RuntimeError):
    """A replica asked for a variable that the first replica did not create."""

    @classmethod
    def not_created(cls, name: str | None, replica: str, where: str, created: Sequence[str]) -> VariableMismatchError:
        """The replica needs a variable that replica 0 creates, and replica 0 has not created it."""
        name = name or "without a name"
        made = ", ".join(created) if created else "none"
        return cls(
            f"Tried to create variable {name} with mismatching name on {replica}, at {where}: replica 0, which "
            f"creates each variable for all replicas, has not created it in this run (it created: {made}). "
            "Create the same variables, in the same order and under the same names, on every replica, "
            "preferably before the run, under `with strategy.scope():`."
        )


class ReplicaUnwound(BaseException):
    """Raised inside a replica whose run was given up because another replica failed. Do not catch it.

    A replica that is paused in a merge call cannot continue after another replica failed. This exception unwinds its
    stack, so that `finally` blocks and context managers run. It never leaves `strategy.run`.
    """

    def __init__(self, message: str = "This run was given up because another replica, or the merge function, failed."):
        super().__init__(message)


def note_failure(error: BaseException, row: ReplicaRow, others: Iterable[tuple[ReplicaRow, BaseException]]) -> None:
    """Adds notes to a user's exception: which replica raised it, and which other replicas of the run failed."""
    others = list(others)
    # Compare now: once `error` has notes, no exception is equal to it.
    alike = [other for other, raised in others if is_alike(raised, error)]
    calls = count_of(row.merge_calls, row.points)
    where = f" (the last: {row.where})" if row.where else ""
    add_note(error, f"replica {row.replica} of {row.size}, {row.device}, after {calls}{where}")
    note_failed_alike(error, [other.replica for other in alike])
    for other, raised in others:
        if other not in alike:
            what = f"replica {other.replica} of {other.size}, {other.device}"
            add_note(error, f"also failed: {what}: {in_words(raised)}")


def note_failed_alike(error: BaseException, replicas: Sequence[int]) -> None:
    """Adds a note to an exception: which other replicas raised an equal one."""
    if replicas:
        numbers = ", ".join(map(str, sorted(set(replicas))))
        add_note(error, f"also failed, in the same way: replica{'s' if len(set(replicas)) > 1 else ''} {numbers}")


def note_merge_failure(error: BaseException, name: str, where: str) -> None:
    """Adds a note to an exception of a merge function: where the replicas met."""
    add_note(error, f"raised in merge function {name}, in cross-replica context; the replicas met at {where}")


def note_sync_points(error: BaseException, lines: Sequence[str], path: str | None) -> None:
    """Adds notes to an exception: the last sync points of its run, and the path of the file with the whole record."""
    if lines:
        add_note(error, "last sync points of the run:\n" + "\n".join(f"  {line}" for line in lines))
    if path:
        add_note(error, f"the full record of the run: {path}")


def note_abandoned(error: BaseException, rows: Sequence[ReplicaRow]) -> None:
    """Adds a note to an exception for each replica that could not be unwound and was abandoned."""
    for row in rows:
        stack = f"\nStack of {row.name}:\n{row.stack.rstrip()}" if row.stack else ""
        add_note(error, f"abandoned, because it did not return: {row}{stack}")
