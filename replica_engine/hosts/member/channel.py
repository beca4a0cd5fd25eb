"""Questions to the coordinator and their answers, values for all workers, and the first failure of the job.

Every wait for an answer ends when the job fails, with the failure.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from replica_engine.errors import ReplicaEngineError, WorkerLostError, WorkerRow
from replica_engine.hosts import wire
from replica_engine.hosts.failure import Failure
from replica_engine.hosts.member.connection import Connection
from replica_engine.hosts.wire import BadMessageError, Lines, Message

LOGGER = logging.getLogger("replica_engine")


class _Answer:
    """A place for the answer to a question."""

    def __init__(self) -> None:
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


class Channel:
    """What a member and the coordinator say to each other, without what the member does; `Member` says that.

    Args:
        sock: the connection on which the worker was welcomed.
        lines: what has arrived on it and was not used.
        welcome: what is known from the welcome.
    """

    def __init__(self, sock: socket.socket, lines: Lines, welcome: Welcome):
        self.worker, self.size, self.heartbeat = welcome.worker, welcome.size, welcome.heartbeat
        self.failed = threading.Event()
        self.refused = False
        self._address = welcome.address
        self._launched_by_us = welcome.launched_by_us
        self.reached = ""
        self._process = os.getpid()
        self._left = False
        self._changed = threading.Condition()  # guards all that follows
        self._first_failure: Failure | None = None
        self._callbacks: list[Callable[[ReplicaEngineError], None]] = []
        self._complete = False
        self._answers: dict[int | str, _Answer] = {}  # to questions by number, and to exchanges by name
        self._numbers = itertools.count()
        self._connection = Connection(
            sock,
            lines,
            name=f"worker {welcome.worker} of {welcome.size}: member",
            heartbeat=welcome.heartbeat,
            changed=self._changed,
            fill=self._fill,
            take=self._take,
            lost=lambda seconds: self._fail(self._no_coordinator(seconds)),
        )

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
        self.failed.wait(self._connection.heartbeat + 1.0 if patience is None else patience)
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
        if len(wire.encode(message)) >= wire.LONGEST_LINE:
            raise ValueError(f"the value of {key!r} is larger than a megabyte; put its address, and not the value")
        with self._changed:
            self._connection.queue(message)

    def drop(self, *prefixes: str) -> None:
        """Drops the values whose keys begin with one of the prefixes, so that the coordinator need not keep them."""
        with self._changed:
            self._connection.queue(["drop", *prefixes])

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
        length = len(wire.encode(message))
        if length < wire.LONGEST_LINE:
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
        self._connection.queue(message)
        try:
            self._wait_for(answer, patience)
        finally:
            del self._answers[key]
        return answer

    def _wait_for(self, answer: _Answer, patience: float | None) -> None:
        over = lambda: answer.come or self._first_failure is not None or self._connection.stopping  # noqa: E731
        if self._changed.wait_for(over, patience) and not answer.come:
            self.check()
            raise WorkerLostError(  # by another thread
                f"{self._row.name} waits for the others no longer: it has left the job, at its end or because of an "
                "exception, which its own output says."
            )

    def _fill(self, now: float) -> float:
        """Queues what is due, and returns when something will be due next."""
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

    def _no_coordinator(self, seconds: float | None) -> Failure:
        return Failure.of(WorkerLostError.no_coordinator, self._row, self._address, self._launched_by_us, seconds)

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
        for callback in callbacks:
            callback(failure.error())
