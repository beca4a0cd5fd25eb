"""Jobs of several workers: clusters that cannot be read, and workers that are lost, missing or different."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from replica_engine.errors.base import ReplicaEngineError, add_note, plural, shown, warning

__all__ = ["ClusterConfigError", "ProgramDisagreementError", "WorkerLostError", "WorkerRow", "WorkerVersionError"]
__all__ += ["WorkersMissingError"]

TOKEN = "REPLICA_ENGINE_TOKEN"
"""The variable with the secret of a job; messages name it."""

LAUNCHED = "REPLICA_ENGINE_LAUNCHED"
"""The variable that `replica-engine launch` sets to "1": it says itself what becomes of the job."""

SAVING = "the saving of"
"""How the place is called where the workers meet before one of them saves: "the saving of a model"."""

NOW = "; now "
"""Between the sync point that a worker has reported, and where its replicas are at the moment."""

_STALL = "REPLICA_ENGINE_STALL_TIMEOUT"
_MOST_LINES = 16  # of a table of workers, and of ranges of workers in a line
_QUIET = 3.0  # seconds of silence from which on a worker stands apart from others at the same place

_AGAIN = "start all workers again from the last checkpoint; `replica-engine launch --max-restarts 1` does so by itself"


@dataclass(frozen=True)
class WorkerRow:
    """What is known of one worker: a row in a table of all workers, and what an error says of a lost one.

    Attributes:
        worker: its index in the job, from 0.
        size: the number of workers of the job.
        host: the name of its machine; "" if it has not joined.
        pid: its process id there; 0 if it has not joined.
        launches: the number of programs that it has launched.
        launched: the last of them, in words; "" if there was none.
        step: the last step that it reported; None if it reported none.
        sync_point: the last sync point that it reported; "" if it reported none.
        silent: seconds since it was last heard of.
    """

    worker: int
    size: int
    host: str = ""
    pid: int = 0
    launches: int = 0
    launched: str = ""
    step: int | None = None
    sync_point: str = ""
    silent: float = 0.0

    @property
    def name(self) -> str:
        """The worker in words: "worker 1 of 4 (node-b, pid 4711)"."""
        return f"worker {self.worker} of {self.size}" + (f" ({self.host}, pid {self.pid})" if self.pid else "")

    @property
    def has_begun(self) -> bool:
        """Whether it has launched a program, or reported a step."""
        return self.launches > 0 or self.step is not None

    @property
    def too_early(self) -> str:
        """When a worker has ended whose end the others did not expect, in words."""
        if self.pid:
            return "before the others came to their end"
        return "before it joined the job: it came to no strategy over workers"

    @property
    def last(self) -> str:
        """What it last did: "step 150, launch 151 (`train_step`, train.py:40)", or "" if nothing is known."""
        known = []
        if self.step is not None:
            known.append(f"step {self.step}")
        if self.launches:
            known.append(f"launch {self.launches}" + (f" ({self.launched})" if self.launched else ""))
        if self.sync_point:
            known.append(f"sync point {self.sync_point}")
        return ", ".join(known)

    def __str__(self) -> str:
        return f"{self.name}: {self.last or 'nothing launched yet'}; heard of {self.silent:.3g} s ago"


class ClusterConfigError(ReplicaEngineError, ValueError):
    """What describes the cluster is wrong: an environment variable, a token, or a worker's index.

    Raised when a process joins its job, before any step. Give all workers the same description of the cluster, each its
    own index, and the same token.

    Attributes:
        field: the variable or field that is wrong.
    """

    field = ""

    @classmethod
    def about(cls, field: str, message: str) -> ClusterConfigError:
        """The error about a variable or field, which the message names."""
        error = cls(message)
        error.field = field
        return error

    @classmethod
    def bad_value(cls, field: str, value: object, wanted: str) -> ClusterConfigError:
        """A field has a value of the wrong kind; the message says which kind it must be."""
        return cls.about(field, f"{field} is {shown(value)}. It must be {wanted}.")

    @classmethod
    def missing(cls, field: str, given: str, wanted: str) -> ClusterConfigError:
        """A field is missing that another one makes necessary."""
        return cls.about(field, f"{field} is missing, but {given} is set. It must be {wanted}.")

    @classmethod
    def out_of_range(cls, field: str, index: int, size: int, counted: str) -> ClusterConfigError:
        """A worker's index is not below the number of workers."""
        return cls.about(
            field,
            f"{field} is {index}, but {counted} says that there are {size}: the index must be from 0 to {size - 1}.",
        )

    @classmethod
    def wrong_task(cls, field: str, kind: str) -> ClusterConfigError:
        """The cluster has tasks that are not workers."""
        role = {
            "ps": "A parameter server keeps variables for others; here each worker keeps its own.",
            "evaluator": "An evaluator runs beside the group and not in it.",
        }.get(kind, f"There is no task of type {kind!r} here.")
        return cls.about(
            field,
            f'{field} names {shown(kind)}. {role} Leave it out: the types of tasks are "chief" and "worker". '
            "Start another kind of process without the variable.",
        )

    @classmethod
    def other_size(cls, worker: int, size: int, expected: int) -> ClusterConfigError:
        """A worker counts another number of workers than the coordinator."""
        return cls.about(
            "num_processes",
            f"worker {worker} was told that the job has {plural(size, 'worker')}, and its coordinator was told "
            f"{expected}. Start all workers with the same description of the cluster.",
        )

    @classmethod
    def taken(cls, worker: int, host: str, pid: int) -> ClusterConfigError:
        """Two processes have the same index."""
        return cls.about(
            "process_id",
            f"worker {worker} has joined already ({host}, pid {pid}). Each worker needs an index of its own. A worker "
            "that was restarted alone cannot come back: restart all workers.",
        )


def _stay(waiting: Sequence[int]) -> str:
    return f"{workers(waiting, _MOST_LINES)} did not leave that step" if waiting else "others may wait in its sum"


class WorkerLostError(ReplicaEngineError, RuntimeError):
    """A worker of the job has died, has raised, has ended too early, or is not heard of.

    Raised on every other worker, in what waits for it: a launch, a sync point, or the next use of the job. The others
    cannot go on without it: find the cause in its output, and start all workers again from the last checkpoint.
    `replica-engine launch --max-restarts` does so by itself, and `--workers 2:4` also with fewer workers. The notes of
    the error say what the lost worker did last.

    Attributes:
        worker: its index; None if the coordinator is lost.
        host: the name of its machine.
        pid: its process id there.
        signal: the number of the signal that ended it; None if that is not known.
        status: its exit status; None if it has not exited, or if that is not known.
        exception: what it raised, as the last line of its traceback; "" if it did not raise.
        step: the last step that it reported; None if it reported none.
        sync_point: the last sync point that it reported.
    """

    worker: int | None = None
    host = ""
    pid = 0
    signal: int | None = None
    status: int | None = None
    exception = ""
    step: int | None = None
    sync_point = ""
    again = True
    """Whether it may go better when all workers start again: not if the program is wrong."""

    @classmethod
    def killed(cls, row: WorkerRow, number: int) -> WorkerLostError:
        """A signal ended the process of a worker."""
        error = _lost(row, f"was ended by signal {number} ({_signal_name(number)}){_usual_cause(number)}")
        error.signal = number
        return error

    @classmethod
    def exited(cls, row: WorkerRow, status: int) -> WorkerLostError:
        """A worker exited while the others were still working."""
        # One that ended before it joined (its process is not known then) would do so again.
        error = _lost(row, f"has exited with status {status} {row.too_early}", again=bool(row.pid))
        error.status = status
        return error

    @classmethod
    def vanished(cls, row: WorkerRow) -> WorkerLostError:
        """A worker's connection was closed, and nobody knows the exit status of its process."""
        return _lost(
            row,
            "has closed its connection without a word: its process was killed (by a signal, or because memory ran out) "
            "or left through os._exit",
        )

    @classmethod
    def raised(cls, row: WorkerRow, exception: str) -> WorkerLostError:
        """A worker's program raised."""
        # What it raised before it launched anything, such as a folder that it cannot write, it would raise again.
        error = _lost(row, f"has raised {exception}", again=row.has_begun)
        error.exception = exception
        return error

    @classmethod
    def gave_up(cls, row: WorkerRow, waiting: Sequence[int], exception: str) -> WorkerLostError:
        """A worker has left a step before its end, and its program goes on; those that wait are in that step."""
        what = (
            f"has left a step before its end ({exception}), and {_stay(waiting)}. "
            "A program that catches an exception out of a step can go on if all workers get one in the same "
            "step; else it must raise it again"
        )
        error = _lost(row, what)
        error.exception = exception
        return error

    @classmethod
    def left(cls, row: WorkerRow, other: int, doing: str) -> WorkerLostError:
        """A worker's program came to its end, while the programs of others go on."""
        cure = (
            f"All workers must call what saves, also if only the chief writes: worker {other} called it and worker "
            f"{row.worker} did not. Take it out of the branch on the worker's index"
            if f" {SAVING} " in doing
            else "All workers must launch the same steps: the datasets of all must have the same number of batches, "
            "and no step may be in a branch on the worker's index"
        )
        what = f"has come to the end of its program or to sys.exit, and worker {other} goes on with the {doing}"
        return _lost(row, f"{what}. {cure}", again=False)

    @classmethod
    def silent(cls, row: WorkerRow, seconds: float) -> WorkerLostError:
        """A worker has not been heard of for longer than the heartbeat limit."""
        return _lost(
            row,
            f"has not been heard of for {seconds:g} s: it is stopped, or its machine or the network is down "
            "(the limit is REPLICA_ENGINE_HEARTBEAT_TIMEOUT)",
        )

    @classmethod
    def stalled(
        cls,
        row: WorkerRow,
        rows: Sequence[WorkerRow],
        stacks: Sequence[str],
        stalled: Sequence[int],
        waiting: Sequence[int],
        seconds: float,
    ) -> WorkerLostError:
        """A worker is alive, and the others have waited for it for longer than the limit; see `describe_stall`."""
        others = [each for each in stalled if each != row.worker]
        also = f", as {workers(others, _MOST_LINES)} did" if others else ""
        waited = f"{workers(waiting, _MOST_LINES)} waited for it (--stall-timeout or {_STALL})"
        error = _lost(row, f"is alive, but did not go on for {seconds:g} s{also}, while {waited}")
        add_note(error, _stacks(rows, stacks))
        return error

    @classmethod
    def none_goes_on(
        cls, rows: Sequence[WorkerRow], stacks: Sequence[str], stalled: Sequence[int], seconds: float
    ) -> WorkerLostError:
        """All workers have been in the same launch for longer than the limit."""
        error = cls(
            f"All {len(stalled)} workers have been in the same launch for {seconds:g} s (--stall-timeout or {_STALL}): "
            f"{rows[0].last}. If a launch may take as long, raise the limit; else look for a loop on the devices that "
            "has no end, and at the network between the workers."
        )
        add_note(error, _stacks(rows, stacks))
        return error

    @classmethod
    def parted(cls, row: WorkerRow, other: WorkerRow, reason: str) -> WorkerLostError:
        """A worker does not reach another one, although the coordinator hears both."""
        return _lost(other, f"is not reached by {row.name}, and the coordinator hears both: {reason}")

    @classmethod
    def no_coordinator(
        cls, row: WorkerRow, address: str, launched: bool, seconds: float | None = None
    ) -> WorkerLostError:
        """The coordinator of the job has ended or is not heard of, so a worker knows nothing of the others."""
        what = "has closed the connection to" if seconds is None else f"has not been heard of for {seconds:g} s by"
        where = (
            "It runs in `replica-engine launch`, which has ended or is stopped"
            if launched
            else "It runs beside worker 0: that machine or container has ended or is stopped, or the network between "
            "the two is down"
        )
        return cls(f"The coordinator of the job at {address} {what} {row.name}. {where}. Start all workers again.")


class WorkersMissingError(ReplicaEngineError, TimeoutError):
    """Workers did not come within a limit: to the job, to a point where all meet, or with a value.

    Raised by `workers.join`, by what waits for all workers, and by a wait for a value. Look at the output of the
    workers that the message names, or raise the limit that it names.

    Attributes:
        workers: their indices.
    """

    workers: tuple[int, ...] = ()

    @classmethod
    def not_joined(
        cls, missing: Sequence[int], size: int, seconds: float, local: str = "", strangers: str = ""
    ) -> WorkersMissingError:
        """Workers did not join the job within the join limit.

        Args:
            missing: their indices.
            size: the number of workers.
            seconds: the limit.
            local: where the coordinator listens, if only processes of its own machine can come there.
            strangers: the warning that strangers are there; "" if none are.
        """
        port = local.rpartition(":")[2]
        cause = (
            f" The coordinator listens at {local}, where only processes of its own machine reach it: set "
            f"REPLICA_ENGINE_LISTEN=0.0.0.0:{port} for worker 0 if the others run elsewhere."
            if local
            else ""
        )
        error = cls(
            f"{len(missing)} of {plural(size, 'worker')} did not join within {seconds:g} s: {workers(missing)}. Look "
            "at their output: they may have failed before they joined, or they may wait for a machine. Set "
            f"REPLICA_ENGINE_JOIN_TIMEOUT to more seconds if they need them.{cause}{strangers and ' '}{strangers}"
        )
        error.workers = tuple(missing)
        return error

    @classmethod
    def not_met(cls, point: str, late: Sequence[int], lines: Sequence[str], seconds: float) -> WorkersMissingError:
        """Workers did not come within `timeout` to a point where all meet; `lines` say where they are."""
        table = "\n".join(f"  {line}" for line in lines)
        error = cls(f"{workers(late, _MOST_LINES)} did not come to {point} within {seconds:g} s (timeout=):\n{table}")
        error.workers = tuple(late)
        return error

    @classmethod
    def no_value(cls, key: str, seconds: float) -> WorkersMissingError:
        """No worker has stored a value under the key within `timeout`."""
        return cls(f"No worker has put a value under {key!r} within {seconds:g} s (timeout=).")

    @classmethod
    def no_room(cls, key: str, most: int) -> WorkersMissingError:
        """The job has no value under the key, and no room for one: the workers have put too many values."""
        return cls(
            f"There is no value under {key!r}, and no room for one: the workers have put {most:,} values, the most "
            "that a job keeps. Put again under the same key, or drop with `member.drop(key)` what all have read."
        )


class WorkerVersionError(ReplicaEngineError, RuntimeError):
    """The workers have different versions of a package, other strategies, other devices, or another number of them.

    Raised when the workers have joined, before any step. Make the workers equal: programs of different versions differ.

    Attributes:
        groups: the workers with each version, strategy or number, as (their indices, what they have).
    """

    groups: tuple[tuple[tuple[int, ...], str], ...] = ()

    # Workers of different versions of this library tell each other of it: the names and arguments must never change.

    @classmethod
    def of_package(cls, package: str, groups: Iterable[tuple[Sequence[int], str]]) -> WorkerVersionError:
        """The workers have different versions of a package."""
        return cls._different(f"versions of {package}", groups, f"Install one version of {package} on all workers.")

    @classmethod
    def of_devices(cls, groups: Iterable[tuple[Sequence[int], str]]) -> WorkerVersionError:
        """The replicas of some workers run on GPUs, and those of others on CPUs."""
        hide = "Give each worker GPUs, or hide them: CUDA_VISIBLE_DEVICES=-1."
        return cls._different("kinds of devices", groups, hide)

    @classmethod
    def of_strategies(cls, groups: Iterable[tuple[Sequence[int], str]]) -> WorkerVersionError:
        """The workers have joined for strategies of different classes."""
        return cls._different("strategies", groups, "Make a strategy of the same class first on all workers.")

    @classmethod
    def of_replicas(cls, groups: Iterable[tuple[Sequence[int], str]]) -> WorkerVersionError:
        """The workers have different numbers of replicas."""
        return cls._different("numbers of replicas", groups, "Give each worker the same number of devices.")

    @classmethod
    def _different(cls, what: str, groups: Iterable[tuple[Sequence[int], str]], advice: str) -> WorkerVersionError:
        rows = tuple((tuple(indices), value) for indices, value in groups)
        table = "\n".join(f"  {workers(indices)}: {value}" for indices, value in rows)
        error = cls(f"The workers have different {what}:\n{table}\n{advice}")
        error.groups = rows
        return error


class ProgramDisagreementError(ReplicaEngineError, RuntimeError):
    """Workers compile or launch different programs, or the same programs in another order.

    Raised before the launch, on all workers. All workers must launch the same programs in the same order: look for a
    branch on the worker's index, and for a dataset that is longer on one worker.

    Attributes:
        position: the number of events before that are equal on all workers.
        groups: what each group of workers does next, as (their indices, what they do).
    """

    position = 0
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()

    @classmethod
    def differ(cls, position: int, groups: Iterable[tuple[Sequence[int], str]]) -> ProgramDisagreementError:
        """The workers do different things at the same place of their order."""
        rows = tuple((tuple(indices), what) for indices, what in groups)
        table = "\n".join(f"  {workers(indices)}: {what}" for indices, what in rows)
        error = cls(
            f"After {plural(position, 'equal event')} (compilations, launches, waits for each other) the workers "
            f"differ:\n{table}\nAll workers must launch the same programs in the same order, or sums get mixed up. "
            "Look for a branch on the worker's index or on a time, for a constant that differs, and for a dataset that "
            "is longer on one worker."
        )
        error.position, error.groups = position, rows
        return error


JOB_FAILURES = (WorkerLostError, WorkersMissingError, WorkerVersionError, ProgramDisagreementError)
"""What a job of several workers fails with."""


def tries_again(reason: str, seconds: float) -> str:
    """The warning that a worker cannot join yet, since the job of an earlier run seems not to be over."""
    return (
        f"This worker cannot join its job: {reason.partition(chr(10))[0]} In case that is the job of an earlier run "
        f"and all workers are being started again, it tries again for {seconds:.3g} s."
    )


def runs_alone(name: str, value: str) -> str:
    """The warning that this process is not told its place in a job, though a variable says that there are others."""
    index = "$JOB_COMPLETION_INDEX" if name == "JOB_COMPLETION_INDEX" else "its index, from 0"
    return warning(
        "runs_alone",
        f"{name} is {shown(value)}, as in a job of several processes, and nothing tells this process which of them it "
        "is and how many there are. So it runs alone. For one job of all, set in each process "
        f"REPLICA_ENGINE_PROCESS_ID ({index}), REPLICA_ENGINE_NUM_PROCESSES (their number) and "
        "REPLICA_ENGINE_COORDINATOR (host:port on the machine of process 0), or start them with a launcher that "
        "sets a place for each (docs/hosts/starting.md). If it is to run alone, REPLICA_ENGINE_PROCESS_ID=0 and "
        "REPLICA_ENGINE_NUM_PROCESSES=1 say so.",
    )


def describe_stall(
    rows: Sequence[WorkerRow], stacks: Sequence[str], stalled: Sequence[int], waiting: Sequence[int], seconds: float
) -> str:
    """The warning that workers are alive and do not go on, while others wait for them.

    Args:
        rows: the first of them.
        stacks: for each row, where it is in the user's program, as text; "" if that is not known.
        stalled: all of them.
        waiting: the others.
        seconds: for how long.
    """
    who, others = workers(stalled, _MOST_LINES), workers(waiting, _MOST_LINES)
    return (
        f"{who} did not go on for {seconds:g} s, while {others} waited. Nobody is lost, so this has no end. "
        f"`replica-engine launch --stall-timeout S`, or {_STALL}=S for worker 0, ends the job after S seconds.\n"
        f"{_stacks(rows, stacks)}"
    )


def _stacks(rows: Sequence[WorkerRow], stacks: Sequence[str]) -> str:
    lines = []
    for row, stack in zip(rows, stacks, strict=True):
        lines.append(f"{row}{stack and '; it is here:'}")
        lines += stack.splitlines()
    return "\n".join(lines)


def in_short(rows: Sequence[WorkerRow]) -> list[str]:
    """A line for each worker; of many workers, a line for all that are at the same place."""
    if len(rows) <= _MOST_LINES:
        return [str(row) for row in rows]
    groups: dict[tuple[str, bool], list[WorkerRow]] = {}
    for row in rows:
        at = replace(row, sync_point=row.sync_point.partition(NOW)[0])
        groups.setdefault((at.last if row.pid else "not joined", row.silent > _QUIET), []).append(row)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = []
    for (last, _), ones in ordered[:_MOST_LINES]:
        heard = f"heard of {min(row.silent for row in ones):.3g} to {max(row.silent for row in ones):.3g} s ago"
        which = workers((row.worker for row in ones), _MOST_LINES)
        lines.append(f"{len(ones):,} of {len(rows):,}, {which}: {last or 'nothing launched yet'}; {heard}")
    if left := sum(len(ones) for _, ones in ordered[_MOST_LINES:]):
        lines.append(f"{plural(left, 'worker')} at {len(ordered) - _MOST_LINES} more places")
    return lines


def workers(indices: Iterable[int], most: int | None = None) -> str:
    """Workers in words, with ranges: "worker 1", "workers 0, 3-7"; at most so many ranges, and "..."."""
    every = sorted(indices)
    ranges: list[str] = []
    first = 0
    for at, index in enumerate(every):
        if at + 1 == len(every) or every[at + 1] != index + 1:
            ranges.append(str(index) if every[first] == index else f"{every[first]}-{index}")
            first = at + 1
    shown = ranges if most is None or len(ranges) <= most else [*ranges[:most], "..."]
    return f"worker{'' if len(every) == 1 else 's'} {', '.join(shown)}"


def _lost(row: WorkerRow, what: str, again: bool = True) -> WorkerLostError:
    last = f" Its last: {row.last}." if row.last else ""
    what = what.removesuffix(".")
    error = WorkerLostError(f"{row.name} {what}.{last} The others cannot go on without it.")
    error.again = again
    if os.environ.get(LAUNCHED) != "1":  # `replica-engine launch` prints the same at the end
        if again:
            add_note(error, _AGAIN)
        add_note(error, f"{row.name} {what}")
    error.worker, error.host, error.pid = row.worker, row.host, row.pid
    error.step, error.sync_point = row.step, row.sync_point
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def _usual_cause(number: int) -> str:
    """What usually sends a signal, where that helps."""
    return {
        "SIGKILL": ": `kill -9`, or the system when memory ran out (`dmesg` tells)",
        "SIGSEGV": ": a crash in native code",
        "SIGABRT": ": a failed check in native code, printed in its output",
        "SIGBUS": ": a crash in native code, or no room in /dev/shm",
    }.get(_signal_name(number), "")
