"""A worker's side of the connection to the coordinator.

`join` takes this process into its job and returns a `Member` when all workers are there. From then on a thread of the
member sends a sign of life several times within the heartbeat limit, sends what was launched at most ten times a
second, and receives.

What it guarantees:

- `launched` never waits. It appends to a list; the thread sends.
- Every wait ends when the job fails: it raises the first failure of the job, on each worker the same.
- The failure is known without asking: `failed` is an event, `check()` raises, and `on_failure` calls back.
- The process leaves with its own exit status. At exit the member waits until all have come to their end, says goodbye
  and ends its thread. After an exception that nobody caught it tells the coordinator, and waits for nobody.

The thread runs Python only, so it needs the interpreter lock. A process that holds the lock for longer than the
heartbeat limit, in one call of native code, counts as lost.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from replica_engine.errors import ReplicaEngineError, WorkerLostError, WorkerRow
from replica_engine.errors.base import in_words
from replica_engine.errors.hosts import slow_workers, where_workers_are
from replica_engine.hosts import wire
from replica_engine.hosts.clock import ClockComparison, ClockOffset, Silence
from replica_engine.hosts.failure import Failure, print_place
from replica_engine.hosts.launch_log import COMPILE, END, LAUNCH, WAIT, Program, entry, packed
from replica_engine.hosts.wire import BadMessageError, Lines, Message
from replica_engine.telemetry import timeline
from replica_engine.telemetry.all_workers import SharedTimelines
from replica_engine.telemetry.watchdog import Watch, describe_workers, forget_workers, replicas

LOGGER = logging.getLogger("replica_engine")

BATCH = 0.1  # seconds between two messages about launches
_BEATS = 4  # within the heartbeat limit, or one a second if that is more often
_READ = 1 << 16
_MOST_ENTRIES = 10_000  # in a message, which has a longest length
_GOODBYE = 2.0  # seconds to write the last messages
_PATIENCE = 2.0  # seconds to wait for the rows of a warning
_LONGEST_EXCEPTION = 4000  # characters


class _Answer:
    """A place for the answer to a question."""

    def __init__(self) -> None:
        self.come = False
        self.value: Any = None
        self.late: Failure | None = None


class Member:
    """This process as a worker of its job; made by `join`.

    Args:
        connection: the connection on which the worker was welcomed.
        lines: what has arrived on it and was not used.
        worker: the index of this worker.
        size: the number of workers.
        address: of the coordinator, for messages.
        heartbeat: the limit of the job, in seconds.
        launched_by_us: whether the coordinator runs in `replica-engine launch`.
        early: messages that came together with the welcome.

    Attributes:
        refused: whether the coordinator did not take this worker in: the job has failed already, for example.
        worker: the index of this worker, from 0.
        size: the number of workers.
        failed: an event that is set when the job has failed.
        reached: the host under which the other workers reach the machine of worker 0; "" before all have joined.
    """

    def __init__(
        self,
        connection: socket.socket,
        lines: Lines,
        *,
        worker: int,
        size: int,
        address: str,
        heartbeat: float,
        launched_by_us: bool,
        early: Sequence[Message] = (),
    ):
        self.worker, self.size = worker, size
        self.failed = threading.Event()
        self.reached = ""
        self.refused = False
        self._address = address
        self._heartbeat = heartbeat
        self._launched_by_us = launched_by_us
        self._socket, self._lines = connection, lines
        self._process = os.getpid()
        self._changed = threading.Condition()  # guards all that follows
        self._first_failure: Failure | None = None
        self._callbacks: list[Callable[[ReplicaEngineError], None]] = []
        self._complete = False
        self._answers: dict[int, _Answer] = {}
        self._numbers = itertools.count()
        self._unwritten = bytearray()
        self._entries: list[bytes] = []
        self._known: dict[tuple[str, str], bytes] = {}
        self._launches = 0
        self._step: int | None = None
        self._sync_point = ""
        self._where = ""  # where the replicas are in a traced step that takes long
        self._progressed = self._stopping = self._left = False
        self._clock = ClockComparison()
        self._wake, self._woken = socket.socketpair()
        for sock in (self._socket, self._wake, self._woken):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name=f"worker {worker} of {size}: member", daemon=True)
        self._hook: Callable[..., Any] | None = None
        for message in early:
            self._take(message)
        _members.add(self)
        self._timelines = SharedTimelines(self)
        self._thread.start()
        describe_workers(self.describe)
        timeline.share(self._timelines)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.tell_exception(error)
            self.close()
        else:
            self.leave()

    # Failures of the job

    @property
    def failure(self) -> ReplicaEngineError | None:
        """The first failure of the job, as an error to raise; None as long as there is none."""
        failure = self._first_failure
        return None if failure is None else failure.error()

    def check(self) -> None:
        """Raises the first failure of the job, if there is one.

        Raises:
            WorkerLostError, WorkersMissingError, WorkerVersionError or ProgramDisagreementError: the failure.
        """
        if self._first_failure is not None:
            raise self._first_failure.error()

    def on_failure(self, callback: Callable[[ReplicaEngineError], None]) -> None:
        """Has a function called when the job fails, on the member's thread; or at once if it has failed already.

        Args:
            callback: takes the error. It must neither wait nor raise.
        """
        with self._changed:
            failure = self._first_failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure.error())

    def explain(self, error: BaseException, patience: float | None = None) -> None:
        """Raises the failure of the job that is the cause of an error, if one becomes known in time.

        When a worker dies, the runtime of the others often says first that a connection was closed. Call this with such
        an error, and raise the error itself if this returns.

        Args:
            error: what the runtime raised; it becomes the cause of the failure.
            patience: seconds to wait for a failure; None waits until silence would have been noticed.

        Raises:
            WorkerLostError: or another failure of the job.
        """
        self.failed.wait(self._heartbeat + 1.0 if patience is None else patience)
        if self._first_failure is not None:
            raise self._first_failure.error() from error

    def tell_exception(self, error: BaseException) -> None:
        """Tells the job that this worker's program has raised; the others get it as a WorkerLostError."""
        if self._first_failure is None:
            with self._changed:
                self._flush_log()
                self._queue(["failed", in_words(error)[:_LONGEST_EXCEPTION], self._progress()])

    # What this worker does

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
            self._launches += 1
            self._entries.append(self._entry(LAUNCH, program.digest, program.words))
            first = len(self._entries) == 1
        if first:
            self._wake_up()

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

    def watched(self, what: str, warn_after: float | None = None) -> Watch:
        """A watch around a wait for the others to come to `what`; its warning has a row for each worker."""

        def describe(seconds: float) -> str | None:
            try:
                return slow_workers(self.worker, what, seconds, self.rows())
            except ReplicaEngineError:  # the job has failed, which ends the wait
                return None

        return Watch(describe, warn_after, of_workers=True)

    def put(self, key: str, value: Any) -> None:
        """Stores a value for all workers; a later value takes the place of an earlier one.

        A job keeps 10,000 values; what has no room is not stored, and `get` says so.

        Args:
            key: its name.
            value: something that JSON can hold, in less than a megabyte.

        Raises:
            TypeError or ValueError: JSON cannot hold it, or it is larger.
        """
        message = ["put", key, value]
        if len(wire.encode(message)) >= wire.LONGEST_LINE:
            raise ValueError(f"the value of {key!r} is larger than a megabyte; put its address, and not the value")
        with self._changed:
            self._queue(message)

    def drop(self, *prefixes: str) -> None:
        """Drops the values whose keys begin with one of the prefixes, so that the coordinator need not keep them."""
        with self._changed:
            self._queue(["drop", *prefixes])

    def get(self, key: str, timeout: float | None = None) -> Any:
        """Waits until a worker has stored a value under a key, and returns it.

        Raises:
            WorkersMissingError: there was none within `timeout` seconds, or the job has no room for one.
            WorkerLostError: or another failure of the job.
        """
        return self._ask(lambda number: ["get", number, key, timeout])

    def rows(self, patience: float | None = None) -> list[WorkerRow]:
        """What the coordinator knows of each worker: where it runs, and how far it is.

        Args:
            patience: seconds to wait for its answer, after which nothing is known; None waits without a limit.
        """

        def question(number: int) -> Message:
            self._flush_log()
            return ["rows", number]

        return [WorkerRow(**row) for row in self._ask(question, patience) or ()]

    def describe(self) -> str:
        """A table with a row for each worker, for the warning that a run stands still; "" if nothing is known."""
        try:
            rows = self.rows(_PATIENCE)
        except ReplicaEngineError:  # the job has failed, which has an error of its own
            return ""
        return where_workers_are(rows) if rows else ""

    @property
    def clock_offset(self) -> ClockOffset | None:
        """How far the coordinator's clock is ahead of this process' clock; None before it was measured."""
        return self._clock.offset

    # The beginning and the end

    def wait_for_all(self) -> None:
        """Waits until all workers have joined; the join limit of the coordinator ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete or self._first_failure is not None)
            complete = self._complete  # what failed after that is not a failure to join
        if not complete:
            self.check()

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
        self._left = True
        self._unhook()
        _members.discard(self)
        forget_workers(self.describe)
        timeline.share_no_more(self._timelines)
        if self._process != os.getpid():
            return
        with self._changed:
            self._stopping = True
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(_GOODBYE + 1.0)

    def hook_exceptions(self) -> None:
        """Tells the job of an exception that ends the process, before Python prints it."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if self._process == os.getpid():
                self.tell_exception(error)
                self.close()
                if self._launched_by_us and before is sys.__excepthook__ and print_place(error, trace):
                    return
            before(kind, error, trace)

        self._hook = sys.excepthook = hook
        self._before = before

    def _unhook(self) -> None:
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._before
        self._hook = None

    # Questions

    def _entry(self, kind: str, digest: str, words: str) -> bytes:
        """The entry for the log. The first time, it also tells the coordinator in words what the entry means."""
        code = self._known.get((kind, digest))
        if code is None:
            with self._changed:
                code = self._known[kind, digest] = entry(kind, digest)
                self._queue(["program", code.hex(), kind, words])
        return code

    def _meet(self, code: bytes, timeout: float | None) -> None:
        def question(number: int) -> Message:
            self._entries.append(code)
            return self._log_message(number, timeout)

        self._ask(question)

    def _ask(self, question: Callable[[int], Message], patience: float | None = None) -> Any:
        """Sends a message with a number, and waits for the answer with that number; None if it lasts too long."""
        with self._changed:
            number = next(self._numbers)
            answer = self._answers[number] = _Answer()
            self._queue(question(number))
            try:
                over = lambda: answer.come or self._first_failure is not None or self._stopping  # noqa: E731
                if not self._changed.wait_for(over, patience):
                    return None
            finally:
                del self._answers[number]
        if answer.late is not None:
            raise answer.late.error()
        if answer.come:
            return answer.value
        self.check()
        raise WorkerLostError.no_coordinator(self._address, self._launched_by_us)  # closed by another thread

    # The thread. `_queue`, `_log_message`, `_flush_log` and `_progress` need the lock.

    def _queue(self, message: Message) -> None:
        self._unwritten += wire.encode(message)
        self._wake_up()

    def _log_message(self, *wait: Any) -> Message:
        """A message with the entries not sent yet. If there are too many for one, others are queued before it."""
        while len(self._entries) > _MOST_ENTRIES:
            self._unwritten += wire.encode(["log", packed(self._entries[:_MOST_ENTRIES]), self._launches, []])
            del self._entries[:_MOST_ENTRIES]
        message = ["log", packed(self._entries), self._launches, self._progress(), *wait]
        self._entries.clear()
        return message

    def _flush_log(self) -> None:
        if self._entries:
            self._unwritten += wire.encode(self._log_message())

    def _progress(self) -> list[Any]:
        """How far this worker is, if that has changed since it was sent."""
        progressed, self._progressed = self._progressed, False
        where = f"; now {self._where}" if self._where else ""
        return [self._step, self._sync_point + where] if progressed else []

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake. Closed: it has ended
            self._wake.send(b"\0")

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        try:
            self._serve_with(selector)
        except (OSError, BadMessageError):
            self._fail(Failure.of(WorkerLostError.no_coordinator, self._address, self._launched_by_us))
        finally:
            selector.close()
            for sock in (self._socket, self._wake, self._woken):
                sock.close()
            with self._changed:
                self._stopping = True
                self._changed.notify_all()

    def _serve_with(self, selector: selectors.BaseSelector) -> None:
        interval = min(1.0, self._heartbeat / _BEATS)
        now = time.monotonic()
        silence = Silence(now)
        beat, batch, stop = now, now, None
        while True:
            where = replicas() if now >= beat else self._where  # not under the lock: it asks other code
            with self._changed:
                self._progressed, self._where = self._progressed or where != self._where, where
                if now >= batch and self._entries:
                    self._flush_log()
                    batch = now + BATCH
                if now >= beat and self._first_failure is None:
                    self._unwritten += wire.encode(["beat", time.perf_counter(), self._progress()])
                    beat = now + interval
                self._write()
                selector.modify(self._socket, selectors.EVENT_READ | (_WRITE if self._unwritten else 0))
                if self._stopping:
                    stop = now + _GOODBYE if stop is None else stop
                    if not self._unwritten or now >= stop:
                        return
                due = min(beat, batch if self._entries else beat) if self._first_failure is None else now + 1.0
            patience = max(due - now, 0.0)
            events = selector.select(patience)
            now = time.monotonic()
            for key, mask in events:
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(_READ)
                elif mask & selectors.EVENT_READ:
                    silence.end(now)
                    data = self._socket.recv(_READ)
                    if not data:
                        raise ConnectionError("closed")
                    for message in self._lines.feed(data):
                        self._take(message)
            if silence.seconds(now, patience) > self._heartbeat and not self.failed.is_set():
                arguments = self._address, self._launched_by_us, self._heartbeat
                self._fail(Failure.of(WorkerLostError.no_coordinator, *arguments))

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unwritten:
                del self._unwritten[: self._socket.send(self._unwritten)]

    def _take(self, message: Message) -> None:
        """Takes a message of the coordinator."""
        kind, *rest = message
        try:
            if kind == "beat":
                sent, theirs = rest
                self._clock.add(sent, theirs, time.perf_counter())
            elif kind == "go":
                (reached,) = rest
                with self._changed:
                    self.reached, self._complete = str(reached), True
                    self._changed.notify_all()
            elif kind in ("answer", "late"):
                number, value = rest
                with self._changed:
                    answer = self._answers.get(number, _Answer())
                    answer.late = Failure.from_json(value) if kind == "late" else None
                    answer.come, answer.value = True, value
                    self._changed.notify_all()
            elif kind in ("failure", "refused"):
                (failure,) = rest
                self.refused = kind == "refused"
                self._fail(Failure.from_json(failure))
            else:
                raise ValueError("an unknown kind")
        except (AttributeError, TypeError, ValueError) as error:
            raise BadMessageError(f"{kind}: {error}") from None

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            if self._first_failure is not None or self._left:
                return
            self._first_failure = failure
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        self.failed.set()
        for callback in callbacks:
            callback(failure.error())

    def _forget(self) -> None:
        """In a forked child: the connection is the parent's, and closing the copy here lets its end be noticed.

        Nobody answers questions here, so they are errors at once, and timelines and warnings are those of a process on
        its own. The parent's thread may have held the lock at the fork.
        """
        self._left = self._stopping = True
        self._changed = threading.Condition()
        self._unhook()
        forget_workers(self.describe)
        timeline.share_no_more(self._timelines)
        for sock in (self._socket, self._wake, self._woken):
            sock.close()


_WRITE = selectors.EVENT_WRITE

_members: weakref.WeakSet[Member] = weakref.WeakSet()


def member_of(address: str, worker: int) -> Member | None:
    """The connection that this process has to a coordinator as this worker; None if there is none."""
    return next((each for each in list(_members) if (each._address, each.worker) == (address, worker)), None)


@atexit.register
def _leave_all() -> None:
    """Says goodbye where the program has come to its end."""
    for member in list(_members):
        try:
            member.leave()
        except ReplicaEngineError as error:  # the exit status stays what it is
            LOGGER.warning("worker %d has come to its end, but its job has failed: %s", member.worker, error)


def _after_fork() -> None:
    for member in list(_members):
        member._forget()
    _members.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
