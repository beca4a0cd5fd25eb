"""A worker's side of the connection to the coordinator.

`joining.join` makes a `Member` when all workers of the job are there. From then on a thread of the
member sends a sign of life several times within the heartbeat limit, sends what was launched at most ten times a
second, and receives.

What it guarantees:

- `launched` never waits. It appends to a list; the thread sends.
- Every wait ends when the job fails: it raises the first failure of the job, on each worker the same.
- The failure is known without asking: `failed` is an event, `check()` raises, and `on_failure` calls back.
- The process leaves with its own exit status. At exit the member waits until all have come to their end, says goodbye
  and ends its thread. After an exception that nobody caught it tells the coordinator, and waits for nobody.

`connection` has the thread, and the one that watches whether the machines of the other workers answer.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, overload

from replica_engine.errors import ReplicaEngineError, ReplicaUnwound, WorkerRow, base, worker_errors
from replica_engine.watch import timeline, watchdog
from replica_engine.workers import cluster
from replica_engine.workers.connection import Channel, Links, Welcome
from replica_engine.workers.messages import Message, MessageReader, print_place
from replica_engine.workers.program_log import COMPILE, END, LAUNCH, WAIT, Program, entry, packed

T = TypeVar("T")

LOGGER = logging.getLogger("replica_engine")

BATCH = 0.1  # seconds between two messages about launches
_BEATS = 4  # within the heartbeat limit, or one a second if that is more often
_MOST_ENTRIES = 10_000  # in a message, which has a longest length
_PATIENCE = 2.0  # seconds to wait for the rows of a warning
_LONGEST_EXCEPTION = 4000  # characters
_raised: list[BaseException] = []  # the exception that ends this process
_BUFFERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class NobodyWaits(Exception):
    """What ends a thread that waits for others before a launch which nobody needs any more."""


class Leave(threading.Event):
    """Is set when nobody needs a launch any more.

    Attributes:
        why: the exception that says so; None if a limit has passed.
    """

    why: BaseException | None = None


def no_calls() -> tuple[Sequence[int], int]:
    """The calls of the user's code by a program where none runs."""
    return (), 0


class Member(Channel):
    """This process as a worker of its job; made by `join`.

    Args:
        connection: the connection on which the worker was welcomed.
        lines: what has arrived on it and was not used.
        welcome: what is known from the welcome.
        early: messages that came together with the welcome.

    Attributes:
        refused: whether the coordinator did not take this worker in: the job has failed already, for example.
        worker: the index of this worker, from 0.
        size: the number of workers.
        heartbeat: the limit of the job, in seconds.
        failed: an event that is set when the job has failed.
        reached: the host under which the other workers reach the machine of worker 0; "" before all have joined.
        waiting: the threads that wait in a program for other workers; each adds and removes its ident.
        host_calls: returns the threads in which the program that waits has called the user's code, and how often it has
            done so; it is called on another thread.
        shorten: leaves only the frames of the user in the traceback of an error of this library that ends the process.
    """

    def __init__(
        self, connection: socket.socket, lines: MessageReader, welcome: Welcome, early: Sequence[Message] = ()
    ):
        super().__init__(connection, lines, welcome)
        self._on_silence: list[Callable[[], None]] = []
        self._links: Links | None = None
        self._held: socket.socket | None = None  # the port at which the others look whether this machine answers
        self._entries: list[bytes] = []  # those that were not sent yet
        self._noted = 0  # how many there were
        self._announced: int | None = None  # how many there were with the launch that was announced and not made
        self._known: dict[tuple[str, str], bytes] = {}
        self._launches = 0
        self._made = 0  # those that were made, and not only announced
        self._step: int | None = None
        self._sync_point = ""
        self._where = ""  # where the replicas are in a traced step that takes long
        self._progressed = False
        self._beat = self._batch = time.monotonic()  # when the next ones are due
        self._in_step: Callable[[], bool] = lambda: False
        self._waits_in_step = False
        self.waiting: set[int] = set()
        self.host_calls: Callable[[], tuple[Sequence[int], int]] = no_calls
        self._launching_thread: int | None = threading.main_thread().ident  # the one that told of a launch last
        self._hook: Callable[..., object] | None = None
        self.shorten: Callable[[ReplicaEngineError], ReplicaEngineError] = lambda error: error
        for message in early:
            self._take(message)
        _members.add(self)
        self._thread.start()
        watchdog.describe_workers(self.describe)
        timeline.name_after_worker(self.worker)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.tell_exception(error)
            self.close()
        else:
            self.leave()

    def on_silence(self, callback: Callable[[], None]) -> None:
        """Has a function called about once a second while the machine of another worker does not answer this one.

        Args:
            callback: is called on another thread. It must neither wait nor raise.
        """
        self._on_silence.append(callback)

    def tell_parted(self, other: int, reason: str) -> None:
        """Tells the job that this worker does not reach another one; all get it as a WorkerLostError.

        Args:
            other: the index of the other worker.
            reason: what broke, in words: "its connection was reset".
        """
        with self._changed:
            self._queue(["parted", other, reason])

    # What this worker does

    def tell_exception(self, error: BaseException) -> None:
        """Tells the job that this worker's program has raised; the others get it as a WorkerLostError."""
        if self._first_failure is None:
            with self._changed:
                self._flush_log()
                self._queue(["failed", base.in_words(error)[:_LONGEST_EXCEPTION], self._progress()])

    def tell_given_up(self, error: BaseException, is_launched: bool = False, is_next: bool = False) -> None:
        """Tells the job that an exception has ended a step of this worker early, which its program may catch.

        What was launched for the step may not have run here, so those who wait for it there do so in vain. If another
        worker stays in that step, all get a WorkerLostError. It stays as long as the function of `tell_whether_in_step`
        says so.

        Args:
            error: the exception.
            is_launched: whether a launch of the step is still there, which others would meet later: then all get the
                error at once.
            is_next: whether the others wait for a launch that this worker has not told of.
        """
        if self._first_failure is None:
            with self._changed:
                self._flush_log()
                first, *_ = base.in_words(error)[:_LONGEST_EXCEPTION].splitlines()  # the rest are notes for this worker
                if isinstance(error, ReplicaUnwound):  # which the user never sees
                    first = "its call was given up, by Ctrl-C for example"
                self._queue(["gave up", first, not isinstance(error, Exception), is_launched, is_next])

    def telling_left(self, launch: Callable[[], T], leave: Leave | None) -> T:
        """Calls what makes a launch. If an exception ends it before, the others may wait for it: see `tell_given_up`.

        Args:
            launch: makes it, and calls `launched`.
            leave: what ends it, if nobody needs it any more.
        """
        made, launches = self._made, self._launches
        try:
            return launch()
        except BaseException as error:  # also Ctrl-C
            if self._made == made:
                if isinstance(error, NobodyWaits):
                    why = (leave and leave.why) or TimeoutError("its limit has passed, or a host call has failed")
                    self.tell_given_up(why, is_next=self._launches == launches)
                else:
                    self.tell_given_up(error, is_next=self._launches == launches)
            raise

    def tell_whether_in_step(self, in_step: Callable[[], bool], waits: bool = False) -> None:
        """Has each sign of life say whether this worker is in a step that others may have given up.

        Args:
            in_step: is called on another thread. It must neither wait nor raise.
            waits: whether it counts as waiting for others in such a step, although `waiting` does not say so.
        """
        self._in_step, self._waits_in_step = in_step, waits

    def progress(self, step: int | None = None, sync_point: str | None = None) -> None:
        """Notes how far this worker is, for the message if it gets lost. It is sent with the next message.

        Args:
            step: the number of the step; None keeps the last one.
            sync_point: the last sync point, with its line; None keeps the last one.
        """
        with self._changed:
            self._step = self._step if step is None else step
            self._sync_point = self._sync_point if sync_point is None else sync_point
            self._progressed = True

    def compile(self, program: Program, timeout: float | None = None, warn_after: float | None = None) -> None:
        """Waits until all workers are about to compile the same program; call it before compiling.

        Args:
            program: the program.
            timeout: seconds to wait for the others; None waits without a limit.
            warn_after: seconds until a warning with a row for each worker, and until the next; None takes WARN_AFTER.

        Raises:
            ProgramDisagreementError: another worker does something else, or compiles another program.
            WorkersMissingError: the time ran out.
            WorkerLostError: a worker is lost.
        """
        with self.watched(program.words, warn_after):
            self._meet(self._entry(COMPILE, program.digest, program.words), timeout)

    def launched(self, program: Program) -> None:
        """Notes that this worker launches a program; it is compared with the others' without waiting.

        A difference becomes a failure of the job about a tenth of a second later.
        """
        with self._changed:
            self._made += 1
            announced, self._announced = self._announced, None
        if announced is None:
            self._note_launch(program)

    def _note_launch(self, program: Program) -> None:
        with self._changed:
            self._launches += 1
            self._note(self._entry(LAUNCH, program.digest, program.words))
            first = len(self._entries) == 1
        if first:
            self._wake_up()

    def announce(self, program: Program) -> int:
        """Notes a launch that this worker is about to make. Next comes `launched`, or `withdraw` takes it back.

        Returns:
            How many launches it has made, with this one.
        """
        self.withdraw()
        self._note_launch(program)
        with self._changed:
            self._announced = self._noted
            return self._launches

    def withdraw(self) -> None:
        """Takes an announced launch back, unless it was made, or the workers have met for it."""
        with self._changed:
            announced, self._announced = self._announced, None
            if announced is None or announced != self._noted:
                return
            self._noted -= 1
            self._launches -= 1
            if self._entries:  # not sent yet
                self._entries.pop()
            else:
                self._queue(["withdrew", self._launches])

    def meet(self, name: str, timeout: float | None = None, warn_after: float | None = None) -> None:
        """Waits until all workers have come here, and have launched the same before: a checkpoint, for example.

        Args:
            name: what the place is, in words, equal on all workers: "the checkpoint of step 100".
            timeout: seconds to wait for the others; None waits without a limit.
            warn_after: seconds until a warning with a row for each worker, and until the next; None takes WARN_AFTER.

        Raises:
            ProgramDisagreementError: another worker does something else.
            WorkersMissingError: the time ran out.
            WorkerLostError: a worker is lost.
        """
        with self.watched(name, warn_after):
            self._meet(self._entry(WAIT, name, name), timeout)

    @overload
    def exchange(self, name: str, value: object) -> list[Any]: ...

    @overload
    def exchange(self, name: str, value: object, patience: float | None) -> list[Any] | None: ...

    def exchange(self, name: str, value: object, patience: float | None = None) -> list[Any] | None:
        """Gives a value to all workers, and waits for those of all; each worker sends and gets one message.

        Like `meet`, it is compared with what the others do: one that has launched something else, or has come to its
        end, is an error, and not waited for. So it is called on the thread that launches. Values belong together by
        their place among all that was launched, so one that others bring late is taken for no later exchange.

        Args:
            name: what the values are, in words, equal on all workers: "the addresses".
            value: something small that JSON can hold: those of all workers must fit into a megabyte.
            patience: seconds to wait for the others; None waits without a limit.

        Returns:
            The values, by the index of the worker; None if the time ran out.

        Raises:
            ValueError: the values are too large.
            ProgramDisagreementError: another worker does something else.
            WorkerLostError: or another failure of the job.
        """
        code = self._entry(WAIT, name, name)
        with self._changed:
            self._note(code)
            self._flush_log()
            return self._exchange(f"{name} #{self._noted}", value, patience)

    def watched(self, what: str, warn_after: float | None = None) -> watchdog.Wait:
        """A wait for the others to come to `what`, whose warning has a row for each worker."""

        def describe(seconds: float) -> str | None:
            try:
                table = self._where_all_are()
            except ReplicaEngineError:  # the job has failed, which ends the wait
                return None
            return (
                f"worker {self.worker} has waited for {seconds:.3g} s for the other workers to come to {what}:\n"
                f"{table}\n"
                "A worker that is busy with something else comes later. If one never comes, look for a branch on the "
                "worker's index, and for a dataset that is longer on this worker."
            )

        return watchdog.Wait(describe, warn_after, of_workers=True)

    def rows(self, patience: float | None = None) -> list[WorkerRow]:
        """What the coordinator knows of each worker: where it runs, and how far it is.

        Args:
            patience: seconds to wait for its answer, after which nothing is known; None waits without a limit.
        """

        rows: list[WorkerRow] = []
        while len(rows) < self.size:
            some = self._asked_now(patience, "rows", len(rows))
            if some is None:
                return []
            rows += (WorkerRow(**row) for row in some)
        return rows

    def describe(self) -> str:
        """A table with a row for each worker, for the warning that a run stands still; "" if nothing is known."""
        try:
            table = self._where_all_are(_PATIENCE)
        except ReplicaEngineError:  # the job has failed, which has an error of its own
            return ""
        return f"The workers of the job:\n{table}" if table else ""

    # The beginning and the end

    def watch_links(self) -> None:
        """Watches from now on whether the machines of the other workers answer this one; all have joined."""
        try:
            own, self._held = cluster.held_address(self._address, self.reached)
        except OSError as error:
            LOGGER.info("worker %d has no port at which others can look for its machine: %s", self.worker, error)
            own = ""  # the others wait for it

        def addresses() -> Sequence[str]:
            try:
                return self._exchange("links", own, None) or ()  # at any time: not compared
            except ReplicaEngineError:  # the job has failed
                return ()

        def missed() -> None:
            for callback in list(self._on_silence):
                callback()

        def report(other: int, seconds: float) -> None:
            limit = "the limit is REPLICA_ENGINE_HEARTBEAT_TIMEOUT"
            self.tell_parted(other, f"its machine has not answered for {seconds:.2g} s ({limit})")

        self._links = Links(self.worker, self.size, self.heartbeat, addresses, missed, report)
        self._links.start()

    def leave(self, timeout: float | None = None) -> None:
        """Waits until the programs of all workers have come to their end, says goodbye and closes the connection.

        It is called at the exit of the process, if it was not before.

        Raises:
            WorkerLostError: a worker is lost, or goes on while this one has come to its end.
            WorkersMissingError: the time ran out.
        """
        if self._left or self._process != os.getpid():
            return
        try:
            self._meet(END, timeout)
            with self._changed:
                self._left = True  # the coordinator may end as soon as it has read this
                self._queue(["bye"])
        finally:
            self.close()

    def close(self) -> None:
        """Ends the thread and the connection without a goodbye: a job that has not failed loses this worker."""
        self._end_its_share()
        _members.discard(self)
        if self._process == os.getpid():
            self._end_thread()

    def _end_its_share(self) -> None:
        """Ends what this process does as a worker, besides the connection: timelines are those of a process alone."""
        self._left = True
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._before
        self._hook = None
        if self._links is not None:
            self._links.close()
        if self._held is not None:
            self._held.close()
        watchdog.forget_workers(self.describe)
        timeline.name_after_worker(0)

    def hook_exceptions(self) -> None:
        """Tells the job of an exception that ends the process, before Python prints it."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if self._process == os.getpid():
                _raised.append(error)
                self.tell_exception(error)
                self.close()
                if isinstance(error, ReplicaEngineError):
                    trace = self.shorten(error).__traceback__
                if self._launched_by_us and before is sys.__excepthook__ and print_place(error, trace):
                    return
            before(kind, error, trace)

        self._hook = sys.excepthook = hook
        self._before = before

    # Questions

    def _entry(self, kind: str, digest: str, words: str) -> bytes:
        """The entry for the log. The first time, it also tells the coordinator in words what the entry means."""
        # Read without the lock, at each launch: an entry never changes once it is there.
        code = self._known.get((kind, digest))
        if code is None:
            with self._changed:
                code = self._known[kind, digest] = entry(kind, digest)
                self._queue(["program", code.hex(), kind, words])
        return code

    def _where_all_are(self, patience: float | None = None) -> str:
        """A row for each worker; "" if nothing is known."""
        return "\n".join(f"  {line}" for line in self._asked_now(patience, "where") or ())

    def _asked_now(self, patience: float | None, kind: str, *more: object) -> Any:
        """The answer to a question, which comes after all that was launched before."""

        def question(number: int) -> Message:
            self._flush_log()
            return [kind, number, *more]

        return self._ask(question, patience)

    def _meet(self, code: bytes, timeout: float | None) -> None:
        def question(number: int) -> Message:
            self._note(code)
            return self._log_message(number, timeout)

        self._ask(question)

    def _note(self, code: bytes) -> None:
        """Adds an entry to the log; with the lock."""
        self._entries.append(code)
        self._noted += 1
        self._launching_thread = threading.get_ident()

    # What the thread calls. `_log_message`, `_flush_log` and `_progress` need the lock.

    def _log_message(self, *wait: object) -> Message:
        """A message with the entries not sent yet. If there are too many for one, others are queued before it."""
        while len(self._entries) > _MOST_ENTRIES:
            self._queue(["log", packed(self._entries[:_MOST_ENTRIES]), self._launches, []])
            del self._entries[:_MOST_ENTRIES]
        message = ["log", packed(self._entries), self._launches, self._progress(), *wait]
        self._entries.clear()
        return message

    def _flush_log(self) -> None:
        if self._entries:
            self._queue(self._log_message())

    def _progress(self) -> list[object]:
        """How far this worker is, if that has changed since it was sent."""
        progressed, self._progressed = self._progressed, False
        where = f"{worker_errors.NOW}{self._where}" if self._where else ""
        return [self._step, self._sync_point + where] if progressed else []

    def _fill(self, now: float) -> float:
        """Queues what is due, and returns when something will be due next."""
        where = watchdog.replicas() if now >= self._beat else self._where  # not under the lock: it asks other code
        with self._changed:
            self._progressed, self._where = self._progressed or where != self._where, where
            if now >= self._batch and self._entries:
                self._flush_log()
                self._batch = now + BATCH
            if self._first_failure is not None:
                return now + 1.0
            if now >= self._beat:
                calls, made = self.host_calls()
                waits, in_step = bool(self.waiting), self._in_step()
                asks = any(each.thread == self._launching_thread for each in self._answers.values())
                waits_now = (waits or (in_step and self._waits_in_step)) and not calls
                self._queue(["beat", self._progress(), in_step or waits, waits_now, asks, made])
                self._beat = now + min(1.0, self.heartbeat / _BEATS)
            return min(self._beat, self._batch) if self._entries else self._beat

    def _stack(self) -> str:
        """Where this process is, as text: host calls of the program that runs first."""
        return watchdog.format_users_stacks(self.host_calls()[0])

    def _forget(self) -> None:
        """In a forked child: the connection is the parent's.

        Nobody answers questions here, so they are errors at once, and timelines and warnings are those of a process on
        its own. The parent's thread may have held the lock at the fork.
        """
        self._changed = threading.Condition()
        self._stopping = True
        self._close_sockets()  # the parent's: the end of its connection is noticed only once no copy is open
        self._end_its_share()


_members: weakref.WeakSet[Member] = weakref.WeakSet()


def find_member(address: str, worker: int) -> Member | None:
    """The connection that this process has to a coordinator as this worker; None if there is none."""
    return next((each for each in list(_members) if (each._address, each.worker) == (address, worker)), None)


@atexit.register  # before most others, so that it runs after them
def _spare_the_collector() -> None:
    """Ends a worker whose program has raised soon, since the others are started again only when it has ended.

    With TensorFlow in the process, Python's cyclic collector goes through more than a million objects several times at
    exit, which takes a second, and three where the worker was stopped and its memory is cold. So the collector is kept
    off what lives now. Only the collector would close a file in a cycle, so files are flushed. What lives in cycles is
    not destroyed then; Python promises that of no object at exit.
    """
    if not _raised:
        return
    _raised.clear()
    for each in gc.get_objects():
        if issubclass(type(each), _BUFFERS):  # `isinstance` would ask each object, also those that stand for others
            with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads any more
                each.flush()
    gc.freeze()


@atexit.register
def _leave_all() -> None:
    """Says goodbye where the program has come to its end."""
    for member in list(_members):
        try:
            member.leave()
        except ReplicaEngineError as error:  # the exit status stays what it is
            LOGGER.warning("worker %d has come to its end, but its job has failed: %s", member.worker, error)


def _after_fork() -> None:
    for member in _members:
        member._forget()
    _members.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
