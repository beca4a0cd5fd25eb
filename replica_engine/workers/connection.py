"""A member's connection to the coordinator: its thread, its questions, and the machines of the others.

- `Channel` has the socket and the thread that serves it. It asks the coordinator and gets its answers, and knows the
  values for all workers and the first failure of the job. Every wait for an answer ends when the job fails.
- `Links` finds out whether the machines of the other workers answer this one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from replica_engine.errors import ReplicaEngineError, WorkerLostError, WorkerRow
from replica_engine.workers import cluster, messages
from replica_engine.workers.messages import BadMessageError, Failure, Message, MessageReader

LOGGER = logging.getLogger("replica_engine")


class _Answer:
    """A place for the answer to a question."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()  # that waits for it
        self.come = False
        self.value: Any = None
        self.late: Failure | None = None


class Welcome(NamedTuple):
    """What a worker knows when the coordinator has taken it in.

    Attributes:
        worker: the index of this worker.
        size: the number of workers.
        address: of the coordinator, for messages.
        heartbeat: the limit of the job, in seconds.
        launched_by_us: whether the coordinator runs in `replica-engine launch`.
    """

    worker: int
    size: int
    address: str
    heartbeat: float
    launched_by_us: bool


# The socket and its thread.

GOODBYE = 2.0  # seconds to write the last messages
_LATE = 0.2  # seconds; a process that runs later than this after it was to has stood still
_READ = 1 << 16
_WRITE = selectors.EVENT_WRITE


class Channel:
    """What a member and the coordinator say to each other, without what the member does; `Member` says that.

    The thread writes what is queued, reads messages, and notices when the coordinator is gone or silent. It runs Python
    only, so it needs the interpreter lock. A process that holds the lock for longer than the heartbeat limit, in one
    call of native code, counts as lost.

    Args:
        sock: the connection on which the worker was welcomed.
        lines: what has arrived on it and was not used.
        welcome: what is known from the welcome.
    """

    def __init__(self, sock: socket.socket, lines: MessageReader, welcome: Welcome):
        self.worker, self.size, self.heartbeat = welcome.worker, welcome.size, welcome.heartbeat
        self.failed = threading.Event()
        self.refused = False
        self._address = welcome.address
        self._launched_by_us = welcome.launched_by_us
        self.reached = ""
        self._process = os.getpid()
        self._left = False
        self._socket, self._lines = sock, lines
        self._wake, self._woken = socket.socketpair()
        for each in (self._socket, self._wake, self._woken):
            each.setblocking(False)
        name = f"worker {welcome.worker} of {welcome.size}: member"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._changed = threading.Condition()  # guards all that follows
        self._first_failure: Failure | None = None
        self._callbacks: list[Callable[[ReplicaEngineError], None]] = []
        self._complete = False
        self._answers: dict[int | str, _Answer] = {}  # to questions by number, and to exchanges by name
        self._numbers = itertools.count()
        self._unwritten = bytearray()
        self._stopping = False  # whether the thread has ended or is about to

    def wait_for_all(self) -> None:
        """Waits until all workers have joined; the join limit of the coordinator ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete or self._first_failure is not None)
            complete = self._complete  # what failed after that is not a failure to join
        if not complete:
            self.check()

    @property
    def failure(self) -> ReplicaEngineError | None:
        """The first failure of the job, as an error to raise; None as long as there is none."""
        failure = self._first_failure
        return None if failure is None else failure.error()

    @property
    def is_cause(self) -> bool:
        """Whether the job has failed because of this worker."""
        return self._first_failure is not None and self._first_failure.worker == self.worker

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
        self.failed.wait(self.heartbeat + 1.0 if patience is None else patience)
        if self._first_failure is not None:
            raise self._first_failure.error() from error

    def put(self, key: str, value: object) -> None:
        """Stores a value for all workers; a later value takes the place of an earlier one.

        A job keeps 10,000 values; what has no room is not stored, and `get` says so.

        Args:
            key: its name.
            value: something that JSON can hold, in less than a megabyte.

        Raises:
            TypeError or ValueError: JSON cannot hold it, or it is larger.
        """
        message = ["put", key, value]
        if len(messages.encode(message)) >= messages.LONGEST_LINE:
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

    def _exchange(self, key: str, value: object, patience: float | None) -> list[Any] | None:
        """The values that all workers have given for a key, which must not be used again; see `Member.exchange`."""
        message = ["exchange", key, value]
        length = len(messages.encode(message))
        if length < messages.LONGEST_LINE:
            with self._changed:
                answer = self._answer_to(key, message, patience)
            if not answer.come:
                return None
            if answer.value is not None:
                return list(answer.value)
        raise ValueError(
            f"the values of all {self.size} workers for {key!r} are larger than a megabyte; worker {self.worker} has "
            f"{length:,} bytes"
        )

    def _ask(self, question: Callable[[int], Message], patience: float | None = None) -> Any:
        """Sends a message with a number, and waits for the answer with that number; None if it lasts too long."""
        with self._changed:
            number = next(self._numbers)
            answer = self._answer_to(number, question(number), patience)
        if answer.late is not None:
            raise answer.late.error()
        return answer.value

    def _answer_to(self, key: int | str, message: Message, patience: float | None) -> _Answer:
        """Sends a message, with the lock, and waits for the answer with its key; it has not come if it lasts too long.

        Raises:
            WorkerLostError: or another failure of the job, which ends the wait.
        """
        answer = self._answers[key] = _Answer()
        self._queue(message)
        try:
            self._wait_for(answer, patience)
        finally:
            del self._answers[key]
        return answer

    def _wait_for(self, answer: _Answer, patience: float | None) -> None:
        over = lambda: answer.come or self._first_failure is not None or self._stopping  # noqa: E731
        if self._changed.wait_for(over, patience) and not answer.come:
            self.check()
            raise WorkerLostError(  # by another thread
                f"{self._row.name} waits for the others no longer: it has left the job, at its end or because of an "
                "exception, which its own output says."
            )

    def _fill(self, now: float) -> float:
        """Queues what is due, and returns when something will be due next."""
        raise NotImplementedError

    def _tell_stack(self) -> None:
        """Tells the coordinator where this process is; on a thread of its own, since it reads the user's files."""
        text = self._stack()
        with self._changed:
            self._queue(["stack", text])

    def _stack(self) -> str:
        """Where this process is, as text."""
        raise NotImplementedError

    def _take(self, message: Message) -> None:
        """Takes a message of the coordinator."""
        kind, *rest = message
        try:
            if kind == "beat":
                () = rest  # that it has come ends the coordinator's silence
            elif kind == "go":
                (reached,) = rest
                with self._changed:
                    self.reached, self._complete = str(reached), True
                    self._changed.notify_all()
            elif kind == "stack":
                () = rest
                threading.Thread(target=self._tell_stack, name=f"{self._thread.name}'s stack", daemon=True).start()
            elif kind == "warning":
                LOGGER.warning(str(rest[0]))
            elif kind in ("answer", "exchanged", "late"):
                key, value = rest
                with self._changed:
                    answer = self._answers.get(key, _Answer())  # nobody waits after an interrupt
                    answer.late = Failure.from_json(value) if kind == "late" else None
                    answer.come, answer.value = True, value
                    self._changed.notify_all()
            elif kind in ("failure", "refused"):
                (failure,) = rest
                self.refused = kind == "refused"
                self._fail(Failure.from_json(failure))
            else:
                raise ValueError("an unknown kind")
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise BadMessageError(f"{kind}: {error}") from None

    def _lose_coordinator(self, seconds: float | None) -> None:
        """The coordinator is lost: it was silent for so many seconds, or has closed the connection (None)."""
        about = self._row, self._address, self._launched_by_us, seconds
        self._fail(Failure.from_wording(WorkerLostError.no_coordinator, *about))

    @property
    def _row(self) -> WorkerRow:
        return WorkerRow(self.worker, self.size, socket.gethostname(), self._process)

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            if self._first_failure is not None or self._left:
                return
            self._first_failure = failure
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        self.failed.set()
        # Not under the lock, which callbacks may take. Each gets an error of its own: raising one adds frames to it.
        for callback in callbacks:
            callback(failure.error())

    # The thread.

    def _queue(self, message: Message) -> None:
        """Has a message written soon; needs the lock."""
        self._unwritten += messages.encode(message)
        if threading.get_ident() != self._thread.ident:  # which writes it before its next wait
            self._wake_up()

    def _wake_up(self) -> None:
        """Lets the thread look at once at what is due."""
        with contextlib.suppress(OSError):  # full: it is awake. Closed: it has ended
            self._wake.send(b"\0")

    def _end_thread(self) -> None:
        """Ends the thread when what is queued is written, or cannot be for two seconds."""
        with self._changed:
            self._stopping = True
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(GOODBYE + 1.0)

    def _close_sockets(self) -> None:
        for sock in (self._socket, self._wake, self._woken):
            sock.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                self._serve_with(selector)
            except (OSError, BadMessageError):
                self._lose_coordinator(None)
            finally:
                self._close_sockets()
                with self._changed:
                    self._stopping = True
                    self._changed.notify_all()

    def _serve_with(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        silence, stop = Silence(now), None
        while True:
            due = self._fill(now)
            with self._changed:
                self._write()
                # Asked only while something is unwritten: a socket with room would wake the loop without end.
                selector.modify(self._socket, selectors.EVENT_READ | (_WRITE if self._unwritten else 0))
                if self._stopping:
                    stop = now + GOODBYE if stop is None else stop
                    if not self._unwritten or now >= stop:
                        return
            patience = max(due - now, 0.0)
            # Not under the lock: the thread that queues a message needs it.
            events = selector.select(patience)
            now = time.monotonic()
            for key, mask in events:
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(_READ)
                elif mask & selectors.EVENT_READ:
                    silence.end(now)
                    self._read()
            if silence.seconds(now, patience) > self.heartbeat:
                self._lose_coordinator(self.heartbeat)
                return  # nothing gets through, so no goodbye either

    def _read(self) -> None:
        data = self._socket.recv(_READ)
        if not data:
            raise ConnectionError("closed")
        for message in self._lines.feed(data):
            self._take(message)

    def _write(self) -> None:
        # What has no room now is written when the selector says that there is some: this thread must never wait in a
        # write.
        with contextlib.suppress(BlockingIOError):
            while self._unwritten:
                del self._unwritten[: self._socket.send(self._unwritten)]


class Silence:
    """For how long nothing was heard, less the time in which this process itself did not run and could not hear.

    The process of a machine that was suspended, or is much too busy, stands still.

    Args:
        now: the time, in seconds of `time.monotonic`, as all times here.
    """

    def __init__(self, now: float):
        self._since = self._round = now

    def end(self, now: float) -> None:
        """Something has been heard."""
        self._since = now

    def seconds(self, now: float, planned: float) -> float:
        """How long it has lasted.

        Args:
            now: the time at the end of a round of waiting and reading.
            planned: how many seconds the round was to wait at most. What arrived while it lasted longer may be read
                in the next round only.
        """
        stood_still = max(now - self._round - planned - _LATE, 0.0)
        self._since = min(self._since + stood_still, now)
        self._round = now
        return now - self._since


# The machines of the other workers.

_ROUNDS = 8  # within the limit, or one a second if that is more often
_ASKED = 4  # rounds within the limit in which each machine is asked
_MOST = 256  # asked at once, besides those that are missed: each takes a file
_MISSED = 3  # rounds in a row without an answer: single packets get lost
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a connection that was made after all leaves nothing behind


class Links:
    """The ways from this worker to the others: whether their machines answer this one.

    Two workers may both hear the coordinator, and not each other. Then a collective between them never ends, and every
    sign of life says that all is well.

    Each worker holds a TCP port at which nobody listens. The system of its machine refuses a connection there at once,
    also while the worker is stopped or busy. So a refusal is an answer: the way there and back is open. Nothing is
    accepted and nothing is read, so strangers find nothing at that port.

    - Each worker asks each other one at least four times within the limit, and one that does not answer in each round.
    - Only a machine that has answered before can be missed: a firewall may let nothing through to that port.
    - Time in which this process did not run does not count.

    A worker whose machine is silent is reported to the coordinator, which knows whether it hears that worker itself.

    Args:
        worker: the index of this worker.
        size: the number of workers.
        limit: seconds without an answer that are too many; a machine is reported a little before.
        addresses: returns the addresses of the held ports of all workers; waits until all are known.
        missed: is called in each round in which a machine does not answer for the third time or more.
        report: is called with a worker whose machine is silent, and the seconds, in each round.
    """

    def __init__(
        self,
        worker: int,
        size: int,
        limit: float,
        addresses: Callable[[], Sequence[str]],
        missed: Callable[[], None],
        report: Callable[[int, float], None],
    ):
        self._limit = limit
        self._addresses, self._call_missed, self._report = addresses, missed, report
        self._others = [other for other in range(size) if other != worker]
        self._stop = threading.Event()
        self._time = 0.0  # seconds in which this thread has run
        self._answered: dict[int, float] = {}  # by worker: the time of the last answer
        self._missed: dict[int, int] = {}  # by worker: the rounds in a row without an answer
        self._thread = threading.Thread(target=self._watch, name=f"worker {worker} of {size}: links", daemon=True)

    def start(self) -> None:
        """Starts the thread that watches."""
        self._thread.start()

    def close(self) -> None:
        """Ends it; the thread may need until the end of its round."""
        self._stop.set()

    def _watch(self) -> None:
        addresses = self._addresses()
        seconds = min(1.0, self._limit / _ROUNDS)
        share = math.ceil(len(self._others) * _ASKED * seconds / self._limit)
        turns, first = itertools.cycle(self._others), len(self._others)
        while addresses and not self._stop.is_set():
            asked = {*itertools.islice(turns, min(max(share, first), len(self._others), _MOST)), *self._missed}
            first -= len(asked)  # all are asked at once, and from then on in turn
            self._round({other: addresses[other] for other in asked}, seconds)
            silent = [other for other, rounds in self._missed.items() if rounds >= _MISSED]
            if silent and not self._stop.is_set():
                self._call_missed()
            for other in silent:
                lasted = self._time - self._answered[other]
                if lasted >= self._limit - 2 * seconds and not self._stop.is_set():
                    self._report(other, lasted)

    def _round(self, asked: dict[int, str], seconds: float) -> None:
        """Asks some machines, waits until the round is over, and counts those that did not answer."""
        began = time.monotonic()
        waiting: dict[int, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            for other, address in asked.items():
                with contextlib.suppress(OSError, ValueError):  # there is no way at the moment, or no socket left
                    waiting[other] = _asking(address)
                    selector.register(waiting[other], selectors.EVENT_WRITE, other)
            while (left := began + seconds - time.monotonic()) > 0 and waiting:
                for key, _ in selector.select(min(left, 1.0)):
                    sock = waiting.pop(key.data)
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED):
                        self._answered[key.data] = self._time
                        self._missed.pop(key.data, None)
                        del asked[key.data]
                    selector.unregister(sock)
                    sock.close()
        for sock in waiting.values():
            sock.close()
        self._stop.wait(left)
        self._time += min(time.monotonic() - began, 2 * seconds)
        for other in asked:
            if other in self._answered:
                self._missed[other] = self._missed.get(other, 0) + 1


def _asking(address: str) -> socket.socket:
    """A socket that is about to connect to an address.

    Raises:
        OSError: the system knows at once that there is no way.
    """
    host, port = cluster.split_address(address)
    with contextlib.ExitStack() as failed:
        sock = failed.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        result = sock.connect_ex((host, port))
        if result not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.ECONNREFUSED):
            raise OSError(result, os.strerror(result))
        failed.pop_all()  # from here on it is the caller's to close
    return sock
