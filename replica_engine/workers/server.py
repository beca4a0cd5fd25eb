"""The coordinator of a job, the connections that it has not accepted yet, and the process that it runs in.

All members are connected to the coordinator. It never runs in a worker. `replica-engine launch` has it on a thread;
otherwise worker 0 starts it as a child process in a session of its own (`python -m replica_engine.workers`). So it
stays when worker 0 is killed, and tells the others.

One thread serves all members, with non-blocking sockets: it reads what has arrived, gives it to `Job`, and writes what
`Job` has to tell. It must never wait for one member. A member that does not read is dropped when its share of
unwritten bytes is full.

Each side that connects has ten seconds to prove that it knows the token, and is told nothing before. Until then it is a
stranger, and so is a member that has just connected. There is room for many strangers. Where more come, those go that
have been silent for longest, of the host that most of them come from: a flood drives itself out, and a member has the
moment that it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from replica_engine.errors import ClusterConfigError, base, worker_errors
from replica_engine.workers import child_process, messages
from replica_engine.workers.cluster import is_loopback, join_address, plain_host, split_address
from replica_engine.workers.job import Job, Limits
from replica_engine.workers.messages import BadMessageError, Failure, Message, MessageReader

LOGGER = logging.getLogger("replica_engine")

# The child process of worker 0, where no launcher of ours has the coordinator.

PAUSE = 0.5  # seconds between attempts while an earlier run ends
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # not all systems have all

started: list[subprocess.Popen[str]] = []
"""The child processes that this process has started. They are kept: Python warns of one that is freed while it runs."""


def start(size: int, token: str, address: str, limits: Limits, patience: float = 0.0) -> str:
    """Starts a coordinator in a child process.

    The child is in a session of its own: Ctrl-C in the terminal, or a signal to the process group of worker 0, does not
    reach it. Slurm, and systemd, send SIGTERM to all processes of a job: the child ignores it, since the workers need
    it to agree on the step after which they save. It ends with its job. It gets the token on its standard input, so
    that the list of processes does not show it.

    Args:
        size: the number of workers.
        token: the secret of the job.
        address: where to listen, as "host:port"; port 0 takes a free one.
        limits: how long to wait.
        patience: seconds to wait for the port if another process has it: perhaps the coordinator of an earlier run.

    Returns:
        Where it listens.

    Raises:
        ClusterConfigError: it cannot listen there.
    """
    settings = {"size": size, "token": token, "address": address, "limits": dataclasses.astuple(limits)}
    deadline, warned = time.monotonic() + patience, False
    while True:
        try:
            return str(child("replica_engine.workers", settings)["address"])
        except ClusterConfigError as error:
            if os.strerror(errno.EADDRINUSE) not in str(error) or time.monotonic() >= deadline:
                raise
            if not warned:
                LOGGER.warning(worker_errors.tries_again(str(error), patience))
            warned = True
        threading.Event().wait(PAUSE)


def child(module: str, settings: dict[str, object]) -> dict[str, Any]:
    """Starts a module in a child process, which reads its settings, listens, and says where.

    Args:
        module: the module. It reads the settings from its standard input, and prints one line, both as JSON.
        settings: what it needs; "address" is where it is to listen.

    Returns:
        What it printed.

    Raises:
        ClusterConfigError: it cannot listen there.
    """
    process = subprocess.Popen(
        [sys.executable, *child_process.arguments(module)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=child_process.environment(),
    )
    started.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin:
        json.dump(settings, stdin)
    with process.stdout as stdout:
        line = stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"wrong": f"its process ended with {process.wait()}"}
    if "wrong" in answer:
        raise ClusterConfigError.about(
            "REPLICA_ENGINE_COORDINATOR",
            f"The coordinator cannot listen at {settings['address']}: {answer['wrong']}. Set "
            "REPLICA_ENGINE_COORDINATOR to an address of worker 0's machine and a free port, the same for all workers. "
            "If the others reach that machine under another address than its own, set REPLICA_ENGINE_LISTEN to its "
            "own.",
        )
    return answer


def answer(place: dict[str, str]) -> None:
    """In such a child: says where it listens. From then on no signal ends it, and it has no output.

    Args:
        place: what `child` returns in worker 0.
    """
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    print(json.dumps(place), flush=True)
    # Somebody who waits for the end of worker 0's output must not wait for this process too.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


T = TypeVar("T")

PATIENCE = 10.0  # seconds to prove that one knows the token, and between two warnings


class Strangers(Generic[T]):
    """Connections that have not proved yet that they know the token of the job, and what is told of them.

    A member that has just connected is one of them for a moment. So nothing here looks at what is new: the ones go that
    have been silent for longest, of the host that most come from.

    Args:
        address: of the coordinator, for messages.
    """

    def __init__(self, address: str):
        self._address = address
        self._by_host: dict[str, dict[T, float]] = {}  # the time at which each came; the oldest is first
        self._count = 0
        self._refused = 0
        self._last = ""
        self._told = float("-inf")

    def __len__(self) -> int:
        return self._count

    def add(self, stranger: T, host: str, now: float) -> None:
        """A connection has come from a host."""
        self._by_host.setdefault(host, {})[stranger] = now
        self._count += 1

    def discard(self, stranger: T, host: str) -> None:
        """A connection has ended or is a member now."""
        if self._by_host.get(host, {}).pop(stranger, None) is not None:
            self._count -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def to_go(self) -> T:
        """The one that has been there for longest, of the host that most come from."""
        host = max(self._by_host, key=lambda each: len(self._by_host[each]))
        return next(iter(self._by_host[host]))

    def late(self, now: float) -> Iterator[T]:
        """Those that have had their time."""
        for ones in list(self._by_host.values()):
            for stranger, came in list(ones.items()):
                if now - came <= PATIENCE:
                    break
                yield stranger

    def refused(self, peer: str, why: str) -> None:
        """A connection from a peer was closed."""
        self._refused += 1
        self._last = f"{peer}, which {why}"

    def told(self, now: float) -> str:
        """What to tell of those that were refused; "" if there is nothing new, or something was told lately."""
        if not self._refused or now - self._told < PATIENCE:
            return ""
        self._told, count, self._refused = now, self._refused, 0
        return (
            f"{base.plural(count, 'connection')} to the coordinator at {self._address} came from others than "
            f"this job's workers and {'was' if count == 1 else 'were'} closed, the last from {self._last}. Workers "
            "still get in. Close the port to other programs, or use a network of its own for the job."
        )


TICK = 0.1  # seconds between looks at the clock
_MANY = 100  # messages and connections in a tick; with more of them, waking up for each costs more than reading it
_PAUSE = 0.02  # seconds between wake-ups when there are so many
_MOST_ACCEPTED = 100  # connections between two looks at the members
_MOST_STRANGERS = 1024
_MOST_UNWRITTEN = 4 << 20  # bytes for one member
_READ = 1 << 16  # bytes at a time, so that one member cannot keep the others waiting
_SPARE = 64  # files besides connections


class _Connection:
    """A connection that was accepted.

    Attributes:
        worker: the index of the member, once it is known.
        came_to: the host of this machine that it came to.
    """

    def __init__(self, sock: socket.socket, peer: str, now: float):
        self.socket = sock
        self.peer = peer
        self.host, _ = split_address(peer)
        self.came_to = plain_host(sock.getsockname()[0])
        self.nonce = messages.nonce()
        self.lines = MessageReader(messages.LONGEST_STRANGER)
        self.worker: int | None = None
        self.unwritten: deque[bytes] = deque()
        self.waiting = 0  # bytes
        self.closing = False  # whether to close it once all is written


class Coordinator:
    """Listens for the members of a job and serves them.

    Args:
        size: the number of workers.
        token: the secret of the job.
        address: where to listen, as "host:port"; port 0 takes a free one.
        limits: how long to wait.
        knows_statuses: whether `exited` will be called for each worker whose process ends.
        on_failure: is called with the first failure, on the thread that serves.

    Raises:
        OSError: it cannot listen there.

    Example:
        >>> with Coordinator(2, "secret") as coordinator:
        ...     coordinator.address.rpartition(":")[0]
        '127.0.0.1'
    """

    def __init__(
        self,
        size: int,
        token: str,
        address: str = "127.0.0.1:0",
        limits: Limits | None = None,
        *,
        knows_statuses: bool = False,
        on_failure: Callable[[Failure], None] | None = None,
    ):
        self._token = token
        self._on_failure = on_failure
        host, port = split_address(address)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server(where, family=family, backlog=size + _MOST_STRANGERS)
        self.address = join_address(*self._listener.getsockname()[:2])
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for sock in (self._listener, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        room = allow_files(size + _MOST_STRANGERS) - size
        self._most_strangers = min(max(room, _SPARE), _MOST_STRANGERS)
        self._connections: set[_Connection] = set()
        self._strangers: Strangers[_Connection] = Strangers(self.address)
        self._members: dict[int, _Connection] = {}
        self._calls: deque[Callable[[], None]] = deque()  # from other threads, to run on the serving one
        self._stop = False
        self._thread = threading.Thread(target=self.serve, name="replica_engine coordinator", daemon=True)
        # Only processes of this machine come to a loopback address. Our launcher needs no other: all of its are here.
        local = "" if knows_statuses or not is_loopback(self._listener.getsockname()[0]) else self.address
        self._job = Job(size, limits or Limits(), time.monotonic(), self._tell, knows_statuses, local)
        self.messages = 0
        """The number of messages and of connections that have come."""

    def __enter__(self) -> Coordinator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> Failure | None:
        """The first failure of the job; None as long as there is none."""
        return self._job.failure

    @property
    def steps(self) -> int:
        """The last step that a worker has reported; 0 if none has."""
        return self._job.steps

    def start(self) -> None:
        """Serves on a thread, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """After `start`: ends all connections. What was told before is written if the members read it at once."""
        self._call(self._end_serving)
        self._thread.join()

    def exited(self, worker: int, status: int) -> None:
        """The process of a worker has ended, as its parent knows; may be called on any thread.

        Args:
            worker: its index.
            status: its exit status; negative if it was a signal.
        """
        self._call(lambda: self._job.exited(worker, status, time.monotonic()))

    def serve(self, linger: float | None = None) -> None:
        """Serves until `close`, or until the job is over.

        Args:
            linger: how many seconds after a failure to wait at most for the members to leave. None: until `close`.
        """
        failed_at: float | None = None
        known: Failure | None = None
        ticked = time.monotonic()
        counted, pause = self.messages, 0.0
        try:
            while not self._stop:
                if pause:
                    time.sleep(pause)
                asked = time.monotonic()
                events = self._selector.select(max(ticked + TICK - asked, 0.0))
                now = time.monotonic()
                for key, mask in events:
                    if isinstance(key.data, _Connection):
                        self._serve(key.data, mask, now)
                    elif key.fileobj is self._listener:
                        self._accept_all(now)
                    else:
                        self._run_calls()
                # Only after what has arrived was read: it may say that a member lives. What arrived before `asked` was
                # read; what came after it may not be, if this thread did not run for a while before it looked at the
                # clock. So `asked`, and not `now`, is the time at which a silence or a wait can be judged.
                if now - ticked >= TICK:
                    ticked = now
                    counted, pause = self.messages, _PAUSE if self.messages - counted > _MANY else 0.0
                    self._job.tick(asked)
                    for stranger in self._strangers.late(asked):
                        self._refuse(stranger, "has said nothing for too long")
                    if text := self._strangers.told(asked):
                        self._job.refused_strangers(text)
                if self._job.failure is not known:
                    known, failed_at = self._job.failure, now
                    if self._on_failure is not None and known is not None:
                        self._on_failure(known)
                if linger is not None and (self._job.over or (failed_at is not None and now - failed_at > linger)):
                    break
        finally:
            self._close_all()

    def _call(self, call: Callable[[], None]) -> None:
        """Runs something on the thread that serves."""
        # A deque needs no lock, and `Job` none either: all of it runs on the one thread that serves.
        self._calls.append(call)
        with contextlib.suppress(OSError):  # full: it is awake. Closed: there is nothing left to call
            self._wake.send(b"\0")

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(_READ)
        while self._calls:
            self._calls.popleft()()

    def _end_serving(self) -> None:
        self._stop = True

    def _close_all(self) -> None:
        for connection in list(self._connections):
            self._flush(connection)
            connection.socket.close()
        self._connections.clear()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
        self._selector.close()

    # Connections

    def _accept_all(self, now: float) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it is gone again, or there are no files left
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._refuse(self._strangers.to_go(), "gave way, as this process has no files left")
                return
            self._accept(sock, join_address(*peer[:2]), now)

    def _accept(self, sock: socket.socket, peer: str, now: float) -> None:
        if len(self._strangers) >= self._most_strangers:
            self._refuse(self._strangers.to_go(), "has said nothing, and more have come")
        self.messages += 1
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection = _Connection(sock, peer, now)
        except OSError:  # it is gone again
            sock.close()
            return
        self._connections.add(connection)
        self._strangers.add(connection, connection.host, now)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._send(connection, messages.encode(["challenge", connection.nonce]))

    def _serve(self, connection: _Connection, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE and connection in self._connections:
            self._flush(connection)
        if not mask & selectors.EVENT_READ or connection not in self._connections:
            return
        try:
            data = connection.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            for message in connection.lines.feed(data):
                self.messages += 1
                if connection.closing:
                    return
                if connection.worker is None:
                    self._greet(connection, message, now)
                else:
                    self._job.received(connection.worker, message, now)
        except BadMessageError as error:
            self._refuse(connection, f"sent {ascii(str(error))[1:81]}")

    def _greet(self, connection: _Connection, message: Message, now: float) -> None:
        """Takes a member in, if it knows the token."""
        try:
            kind, nonce, proof, worker, size, about = message
            worker, size, nonce = int(worker), int(size), str(nonce)
            if kind != "hello" or not isinstance(about, dict):
                raise ValueError("no hello")
        except (TypeError, ValueError, ArithmeticError) as error:  # int(inf) is one too
            raise BadMessageError(str(error)) from None
        # Before anything that it says is looked at: a stranger must not learn what the job knows.
        if not messages.is_proof(proof, self._token, messages.MEMBER, connection.nonce, nonce):
            self._strangers.refused(connection.peer, "does not know the token")
            connection.closing = True
            self._send(connection, messages.encode(["stranger"]))
            return
        answer = messages.proof(self._token, messages.COORDINATOR, connection.nonce, nonce)
        self._send(connection, messages.encode(["welcome", answer, self._job.limits.heartbeat]))
        refusal = self._job.refusal(worker, size)
        if refusal is not None:
            connection.closing = True
            self._send(connection, messages.encode(["refused", refusal.as_json()]))
            return
        self._members[worker] = connection  # before `joined`, which may have something to tell to all
        try:
            self._job.joined(worker, {**about, "came_to": connection.came_to}, now)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            del self._members[worker]
            raise BadMessageError(f"hello: {error}") from None
        connection.worker = worker
        self._strangers.discard(connection, connection.host)
        connection.lines.longest = messages.LONGEST_LINE

    def _refuse(self, connection: _Connection, why: str) -> None:
        """Ends a connection that is not as it must be, of a stranger or of a member, which is lost then."""
        if connection.worker is None:
            self._strangers.refused(connection.peer, why)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._connections:  # dropped for what it did not read, and now for what it sent
            return
        self._connections.discard(connection)
        self._strangers.discard(connection, connection.host)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.worker is not None:
            self._job.closed(connection.worker, time.monotonic())

    # Writing

    def _tell(self, worker: int | None, message: Message) -> None:
        """Sends a message to a member, or to all."""
        line = messages.encode(message)
        if worker is None:
            for connection in list(self._members.values()):
                self._send(connection, line)
        elif worker in self._members:
            self._send(self._members[worker], line)

    def _send(self, connection: _Connection, line: bytes) -> None:
        if connection not in self._connections:
            return
        idle = not connection.unwritten
        connection.unwritten.append(line)
        connection.waiting += len(line)
        if idle:
            self._flush(connection)
        elif connection.waiting > _MOST_UNWRITTEN:
            self._refuse(connection, "does not read")

    def _flush(self, connection: _Connection) -> None:
        was_waiting = connection.waiting
        try:
            while connection.unwritten:
                line = connection.unwritten[0]
                sent = connection.socket.send(line)
                connection.waiting -= sent
                if sent < len(line):
                    connection.unwritten[0] = line[sent:]
                    break
                connection.unwritten.popleft()
        except BlockingIOError:
            pass
        except OSError:
            connection.unwritten.clear()  # the end of the connection is read next
            connection.waiting = 0
        if connection.closing and not connection.unwritten:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
        elif connection.unwritten or was_waiting:  # waits for room exactly as long as there is something to write
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unwritten else 0)
            if self._selector.get_key(connection.socket).events != wanted:
                self._selector.modify(connection.socket, wanted, connection)


def allow_files(count: int) -> int:
    """Raises this process' limit of open files, as far as it may, if it is too low for so many connections.

    Returns:
        How many connections it has room for; at most `count`.
    """
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else min(count, soft - _SPARE)
