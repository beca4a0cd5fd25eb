"""What the coordinator knows of a job, and what it decides: no sockets, no threads, no clock of its own.

Messages of members go in, with the time at which they came; messages to members come out through `tell`. So a test can
play any order of events, and a thousand members need no thousand processes.

What it guarantees:

- The first failure is kept. It is told to all members that are there, and to each that comes later.
- A member is lost when its process ends without a goodbye, when it says that it raised, or when it is silent for longer
  than the heartbeat limit.
- If this machine itself stood still for a while, that time does not count, neither as silence nor for the timeout of a
  wait. A timeout runs from the arrival of the question.
- A member that gave up a step is lost if another member stays in that step for too long. After an interrupt that is a
  few seconds, since an interrupt reaches all at once. Otherwise it is the heartbeat limit, since the same exception,
  such as the end of the data, may come to the other one later. A member that has not come to the step is waited for.
- A member that is alive, and that the others wait for, is named every ten minutes, or lost after a limit (`stalls`).
- A member may say goodbye when all have come to their end, or after a failure.
- What is kept grows with the number of members, and not with the number of launches (see `program_log`).

All times are seconds of `time.monotonic`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replica_engine import errors
from replica_engine.errors.worker_errors import describe_stall, in_short
from replica_engine.workers.cluster import is_loopback
from replica_engine.workers.messages import LONGEST_LINE, BadMessageError, Failure, Message, encode
from replica_engine.workers.program_log import COMPILE, END, ENTRY, LAUNCH, LaunchLog, backwards, unpacked
from replica_engine.workers.stalls import QUIET, Doing, Stalls

DEVICES = "the kind of devices"  # among the versions: workers with GPUs and without need other packages
STRATEGY = "the class of the strategy"  # among the versions: the strategies of workers take each other for strangers
STATUS_PATIENCE = 0.5  # seconds from the end of a connection to the exit status, or the other way round
INTERRUPTED = 5.0  # seconds that others have to give up a step that one was interrupted in; each takes about one
_STOOD_STILL = 2.0  # seconds between two ticks from which on this machine counts as having stood still
_MOST_VALUES = 10_000
_ROWS = 500  # in an answer, which has a longest length; where more workers are, is looked up once a second
_MOST_EXCHANGES = 100  # at a time


@dataclass
class _JoinedMember:
    """What is known of a member that has joined."""

    host: str
    pid: int
    versions: dict[str, str]
    replicas: int
    heard: float
    came_to: str
    step: int | None = None
    sync_point: str = ""
    launches: int = 0
    launched: str = ""
    does: Doing = field(default_factory=Doing)
    at_end: bool = False  # it waits for the others to come to the end of their programs
    left: bool = False  # it has said goodbye
    closed: bool = False  # its connection has ended


@dataclass
class _UnansweredWait:
    """A member that waits for an answer.

    Attributes:
        what: the position in the launch log, or the key of the value, that it waits for.
        point: the same in words, if it is a position.
        timeout: how many seconds it waits.
        began: since when.
    """

    what: int | str
    point: str
    timeout: float
    began: float


@dataclass(frozen=True)
class Limits:
    """How long the coordinator waits, in seconds.

    Attributes:
        join: from the start until all members must have joined.
        heartbeat: without a message until a member counts as lost.
        stall: that others wait for a member which is alive, until it counts as lost.
    """

    join: float = 300.0
    heartbeat: float = 60.0
    stall: float = math.inf


class Job:
    """The state of a job.

    Args:
        size: the number of workers.
        limits: how long to wait.
        now: the time at the start.
        tell: sends a message to a worker, or to all that have joined if the worker is None.
        knows_statuses: whether `exited` will be called for each worker whose process ends.
        local: where the coordinator listens, if only processes of its own machine can come there.

    Attributes:
        limits: how long to wait.
        failure: the first failure; None as long as there is none.
    """

    def __init__(
        self,
        size: int,
        limits: Limits,
        now: float,
        tell: Callable[[int | None, Message], None],
        knows_statuses: bool = False,
        local: str = "",
    ):
        self._size = size
        self.limits = limits
        self._began = self._ticked = now
        self._tell = tell
        self._knows_statuses = knows_statuses
        self._local = local
        self._strangers = ""
        self._untold = ""  # of strangers, as no member was there
        self._members: dict[int, _JoinedMember] = {}
        self._statuses: dict[int, int] = {}
        self._ending: dict[int, float] = {}  # members that seem to have ended, and until when to wait for the rest
        self._log = LaunchLog(size)
        self._programs: dict[bytes, tuple[str, str]] = {}  # by entry: its verb, and its program or place
        self._values: dict[str, object] = {}
        self._exchanges: dict[str, dict[int, object]] = {}  # by name: the values that have come, by worker
        self._waits: dict[tuple[int, int], _UnansweredWait] = {}
        self._where: tuple[float, list[str]] = (now, [])
        # By position in the log: who left a step there before its end; what ended it, the seconds that others may stay,
        # and whether it left before its entry there.
        self._given_up: dict[int, dict[int, tuple[str, float, bool]]] = {}
        self._left_by_all: set[int] = set()  # positions of launches that all members left, and go on
        self._stalls = Stalls(now, lambda worker: tell(worker, ["stack"]))
        self._in_vain: dict[int, tuple[int, float]] = {}  # who is in such a step: its position, and since when
        self.failure: Failure | None = None

    @property
    def complete(self) -> bool:
        """Whether all members have joined."""
        return len(self._members) == self._size

    @property
    def over(self) -> bool:
        """Whether all members have joined, and none is left."""
        return self.complete and all(member.left or member.closed for member in self._members.values())

    def refusal(self, worker: int, size: int) -> Failure | None:
        """Why a worker that knows the token may not join, or None.

        Args:
            worker: its index.
            size: the number of workers that it was told.
        """
        if size != self._size or not 0 <= worker < self._size:
            return Failure.from_wording(errors.ClusterConfigError.other_size, worker, size, self._size)
        if worker in self._members and self.failure is None:
            there = self._members[worker]
            return Failure.from_wording(errors.ClusterConfigError.taken, worker, there.host, there.pid)
        return self.failure

    def joined(self, worker: int, about: dict[str, Any], now: float) -> None:
        """A worker has joined that was not refused; it may be told something from now on.

        Args:
            worker: its index.
            about: its "host", "pid", "versions" and "replicas"; "came_to" is the host of the coordinator's machine that
                it connected to.
            now: the time.

        Raises:
            KeyError, TypeError, ValueError or AttributeError: `about` is something else, and the worker has not joined.
        """
        versions = {str(name): str(version) for name, version in about["versions"].items()}
        host, pid, replicas, came_to = (about[name] for name in ("host", "pid", "replicas", "came_to"))
        self._members[worker] = _JoinedMember(str(host), int(pid), versions, int(replicas), now, str(came_to))
        self._compare_members(worker)
        self._miss_ended(now)
        self._warn_of_strangers()
        if self.complete and self.failure is None:
            self._tell(None, ["go", self._reached()])

    def received(self, worker: int, message: Message, now: float) -> None:
        """A message of a member has come.

        Raises:
            BadMessageError: it is none that a member sends.
        """
        # What comes is a sign of life, whatever it says.
        member = self._members[worker]
        member.heard = now
        try:
            # Nothing but an `_on_...` is called because a message names it.
            getattr(self, f"_on_{message[0].replace(' ', '_')}")(worker, member, *message[1:])
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:  # int(inf) is one too
            raise BadMessageError(f"{message[0]}: {type(error).__name__}: {error}") from None

    def closed(self, worker: int, now: float) -> None:
        """The connection of a member has ended."""
        self._members[worker].closed = True
        self._end(worker, now)

    @property
    def steps(self) -> int:
        """The last step that a member has reported; 0 if none has."""
        return max((member.step or 0 for member in self._members.values()), default=0)

    def exited(self, worker: int, status: int, now: float) -> None:
        """The process of a worker has ended; the status is negative if it was a signal."""
        self._statuses[worker] = status
        if worker in self._members:
            self._end(worker, now)
        else:
            self._miss_ended(now)

    def refused_strangers(self, text: str) -> None:
        """Others than the workers have connected, as the text says; one member warns of it, once one is there."""
        self._strangers = self._untold = text
        self._warn_of_strangers()

    def _warn_of_strangers(self) -> None:
        there = [worker for worker, member in self._members.items() if not member.left and not member.closed]
        if there and self._untold:
            self._tell(min(there), ["warning", self._untold])
            self._untold = ""

    def tick(self, now: float) -> None:
        """Looks at everything that depends on the time; to be called several times a second."""
        if now - self._ticked > _STOOD_STILL:
            self._forgive(now - self._ticked, now)
        self._ticked = now
        # First of all: the first failure stays, and a member that has ended must not be called silent.
        for worker, deadline in list(self._ending.items()):
            if now >= deadline:
                self._lose(worker)
        # A worker without others need not join: its strategy does not.
        if not self.complete and self._size > 1 and now - self._began > self.limits.join:
            missing = [worker for worker in range(self._size) if worker not in self._members]
            about = missing, self._size, self.limits.join, self._local, self._strangers
            self._fail(Failure.from_wording(errors.WorkersMissingError.not_joined, *about))
        for worker, member in self._members.items():
            if now - member.heard > self.limits.heartbeat and not member.left and not member.closed:
                row = self._row(worker, now)
                self._fail(Failure.from_wording(errors.WorkerLostError.silent, row, self.limits.heartbeat))
        for ticket in [ticket for ticket, wait in self._waits.items() if now >= wait.began + wait.timeout]:
            self._give_up(ticket, now)
        self._end_steps_in_vain(now)
        self._end_stall(now)
        self._log.prune()

    def _end_steps_in_vain(self, now: float) -> None:
        """Fails the job if a member stays in a step that another one gave up.

        A step begins with its entries in the log. So members with equally many entries are in the same step, or one of
        them has it behind it and is in none. A launch that was left before it was made has no entry: a member that is
        in it has one more, until who left it makes it after all.
        """
        passed, at = self._log.passed, self._log.position
        for position, leavers in list(self._given_up.items()):
            for worker in [each for each, (*_, is_next) in leavers.items() if is_next and at(each) >= position]:
                del leavers[worker]  # it has come to that launch again
            if position < passed or not leavers:
                del self._given_up[position]
                self._left_by_all.discard(position)
        before, self._in_vain = self._in_vain, {}
        if not self._given_up:
            return
        for worker, member in self._members.items():
            position = self._left_launch(worker)
            who = self._given_up.get(position)
            if who is None or worker in who or member.left or member.closed:
                continue
            known = before.get(worker, (position, now))
            self._in_vain[worker] = known if known[0] == position else (position, now)
        for position, since in list(self._in_vain.values()):
            for worker, (exception, patience, _) in self._given_up[position].items():
                if now - since >= max(patience, self.limits.heartbeat if position in self._left_by_all else 0.0):
                    waiting = [other for other, (there, _) in sorted(self._in_vain.items()) if there == position]
                    row = self._row(worker, now)
                    self._fail(Failure.from_wording(errors.WorkerLostError.gave_up, row, waiting, exception))

    def _left_launch(self, worker: int) -> int:
        """The place of a launch that another member has left, for which this one waits; -1 if it waits for none."""
        member, at = self._members[worker], self._log.position
        for place, who in self._given_up.items():
            if not any(is_next for *_, is_next in who.values()):
                if place == at(worker) and member.does.in_step:
                    return place
                continue
            # Those that wait for it have told of that launch, and perhaps ask whether all come to it. If all have left
            # it, they may ask for something else. As long as another one is to come, nobody can make it again.
            all_left = place in self._left_by_all
            has_come = all(at(each) >= place or each in who for each, of in self._members.items() if not of.closed)
            if place <= at(worker) and has_come and (member.does.in_step or (member.does.asks and not all_left)):
                return place
        return -1

    def _end_stall(self, now: float) -> None:
        """Tells all of members that the others wait for, or fails the job."""
        stall = None
        if self.complete and self.failure is None:
            stall = self._stalls.look(self._members, self._log.position, self.limits.stall, now)
        if stall is None:
            return
        rows = [self._row(each, now) for each in stall.asked]
        about = rows, stall.stacks, stall.workers
        if not stall.is_late:
            self._tell(None, ["warning", describe_stall(*about, stall.waiting, stall.seconds)])
        elif stall.waiting:
            wording = errors.WorkerLostError.stalled
            self._fail(Failure.from_wording(wording, rows[0], *about, stall.waiting, stall.seconds))
        else:
            self._fail(Failure.from_wording(errors.WorkerLostError.none_goes_on, *about, stall.seconds))

    def _reached(self) -> str:
        """The host under which the other workers reach the machine of worker 0 and of the coordinator."""
        hosts = [member.came_to for worker, member in sorted(self._members.items()) if worker]
        return next((host for host in hosts if not is_loopback(host)), hosts[0] if hosts else "")

    def _forgive(self, stood: float, now: float) -> None:
        """Moves all times on by the seconds in which this machine stood still, but none beyond now."""
        self._began += stood
        for member in self._members.values():
            member.heard = max(member.heard, min(member.heard + stood, now))
        for worker, deadline in self._ending.items():
            self._ending[worker] = min(deadline + stood, now + STATUS_PATIENCE)
        for wait in self._waits.values():
            wait.began = min(wait.began + stood, now)
        for worker, (position, since) in self._in_vain.items():
            self._in_vain[worker] = position, min(since + stood, now)
        self._stalls.forgive(stood)

    def rows(self, now: float) -> list[errors.WorkerRow]:
        """What is known of each worker."""
        return [self._row(worker, now) for worker in range(self._size)]

    def _row(self, worker: int, now: float) -> errors.WorkerRow:
        member = self._members.get(worker)
        if member is None:
            return errors.WorkerRow(worker, self._size)
        did = member.launches, member.launched, member.step, member.sync_point
        silent = round(max(now - member.heard, 0.0), 3)
        return errors.WorkerRow(worker, self._size, member.host, member.pid, *did, silent)

    def _fail(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._tell(None, ["failure", failure.as_json()])

    # Members that join and go

    def _compare_members(self, worker: int) -> None:
        """Compares a member that has just joined with the first one."""
        first, new = next(iter(self._members.values())), self._members[worker]
        self._compare(DEVICES, errors.WorkerVersionError.of_devices)
        for package in (first.versions.keys() | new.versions.keys()) - {DEVICES, STRATEGY}:
            if first.versions.get(package) != new.versions.get(package):
                groups = self._grouped(lambda member: member.versions.get(package, "not there"))  # noqa: B023
                self._fail(Failure.from_wording(errors.WorkerVersionError.of_package, package, groups))
        self._compare(STRATEGY, errors.WorkerVersionError.of_strategies)  # late, as older versions do not know it
        if first.replicas != new.replicas:
            groups = self._grouped(lambda member: str(member.replicas))
            self._fail(Failure.from_wording(errors.WorkerVersionError.of_replicas, groups))

    def _compare(self, kind: str, wording: Callable[..., errors.WorkerVersionError]) -> None:
        """Fails the job if members differ in something that they have told; not all tell it."""
        if len({each.versions[kind] for each in self._members.values() if kind in each.versions}) > 1:
            self._fail(Failure.from_wording(wording, self._grouped(lambda each: each.versions.get(kind, "not known"))))

    def _grouped(self, key: Callable[[_JoinedMember], str]) -> tuple[tuple[tuple[int, ...], str], ...]:
        """The members that are here, grouped by what `key` says of them."""
        groups: dict[str, list[int]] = {}
        for worker, member in sorted(self._members.items()):
            groups.setdefault(key(member), []).append(worker)
        return tuple((tuple(indices), value) for value, indices in groups.items())

    def _miss_ended(self, now: float) -> None:
        """Fails the job if members wait for a worker to join, and that worker has ended already."""
        ended = [worker for worker in self._statuses if worker not in self._members]
        if self._members and ended:
            self._fail(self._exit_failure(ended[0], now))

    def _end(self, worker: int, now: float) -> None:
        """Notes that a member seems to have ended. It is lost once its messages are read and its status is known."""
        member = self._members[worker]
        if member.left:
            return
        known = worker in self._statuses or not self._knows_statuses
        self._ending.setdefault(worker, now + STATUS_PATIENCE)
        if member.closed and known:
            self._lose(worker)

    def _lose(self, worker: int) -> None:
        del self._ending[worker]
        member = self._members[worker]
        member.closed = True
        if not member.left:
            self._fail(self._exit_failure(worker, member.heard))

    def _exit_failure(self, worker: int, now: float) -> Failure:
        row, status = self._row(worker, now), self._statuses.get(worker)
        return (
            Failure.from_wording(errors.WorkerLostError.vanished, row)
            if status is None
            else Failure.from_exit(row, status)
        )

    # Messages

    def _on_beat(self, worker: int, member: _JoinedMember, progress: list[Any], *does: int) -> None:
        member.does = Doing(*map(int, does))
        self._progress(member, progress)
        self._tell(worker, ["beat"])

    def _progress(self, member: _JoinedMember, progress: list[Any]) -> None:
        if progress:
            step, sync_point = progress
            member.step = None if step is None else int(step)
            member.sync_point = str(sync_point)

    def _on_program(self, worker: int, member: _JoinedMember, code: str, kind: str, words: str) -> None:
        self._programs.setdefault(bytes.fromhex(code), (str(kind), str(words)))

    def _on_log(
        self, worker: int, member: _JoinedMember, text: str, launches: int, progress: list[Any], *wait: Any
    ) -> None:
        entries = unpacked(text)
        difference = self._log.extend(worker, entries)
        member.launches = int(launches)
        self._progress(member, progress)
        for code in backwards(entries):
            kind, words = self._programs.get(code, ("", ""))
            if kind == LAUNCH:
                member.launched = words
                break
        if difference is not None:
            self._disagree(*difference)
        elif wait:
            number, timeout = wait
            member.at_end = entries.endswith(END)
            ticket = worker, int(number)
            position = self._log.wait(worker, ticket)
            if timeout is not None:
                kind, words = self._programs.get(entries[-ENTRY:], ("", "the end of the program"))
                point = f"the {kind} {words}" if kind == COMPILE else words
                self._waits[ticket] = _UnansweredWait(position, point, float(timeout), member.heard)
        for ticket in self._log.released():
            self._answer(ticket, None)

    def _disagree(self, position: int, entries: dict[bytes, tuple[int, ...]]) -> None:
        if END not in entries:
            groups = tuple(sorted((indices, self._in_words(code)) for code, indices in entries.items()))
            self._fail(Failure.from_wording(errors.ProgramDisagreementError.differ, position, groups))
            return
        (early,) = (indices[0] for code, indices in entries.items() if code == END)
        (other,) = (indices[0] for code, indices in entries.items() if code != END)
        (doing,) = (self._in_words(code) for code in entries if code != END)
        row = self._row(early, self._members[early].heard)
        self._fail(Failure.from_wording(errors.WorkerLostError.left, row, other, doing))

    def _in_words(self, code: bytes) -> str:
        if code == END:
            return "end of its program"
        kind, words = self._programs.get(code, (LAUNCH, f"program {code.hex()}"))
        return f"{kind} {words}"

    def _on_put(self, worker: int, member: _JoinedMember, key: str, value: object) -> None:
        waiting = [ticket for ticket, wait in self._waits.items() if wait.what == key]
        if self._has_room(str(key)):
            self._values[str(key)] = value
            for ticket in waiting:
                self._answer(ticket, value)
        else:  # the members that ask for it are told; one that only puts goes on
            for ticket in waiting:
                self._refuse(ticket, str(key))

    def _on_drop(self, worker: int, member: _JoinedMember, *prefixes: str) -> None:
        beginnings = tuple(map(str, prefixes))
        for key in [key for key in self._values if key.startswith(beginnings)]:
            del self._values[key]

    def _on_get(self, worker: int, member: _JoinedMember, number: int, key: str, timeout: float | None) -> None:
        ticket = worker, int(number)
        if key in self._values:
            self._answer(ticket, self._values[key])
        elif not self._has_room(str(key)):
            self._refuse(ticket, str(key))
        else:
            self._waits[ticket] = _UnansweredWait(
                str(key), "", float("inf" if timeout is None else timeout), member.heard
            )
            if timeout is not None and timeout <= 0:  # now, and not at the next tick: the chief may ask for each worker
                self._give_up(ticket, member.heard)

    def _on_rows(self, worker: int, member: _JoinedMember, number: int, first: int) -> None:
        some = range(max(int(first), 0), self._size)[:_ROWS]
        self._answer((worker, int(number)), [dataclasses.asdict(self._row(each, member.heard)) for each in some])

    def _on_where(self, worker: int, member: _JoinedMember, number: int) -> None:
        """Where all members are, in words. When a run stands still, all of them ask at about the same time."""
        asked, lines = self._where
        if not lines or member.heard - asked >= self._size / _ROWS:
            lines = in_short(self.rows(member.heard))
            self._where = member.heard, lines
        self._answer((worker, int(number)), lines)

    def _on_exchange(self, worker: int, member: _JoinedMember, name: str, value: object) -> None:
        values = self._exchanges.setdefault(str(name), {})
        values[worker] = value
        if len(values) == self._size:
            message = ["exchanged", name, [value for _, value in sorted(values.items())]]
            self._tell(None, message if len(encode(message)) < LONGEST_LINE else ["exchanged", name, None])
            del self._exchanges[name]
        # Members make up the names: one that is broken must not fill the memory.
        elif len(self._exchanges) > _MOST_EXCHANGES:
            raise ValueError("too many exchanges")

    def _on_parted(self, worker: int, member: _JoinedMember, other: int, reason: str) -> None:
        """A member does not reach another one: perhaps nobody does, and it is silent here too."""
        there = self._members[int(other)]
        if member is there or member.left or there.left or there.closed:
            return  # TensorFlow may give a member the text of the other one, which names this member
        row = self._row(int(other), member.heard)
        if row.silent > QUIET:
            self._fail(Failure.from_wording(errors.WorkerLostError.silent, row, round(row.silent, 1)))
        else:
            self._fail(
                Failure.from_wording(errors.WorkerLostError.parted, self._row(worker, member.heard), row, str(reason))
            )

    def _on_failed(self, worker: int, member: _JoinedMember, exception: str, progress: list[Any]) -> None:
        self._progress(member, progress)
        self._fail(Failure.from_wording(errors.WorkerLostError.raised, self._row(worker, member.heard), str(exception)))

    def _on_gave_up(
        self,
        worker: int,
        member: _JoinedMember,
        exception: str,
        interrupted: bool,
        is_launched: bool = False,
        is_next: bool = False,
    ) -> None:
        member.does = member.does._replace(in_step=False)
        if is_launched:
            there = {each: of for each, of in sorted(self._members.items()) if not (of.left or of.closed)}
            others = [each for each, of in there.items() if of.does.in_step]
            row = self._row(worker, member.heard)
            self._fail(Failure.from_wording(errors.WorkerLostError.gave_up, row, others, str(exception)))
            return
        patience = min(INTERRUPTED, self.limits.heartbeat / 2) if interrupted else self.limits.heartbeat
        leavers = self._given_up.setdefault(self._log.position(worker) + bool(is_next), {})
        leavers[worker] = str(exception), patience, bool(is_next)
        if is_next and all(each in leavers for each, of in self._members.items() if not (of.left or of.closed)):
            self._left_by_all.add(self._log.position(worker) + 1)

    def _on_stack(self, worker: int, member: _JoinedMember, text: str) -> None:
        self._stalls.take_stack(worker, str(text))

    def _on_withdrew(self, worker: int, member: _JoinedMember, launches: int) -> None:
        member.launches = int(launches)
        self._log.withdraw(worker)

    def _on_bye(self, worker: int, member: _JoinedMember) -> None:
        member.left = True
        self._ending.pop(worker, None)

    def _answer(self, ticket: tuple[int, int], value: object, kind: str = "answer") -> None:
        self._waits.pop(ticket, None)
        worker, number = ticket
        self._tell(worker, [kind, number, value])

    def _has_room(self, key: str) -> bool:
        return key in self._values or len(self._values) < _MOST_VALUES

    def _refuse(self, ticket: tuple[int, int], key: str) -> None:
        failure = Failure.from_wording(errors.WorkersMissingError.no_room, key, _MOST_VALUES)
        self._answer(ticket, failure.as_json(), "late")

    def _give_up(self, ticket: tuple[int, int], now: float) -> None:
        wait = self._waits[ticket]
        if isinstance(wait.what, int):
            late = self._log.give_up(wait.what, ticket)
            lines = in_short([self._row(each, now) for each in late])
            failure = Failure.from_wording(errors.WorkersMissingError.not_met, wait.point, late, lines, wait.timeout)
        else:
            failure = Failure.from_wording(errors.WorkersMissingError.no_value, wait.what, wait.timeout)
        self._answer(ticket, failure.as_json(), "late")
