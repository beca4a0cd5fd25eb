"""Whether the machines of the other workers answer this one: two workers may both hear the coordinator, and not each
other. Then a collective between them never ends, and every sign of life says that all is well.

Each worker holds a TCP port at which nobody listens. The system of its machine refuses a connection there at once,
also while the worker is stopped or busy. So a refusal is an answer: the way there and back is open. Nothing is accepted
and nothing is read, so strangers find nothing at that port.

- Each worker asks each other one at least four times within the limit, and one that does not answer in each round.
- Only a machine that has answered before can be missed: a firewall may let nothing through to that port.
- Time in which this process did not run does not count.

A worker whose machine is silent is reported to the coordinator, which knows whether it hears that worker itself.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from replica_engine.hosts.cluster import split_address

_ROUNDS = 8  # within the limit, or one a second if that is more often
_ASKED = 4  # rounds within the limit in which each machine is asked
_MOST = 256  # asked at once, besides those that are missed: each takes a file
_MISSED = 3  # rounds in a row without an answer: single packets get lost
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a connection that was made after all leaves nothing behind


class Links:
    """The ways from this worker to the others.

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
    host, port = split_address(address)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        result = sock.connect_ex((host, port))
        if result not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.ECONNREFUSED):
            raise OSError(result, os.strerror(result))
        return sock
    except BaseException:
        sock.close()
        raise
