"""The service by which the PJRT clients of several workers find each other, as a child process of worker 0.

jaxlib aborts every process whose connection to this service breaks. So the service must outlive all workers, worker 0
too: it runs in a process and a session of its own. Each worker holds a connection to that process, its *lifeline*,
which the operating system closes when the worker ends, however it ends. With the last lifeline the process ends. A
lifeline over which nothing gets through any more, as when a cable is gone, ends within two minutes.

jaxlib's own answer to a worker that is not heard of is to abort the others, so its heartbeats never run out. Who is
lost is found out and told by `replica_engine.workers`.

The port of the service is held from its choice to the end. With a port that was free a moment ago, two jobs could get
the same one: jaxlib's service shares its ports, and listens beside another one without an error.

A lifeline begins with a secret that worker 0 tells the others through the coordinator of the job. jaxlib's service
itself has no password.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import time
from typing import Any

from replica_engine.workers.cluster import join_address, split_address
from replica_engine.workers.server import answer, child

NEVER = 1_000_000
"""Seconds after which jaxlib takes a worker for lost."""

_PATIENCE = 60.0  # seconds for the first lifeline, and for a secret
_MOST_STRANGERS = 64  # connections that have not said the secret
_BREATH = 0.1  # seconds between two tries while the process has no descriptor left
_REGISTER = 600  # seconds for all workers to connect; the job notices a missing worker earlier

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds of silence until the system asks the other side, seconds between questions, and how many have no answer."""

_lifelines: list[int] = []
"""Descriptors, and no sockets: those would be closed when Python ends, and the process lives on for a moment."""


def start(size: int, host: str) -> dict[str, str]:
    """Starts the service in a child process.

    Args:
        size: the number of workers.
        host: the host at which it listens, at a port of its own.

    Returns:
        The service's "address", and for `hold` the "lifeline" and the "secret"; JSON can hold it.

    Raises:
        ClusterConfigError: it cannot listen there.
    """
    return child("replica_engine.pjrt.jaxlib_service", {"size": size, "address": host})


def hold(place: dict[str, str]) -> None:
    """Connects this worker's lifeline, until the process ends.

    Args:
        place: what `start` returned in worker 0.

    Raises:
        OSError: the service has ended.
    """
    with socket.create_connection(split_address(place["lifeline"]), _PATIENCE) as lifeline:
        lifeline.sendall(place["secret"].encode())
        _lifelines.append(lifeline.detach())


def held_port(host: str) -> socket.socket:
    """A socket with a port of a host that no other socket gets without asking for it by its number, until it is closed.

    It does not listen, so that connections go to jaxlib's service, which shares its ports.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, 0))
    return held


def _after_fork() -> None:
    """In a forked child: a lifeline is the parent's, and closing the copy here lets the parent's end be noticed."""
    for lifeline in _lifelines:
        os.close(lifeline)
    _lifelines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Lifelines:
    """The lifelines of the workers, as the process of the service sees them."""

    def __init__(self, host: str):
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self.secret = secrets.token_hex(16)
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.address = join_address(*self._listener.getsockname()[:2])
        self._read: dict[socket.socket, tuple[bytes, float]] = {}  # what it said, and until when it must say the secret
        self._held: set[socket.socket] = set()

    def wait(self) -> None:
        """Waits until the first lifeline has come and the last one has gone."""
        until: float | None = time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._held or (until is not None and time.monotonic() < until):
                for key, _ in selector.select(_PATIENCE if not self._read and until is None else 1.0):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._hear(selector, key.fileobj)
                if self._held:
                    until = None
                now = time.monotonic()
                for stranger in [each for each, (_, limit) in self._read.items() if limit < now]:
                    self._drop(selector, stranger)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Takes a stranger; the one that has been silent for longest gives way to it if there are too many."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError:  # no descriptor is left: the connection stays in the queue, and the selector returns at once
            if self._read:
                self._drop(selector, next(iter(self._read)))
            else:
                time.sleep(_BREATH)
            return
        if len(self._read) >= _MOST_STRANGERS:
            self._drop(selector, next(iter(self._read)))
        with contextlib.suppress(OSError):  # it is gone again
            _notice_silence(sock)
        sock.setblocking(False)
        self._read[sock] = b"", time.monotonic() + _PATIENCE
        selector.register(sock, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, sock: Any) -> None:
        if sock not in self._read and sock not in self._held:  # dropped since the selector returned
            return
        try:
            data = sock.recv(len(self.secret))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(selector, sock)
        elif sock in self._read:
            said, limit = self._read[sock]
            said += data
            self._read[sock] = said, limit
            if len(said) >= len(self.secret):
                if hmac.compare_digest(said, self.secret.encode()):
                    del self._read[sock]
                    self._held.add(sock)
                else:
                    self._drop(selector, sock)

    def _drop(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        self._read.pop(sock, None)
        self._held.discard(sock)
        selector.unregister(sock)
        sock.close()


def _notice_silence(sock: socket.socket) -> None:
    """Lets a connection end within two minutes where nothing gets through any more: the end of its worker neither.

    The system's own settings take two hours.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def main() -> int:
    """The process of the service; returns its exit status."""
    from replica_engine.pjrt.jaxlib import get_distributed_runtime_service

    settings = json.load(sys.stdin)
    host = settings["address"]
    try:
        lifelines, held = _Lifelines(host), held_port(host)
        address = join_address(host, held.getsockname()[1])
        service = get_distributed_runtime_service(
            address,
            settings["size"],
            heartbeat_timeout=NEVER,
            cluster_register_timeout=_REGISTER,
            shutdown_timeout=5,
            recoverable=True,  # otherwise one that is lost ends all others
        )
    except (OSError, RuntimeError) as error:
        print(json.dumps({"wrong": str(error)}), flush=True)
        return 1
    answer({"address": address, "lifeline": lifelines.address, "secret": lifelines.secret})
    with held:
        lifelines.wait()
    del service
    return 0


if __name__ == "__main__":
    sys.exit(main())
