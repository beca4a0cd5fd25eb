"""Replicas on threads: replicas that do not meet or differ, and notes on a user's exception."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, in_words, is_alike, warning
from replica_engine.errors.timeouts import ReplicaRow, count_of


class MergeCallMismatchError(ReplicaEngineError, RuntimeError):
    """The replicas of one run did not meet at the same merge calls.

    Raised out of `strategy.run` when some replicas finish while others wait in a merge call, or when the
    replicas wait in different merge functions. `rows` has one `ReplicaRow` for each replica.

    Make the same merge calls in the same order on every replica: move the call out of a branch that only some replicas
    take.

    Example:
        >>> row = ReplicaRow(0, 1, "CPU:0", "finished", 0, "")
        >>> MergeCallMismatchError.about([row], "a message").rows == (row,)
        True
    """

    rows: tuple[ReplicaRow, ...] = ()

    @classmethod
    def about(cls, rows: Sequence[ReplicaRow], message: str) -> MergeCallMismatchError:
        """The error about replicas that are where the rows say."""
        error = cls(message)
        error.rows = tuple(rows)
        return error


class StructureMismatchError(ReplicaEngineError, ValueError, AssertionError):
    """Replicas returned, or passed to a merge call, values of different structure.

    It is an AssertionError as well, because `tf.distribute` raises AssertionError in this case. `path` is the place
    in the structure, and `replicas` holds the indices of the two replicas that differ.

    Raised when all replicas have returned, or have come to the merge call. Give the same structure on every replica,
    with None where a replica has nothing.
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
    """merge_call was called where the replicas cannot meet: while a graph is built that only one replica sees.

    Merge calls work in tf.cond, tf.while_loop, tf.switch_case, AutoGraph's `if`, `for` and `while`, and nested
    `tf.function`s. They do not work in the places that this error's texts name.

    Raised where the call is made. Move the merge call out of that graph: reduce the value before it.
    """

    @classmethod
    def swallowed(cls) -> MergeCallGraphError:
        """User code caught the exception with which a nested `tf.function` becomes a sync point."""
        return cls(
            "`merge_call` called in a nested tf.function, which caught the exception that its trace is left with: a "
            "bare `except:`, an `except BaseException:` or a `return` in a `finally` stands around the merge call. "
            "Replicas enter such a function again, together, once the exception has left it. Write `except Exception:`."
        )


class NotInReplicaError(ReplicaEngineError, RuntimeError):
    """A replica's context was used from a thread that is not running that replica.

    Raised by the call. Use the context only in the function that `strategy.run` runs, and on its thread.
    """

    @classmethod
    def used_after_run(cls) -> NotInReplicaError:
        """A replica context was kept and used after the run that it belongs to."""
        return cls(
            "A replica context was used after its run had returned: no replica waits there any more. Call "
            "tf.distribute.get_replica_context() each time in the function that strategy.run runs. Outside of it, "
            'reduce the results: strategy.reduce("SUM", results, axis=None).'
        )


class VariableMismatchError(ReplicaEngineError, RuntimeError):
    """A replica asked for a variable that the first replica did not create.

    Raised where the replica creates the variable. Create the same variables, in the same order, on every replica; best
    before the run.
    """


class ReplicaUnwound(BaseException):
    """Raised inside a replica whose run was given up because another replica failed. Do not catch it.

    A replica that is paused in a merge call cannot continue after another replica failed. This exception unwinds its
    stack, so that `finally` blocks and context managers run. It never leaves `strategy.run`.
    """

    def __init__(self, message: str = "This run was given up because another replica, or the merge function, failed."):
        super().__init__(message)


def warn_different_lines(name: str, first: tuple[int, str], other: tuple[int, str]) -> str:
    """The warning that replicas met in one sync point from different lines: their values may not belong together."""
    return warning(
        "warn_different_lines",
        f"Replicas met in one {name} from different lines:\n"
        f"  replica {first[0]}: {first[1]}\n"
        f"  replica {other[0]}: {other[1]}\n"
        "Replicas meet in the order in which they come, so what these two lines bring is merged. If the replicas reach "
        "their sync points in different orders, values are mixed that do not belong together. Choose the values in the "
        "branch, and make the call after it, on one line for all replicas. If the lines belong together, nothing is "
        "wrong.",
    )


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


def note_workers(error: BaseException, tables: Sequence[str]) -> None:
    """Adds notes to an exception: where each worker of the job is."""
    for text in tables:
        add_note(error, text)


def note_abandoned(error: BaseException, rows: Sequence[ReplicaRow]) -> None:
    """Adds a note to an exception for each replica that could not be unwound and was abandoned."""
    for row in rows:
        stack = f"\nStack of {row.name}:\n{row.stack.rstrip()}" if row.stack else ""
        add_note(error, f"abandoned, because it did not return: {row}{stack}")
