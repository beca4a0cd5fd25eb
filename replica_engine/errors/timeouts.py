"""Warnings and an error about runs that do not return in time, with a table that shows where each replica is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replica_engine.errors.base import ReplicaEngineError, plural

IN_MERGE = "in the merge function "
"""The state of a coordinator that runs a merge function begins with these words."""

FOR_GIVEN_UP = "waiting for a program that was given up"
FOR_ITS_TURN = "waiting for its turn on the devices"
"""The state of a coordinator while another program runs on the devices."""

NOT_STARTED, FINISHED = "not started", "finished"
"""The states of a replica that has not begun, and that has ended well."""

IN_FUNCTION = "in the tf.function"
"""The state of a coordinator that has called a `tf.function` in which replicas run."""

FOR_BATCH = "waiting for the next batch"
FOR_BATCH_OF_WORKER = "waiting for the next batch of another worker"
"""The states of a coordinator between two launches of a device loop."""

_FOR_ANY_BATCH = (FOR_BATCH, FOR_BATCH_OF_WORKER)


@dataclass(frozen=True)
class ReplicaRow:
    """The state of one replica when something went wrong: a row in an error's table.

    Attributes:
        replica: its index in the run, from 0.
        size: the number of replicas of the run.
        device: its device, in the short form "CPU:1".
        state: what it is doing, in words.
        merge_calls: the number of sync points that it has reached in this run.
        where: its last sync point with file and line; "" if it has reached none.
        seconds: how long it has been in that state; None if that does not matter.
        stack: the stack of its thread, if the thread runs Python; "" otherwise.
        points: the kind of its sync points: "merge call"; "host call" in a compiled program; "step" between
            launches of a device loop.
        iteration: in a loop of a `tf.function`, how many steps of this call the replica has begun; None elsewhere.
        waits: the ops of a traced step in which it may be waiting, with their lines.
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
    iteration: int | None = None
    waits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The replica in words: "replica 1 of 4 (CPU:1)"."""
        return f"replica {self.replica} of {self.size} ({self.device})"

    def __str__(self) -> str:
        where = f", last: {self.where}" if self.where else ""
        step = "" if self.iteration is None else f" in iteration {self.iteration}"
        points = plural(self.merge_calls, self.points)
        return f"{self.name}: {self.state}{_for(self.seconds)}{step}; {points}{where}"


@dataclass(frozen=True)
class CoordinatorRow:
    """The state of the thread that called `run`.

    Attributes:
        thread: its name.
        state: what it is doing, in words.
        seconds: how long it has been in that state; None if that does not matter.
        stack: the stack of the thread, if it may be running the user's code; "" otherwise.
    """

    thread: str
    state: str
    seconds: float | None = None
    stack: str = ""

    @property
    def name(self) -> str:
        """The coordinator in words: "coordinator (MainThread)"."""
        return f"coordinator ({self.thread})"

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{_for(self.seconds)}"


class ReplicaTimeoutError(ReplicaEngineError, TimeoutError):
    """A replica, a merge function, a host call, an iterator or a compiled program took longer than `timeout` seconds.

    Raised only where a limit was set, with `timeout=` of the strategy. The table shows where each replica stands: look
    for the one that others wait for, or raise the limit.

    Attributes:
        rows: one `ReplicaRow` for each replica, as it was when time ran out.
        coordinator: the `CoordinatorRow` of the thread that called `run`.
        table: both as text, with the stacks.
    """

    rows: tuple[ReplicaRow, ...] = ()
    coordinator: CoordinatorRow | None = None
    table = ""

    @classmethod
    def after(
        cls,
        timeout: float,
        rows: Sequence[ReplicaRow],
        coordinator: CoordinatorRow | None = None,
        meetings: Sequence[str] = (),
    ) -> ReplicaTimeoutError:
        """The time ran out; the table shows where each replica and the coordinator are.

        `meetings` has the cross-replica operations of a compiled program, with their lines.
        """
        stand = table(rows, coordinator, stacks=True)
        compiled = {row.points for row in rows} == {"host call"}
        state = "" if coordinator is None else coordinator.state
        advice = f"Pass a longer timeout= if the {'iterator' if state in _FOR_ANY_BATCH else 'step'} needs it."
        kept = (
            f"variables keep the values from before the run. {_together(meetings, advice)}"
            if compiled
            else f"updates of the steps that ran stay in the variables. {advice}"
            if state in _FOR_ANY_BATCH
            else f"a note says which updates were made. {advice}"
            if state == IN_FUNCTION
            else f"updates that were merged before stay in the variables. {advice}"
        )
        error = cls(f"{_what(rows, coordinator)} in {timeout:g} s (timeout=):\n{stand}\nThe run was given up; {kept}")
        error.rows, error.coordinator, error.table = tuple(rows), coordinator, stand
        return error

    @classmethod
    def not_planned(cls, name: str, where: str, timeout: float) -> ReplicaTimeoutError:
        """The compiler gave no plan within the limit."""
        return cls(
            f"`{name}` was not compiled for {where} in {timeout:g} s (timeout=), so there is no plan of it. Nothing "
            "has run. Pass a longer timeout= to the strategy. Perhaps XLA computes large constants while it compiles: "
            "pass them as arguments."
        )


def slow_replicas(
    seconds: float, rows: Sequence[ReplicaRow], coordinator: CoordinatorRow, limit: float | None = None
) -> str:
    """The warning that no replica of a run has reached or left a sync point for `seconds`.

    `limit` is `timeout=`.
    """
    return (
        f"{_what(rows, coordinator)} in {seconds:.3g} s:\n{table(rows, coordinator, stacks=True)}\n"
        f"The run continues to wait. Ctrl-C ends it; {_raises_later(limit)}."
    )


def slow_program(
    name: str,
    seconds: float,
    rows: Sequence[ReplicaRow],
    coordinator: CoordinatorRow,
    meetings: Sequence[str] = (),
    given_up: str = "",
) -> str:
    """The warning that a compiled program has been running, or waiting for its devices, for a long time.

    `meetings` has its cross-replica operations, with their lines. `given_up` is the name of an earlier program that it
    waits for.
    """
    if given_up:
        return (
            f"The compiled program of `{name}` has been waiting for {seconds:.3g} s. It has not started: the program "
            f"of `{given_up}`, which was given up earlier (Ctrl-C, or timeout=), has not ended and holds the devices:\n"
            f"{table(rows, coordinator, stacks=True)}\n"
            f"Look for the cause in `{given_up}`: perhaps a host call in it does not return, or its replicas wait for "
            "each other. Ctrl-C ends the wait."
        )
    doing = "waiting for its turn" if coordinator.state == FOR_ITS_TURN else "running"
    return (
        f"The compiled program of `{name}` has been {doing} on {plural(len(rows), 'replica')} for {seconds:.3g} s:\n"
        f"{table(rows, coordinator, stacks=True)}\n"
        f"{_together(meetings, 'Ctrl-C ends the wait.')}"
    )


_MOST_MEETINGS, _MOST_WAITS = 10, 4
_TOGETHER = (
    "Its replicas may wait for each other: every replica must reach the same cross-replica operations, so a branch on "
    "the replica id must not contain one."
)


def _together(meetings: Sequence[str], advice: str) -> str:
    """Why replicas may wait for each other, the operations where they may, and what to do."""
    if not meetings:
        return f"{_TOGETHER} {advice}"
    rows = [f"  {each}" for each in meetings[:_MOST_MEETINGS]]
    if len(meetings) > _MOST_MEETINGS:
        rows.append(f"  and {len(meetings) - _MOST_MEETINGS} more")
    lines = "\n".join(rows)
    return f"{_TOGETHER} The cross-replica operations of the program:\n{lines}\n{advice}"


def slow_function(
    name: str,
    seconds: float,
    rows: Sequence[ReplicaRow],
    coordinator: CoordinatorRow,
    limit: float | None = None,
    earlier: Sequence[str] = (),
) -> str:
    """The warning that a `tf.function` around a run has not returned, or that no replica in it got on, for a long time.

    `limit` is `timeout=`. `earlier` names the functions that were given up before and still run.
    """
    did = "made no progress" if any(row.iteration is not None for row in rows) else "not returned"
    then = f"Ctrl-C ends the step; {_raises_later(limit)}"
    if not rows:
        then = f"The graph has no marks (marks=), so its replicas cannot be shown. {then}"
    elif all(row.state == NOT_STARTED for row in rows):
        then = (
            "No replica has begun: TensorFlow optimizes the graph in the first call, or the graph waits for a batch or "
            "for what is computed before the run"
        )
    still = "".join(f"\n{each} was given up earlier, still runs, and holds a thread of TensorFlow." for each in earlier)
    stand = table(rows, coordinator, stacks=True)
    return f"The tf.function `{name}` has {did} for {seconds:.3g} s:\n{stand}\n{then}.{still}"


def table(rows: Iterable[ReplicaRow], coordinator: CoordinatorRow | None = None, stacks: bool = False) -> str:
    """The rows as text, one on each line; with `stacks`, the stacks of the threads follow."""
    every = [each for each in (*rows, coordinator) if each is not None]
    lines = [f"  {row}" for row in every]
    for each in every:
        if isinstance(each, ReplicaRow) and each.waits:
            shown = [*each.waits[:_MOST_WAITS], *(["..."] if len(each.waits) > _MOST_WAITS else [])]
            lines.append(f"{each.name} may be waiting in {', '.join(shown)}")
    if stacks:
        lines += [f"Stack of {row.name}:\n{row.stack.rstrip()}" for row in every if row.stack]
    return "\n".join(lines)


def _what(rows: Iterable[ReplicaRow], coordinator: CoordinatorRow | None) -> str:
    """The beginning of a sentence that says what did not return."""
    state = "" if coordinator is None else coordinator.state
    if state.startswith(IN_MERGE):
        return f"The merge function {state.removeprefix(IN_MERGE)} did not return"
    if state in (FOR_ITS_TURN, FOR_GIVEN_UP):
        return "The devices did not become free, and the program on them showed no progress,"
    if state in _FOR_ANY_BATCH:
        of_worker = " on another worker" if state == FOR_BATCH_OF_WORKER else ""
        return f"The iterator of a device loop gave no next batch{of_worker}"
    if {row.points for row in rows} == {"host call"}:
        return "The compiled program did not end, and no host call was made or returned,"
    return "No replica reached its next sync point"


def _raises_later(limit: float | None) -> str:
    """What becomes of a wait that goes on."""
    if limit is None:
        return "with timeout= of the strategy such a wait raises an error"
    return f"after {limit:g} s (timeout=) the wait raises an error"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds:.3g} s"
