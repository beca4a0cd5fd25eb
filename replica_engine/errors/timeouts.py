"""Who is where, as a table: in warnings that something does not come back, and in the error that it did not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replica_engine.errors.base import ReplicaEngineError

IN_MERGE = "in the merge function "
"""How a coordinator's state begins that is in one."""

FOR_ITS_TURN = "waiting for its turn on the devices"
"""The state of a coordinator while another program runs there."""


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
        seconds: how long it has been in that state; None if that does not matter.
        stack: of its thread, if it runs Python.
        points: what its sync points are: "merge call", or "host call" of a compiled program.
    """

    replica: int
    size: int
    device: str
    state: str
    merge_calls: int
    where: str
    seconds: float | None = None
    stack: str = ""
    points: str = "merge call"

    @property
    def name(self) -> str:
        """Who it is: "replica 1 of 4 (CPU:1)"."""
        return f"replica {self.replica} of {self.size} ({self.device})"

    def __str__(self) -> str:
        where = f", last: {self.where}" if self.where else ""
        return f"{self.name}: {self.state}{_for(self.seconds)}; {count_of(self.merge_calls, self.points)}{where}"


@dataclass(frozen=True)
class CoordinatorRow:
    """What is known of the thread that called `run`.

    Attributes:
        thread: its name.
        state: what it is doing, in words.
        seconds: for how long.
        stack: of the thread, if it runs what may be the user's.
    """

    thread: str
    state: str
    seconds: float | None = None
    stack: str = ""

    @property
    def name(self) -> str:
        """Who it is: "coordinator (MainThread)"."""
        return f"coordinator ({self.thread})"

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{_for(self.seconds)}"


class ReplicaTimeoutError(ReplicaEngineError, TimeoutError):
    """A replica, a merge function, a host call or a compiled program did not come back in `timeout` seconds.

    Attributes:
        rows: one `ReplicaRow` a replica, as it was when time ran out.
        coordinator: of the thread that called `run`, a `CoordinatorRow`.
        table: both as text, with the stacks.
    """

    rows: tuple[ReplicaRow, ...] = ()
    coordinator: CoordinatorRow | None = None
    table = ""

    @classmethod
    def after(
        cls, timeout: float, rows: Sequence[ReplicaRow], coordinator: CoordinatorRow | None = None
    ) -> ReplicaTimeoutError:
        """The time is up, and this is where everybody is."""
        stand = table(rows, coordinator, stacks=True)
        compiled = {row.points for row in rows} == {"host call"}
        kept = (
            f"variables are as they were before it. {_TOGETHER}"
            if compiled
            else "updates that were merged before stay."
        )
        error = cls(
            f"{_what(rows, coordinator)} in {timeout:g} s (timeout=):\n{stand}\n"
            f"The run was given up; {kept} Pass a longer timeout= if the step needs it."
        )
        error.rows, error.coordinator, error.table = tuple(rows), coordinator, stand
        return error


def slow_replicas(seconds: float, rows: Sequence[ReplicaRow], coordinator: CoordinatorRow) -> str:
    """The warning about a run in which nobody has reached a sync point, or come back from it, for `seconds`."""
    return (
        f"{_what(rows, coordinator)} in {seconds:.3g} s:\n{table(rows, coordinator, stacks=True)}\n"
        "The run waits on. Ctrl-C ends it, and timeout= of the strategy makes an error of it."
    )


def slow_program(name: str, seconds: float, rows: Sequence[ReplicaRow], coordinator: CoordinatorRow) -> str:
    """The warning about a compiled program that has been running for long."""
    doing = "waiting for its turn" if coordinator.state == FOR_ITS_TURN else "running"
    return (
        f"The compiled program of `{name}` has been {doing} on {len(rows)} replicas for {seconds:.3g} s:\n"
        f"{table(rows, coordinator, stacks=True)}\n"
        f"{_TOGETHER} Ctrl-C ends the wait."
    )


_TOGETHER = (
    "Its replicas may wait for each other: every replica must reach the same cross-replica operations, so there can be "
    "none in a branch on the replica id."
)


def slow_trace(name: str, seconds: float, coordinator: CoordinatorRow) -> str:
    """The warning about a body that is being traced for long."""
    return (
        f"`{name}` has been traced for {seconds:.3g} s:\n{table([], coordinator, stacks=True)}\n"
        "While a body is traced all of its Python runs, both sides of a branch too, and functions that run on the host "
        "are tried once, unless they say what they return (xla.returns)."
    )


def slow_compile(name: str, replicas: int, seconds: float) -> str:
    """The warning about a program that is being compiled for long."""
    return (
        f"XLA has been compiling `{name}` for {replicas} replicas for {seconds:.3g} s. Large convolutional networks "
        "take minutes on CPU; MirroredStrategy compiles nothing."
    )


def slow_function(name: str, seconds: float, coordinator: CoordinatorRow) -> str:
    """The warning about a `tf.function` around a run that has not returned for long."""
    return (
        f"The tf.function `{name}` has not returned for {seconds:.3g} s:\n{table([], coordinator, stacks=True)}\n"
        "A step that is traced runs inside TensorFlow, out of this library's sight. If it should not take so long: an "
        "op in it may wait, for a dataset or for another function that needs the same threads."
    )


def table(rows: Iterable[ReplicaRow], coordinator: CoordinatorRow | None = None, stacks: bool = False) -> str:
    """Rows as text, one a line; with `stacks`, those of the threads after it."""
    every: list[ReplicaRow | CoordinatorRow] = [*rows]
    if coordinator is not None:
        every.append(coordinator)
    lines = [f"  {row}" for row in every]
    if stacks:
        lines += [f"Stack of {row.name}:\n{row.stack.rstrip()}" for row in every if row.stack]
    return "\n".join(lines)


def _what(rows: Iterable[ReplicaRow], coordinator: CoordinatorRow | None) -> str:
    """What did not come back, as the beginning of a sentence."""
    if coordinator is not None and coordinator.state.startswith(IN_MERGE):
        return f"The merge function {coordinator.state.removeprefix(IN_MERGE)} did not return"
    if coordinator is not None and coordinator.state == FOR_ITS_TURN:
        return "The devices did not become free, and the program on them gave no sign of life,"
    points = {row.points for row in rows}
    if points == {"host call"}:
        return "The compiled program did not end, and no host call was made or returned,"
    return "No replica reached its next sync point"


def count_of(number: int, what: str) -> str:
    """ "1 merge call", "2 merge calls"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds:.3g} s"
