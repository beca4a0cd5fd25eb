"""The socket of a member and the thread that serves it.

The thread writes what is queued, reads messages, and notices when the coordinator is gone or silent. It runs Python
only, so it needs the interpreter lock. A process that holds the lock for longer than the heartbeat limit, in one call
of native code, counts as lost.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

from replica_engine.hosts import wire
from replica_engine.hosts.wire import BadMessageError, Lines, Message

GOODBYE = 2.0  # seconds to write the last messages
_LATE = 0.2  # seconds; a process that runs later than this after it was to has stood still
_READ = 1 << 16
_WRITE = selectors.EVENT_WRITE


class Connection:
    """A member's connection to the coordinator; `start` starts its thread.

    Args:
        sock: the connection on which the worker was welcomed.
        lines: what has arrived on it and was not used.
        name: the name of the thread.
        heartbeat: the seconds of silence after which the coordinator counts as lost.
        changed: guards what is queued; all who wait on it are woken when the thread ends.
        fill: called before each wait, with the time: queues what is due, and returns when it wants to be called next.
        take: called with each message of the coordinator.
        lost: called when the coordinator is lost, with the seconds of silence, or None if it closed the connection.

    Attributes:
        stopping: whether the thread has ended or is about to.
        heartbeat: as above.
    """

    def __init__(
        self,
        sock: socket.socket,
        lines: Lines,
        *,
        name: str,
        heartbeat: float,
        changed: threading.Condition,
        fill: Callable[[float], float],
        take: Callable[[Message], None],
        lost: Callable[[float | None], None],
    ):
        self.heartbeat = heartbeat
        self.stopping = False
        self._socket, self._lines = sock, lines
        self._changed = changed
        self._fill, self._take, self._lost = fill, take, lost
        self._unwritten = bytearray()
        self._wake, self._woken = socket.socketpair()
        for each in (self._socket, self._wake, self._woken):
            each.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def queue(self, message: Message) -> None:
        """Has a message written soon; needs the lock."""
        self._unwritten += wire.encode(message)
        if threading.get_ident() != self._thread.ident:  # which writes it before its next wait
            self.wake_up()

    def wake_up(self) -> None:
        """Lets the thread look at once at what is due."""
        with contextlib.suppress(OSError):  # full: it is awake. Closed: it has ended
            self._wake.send(b"\0")

    def close(self) -> None:
        """Ends the thread when what is queued is written, or cannot be for two seconds."""
        with self._changed:
            self.stopping = True
        self.wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(GOODBYE + 1.0)

    def forget(self) -> None:
        """In a forked child: the connection is the parent's, and closing the copy here lets its end be noticed."""
        self.stopping = True
        self._close_sockets()

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
                self._lost(None)
            finally:
                self._close_sockets()
                with self._changed:
                    self.stopping = True
                    self._changed.notify_all()

    def _serve_with(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        silence, stop = Silence(now), None
        while True:
            due = self._fill(now)
            with self._changed:
                self._write()
                selector.modify(self._socket, selectors.EVENT_READ | (_WRITE if self._unwritten else 0))
                if self.stopping:
                    stop = now + GOODBYE if stop is None else stop
                    if not self._unwritten or now >= stop:
                        return
            patience = max(due - now, 0.0)
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
                self._lost(self.heartbeat)
                return  # nothing gets through, so no goodbye either

    def _read(self) -> None:
        data = self._socket.recv(_READ)
        if not data:
            raise ConnectionError("closed")
        for message in self._lines.feed(data):
            self._take(message)

    def _write(self) -> None:
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
