"""The coordinator of a job with a thousand members, which one process plays: what it costs, and how soon it tells.

    python -m benchmarks.many_members --members 1000 --seconds 20

Each member sends a sign of life every second and its launches ten times a second, as members do that launch a thousand
programs a second. The coordinator is a process of its own, as worker 0 starts it. Its processor time is what counts, so
another program on the machine changes little; the rate at which messages came is printed too, because a machine that is
too busy to play a thousand members makes fewer of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import sys
import time

import psutil

from replica_engine.workers import server
from replica_engine.workers.cluster import split_address
from replica_engine.workers.job import Limits
from replica_engine.workers.joining import welcome
from replica_engine.workers.member import BATCH
from replica_engine.workers.messages import encode
from replica_engine.workers.program_log import LAUNCH, entry, packed
from replica_engine.workers.server import allow_files

TOKEN = "a thousand members"
LAUNCHES = 100  # in each message
MOMENTS = 100  # in a tenth of a second: members do not send at the same time, and each time wakes the coordinator
PROGRAM = entry(LAUNCH, "2d03aa77")
DESCRIBED = encode(["program", PROGRAM.hex(), LAUNCH, "`train_step` at train.py:40, program 2d03aa77"])


class Crowd:
    """So many members of one job, played by this process; the heartbeat limit of the job is in seconds."""

    def __init__(self, size: int, heartbeat: float):
        allow_files(size + 64)
        self.address = server.start(size, TOKEN, "127.0.0.1:0", Limits(300.0, heartbeat))
        self._process = psutil.Process(server.started[-1].pid)
        self.selector = selectors.DefaultSelector()
        began = time.monotonic()
        self.sockets = [self._join(index, size) for index in range(size)]
        self.joining = time.monotonic() - began, self.processor_seconds()
        self.told: dict[int, float] = {}
        self.sent = 0
        self._round = 0

    def _join(self, index: int, size: int) -> socket.socket:
        sock = socket.create_connection(split_address(self.address))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        about = {"host": f"node-{index}", "pid": index + 1, "versions": {"replica_engine": "0"}, "replicas": 4}
        welcome(sock, TOKEN, [index, size, about], self.address)
        sock.setblocking(False)
        sock.send(DESCRIBED)
        self.selector.register(sock, selectors.EVENT_READ, index)
        return sock

    def play(self, seconds: float, silent: int | None = None) -> float:
        """Sends what members send, in time, but for a silent one; returns how long it took, in seconds."""
        began = time.monotonic()
        for at in range(round(seconds / BATCH)):
            self._round += 1
            log = encode(["log", packed([PROGRAM] * LAUNCHES), self._round * LAUNCHES, [self._round, ""]])
            beat = encode(["beat", []])
            for moment in range(MOMENTS):
                for index in range(moment, len(self.sockets), MOMENTS):
                    if index != silent and index not in self.told:
                        both = self._round % 10 == index // MOMENTS % 10
                        with contextlib.suppress(OSError):
                            self.sockets[index].send(beat + log if both else log)
                            self.sent += 1 + both
                self._read(began + (at + (moment + 1) / MOMENTS) * BATCH)
            if silent is not None and len(self.told) >= len(self.sockets) - 1:
                break
        return time.monotonic() - began

    def stand_still(self) -> dict[str, float]:
        """All members warn at the same time that the run stands still, and ask where the others are."""
        question = encode(["where", 1])
        before, began = self.processor_seconds(), time.monotonic()
        received = []
        for sock in self.sockets:
            sock.setblocking(True)
            sock.sendall(question)
        for sock in self.sockets:
            data = b""
            while b'["answer",1,' not in data or not data.endswith(b"\n"):
                data += sock.recv(1 << 20)
            received.append(len(data))
            sock.setblocking(False)
        return {
            "seconds until all knew": time.monotonic() - began,
            "processor seconds": self.processor_seconds() - before,
            "most bytes for one": max(received),
        }

    def _read(self, until: float) -> None:
        while True:
            for key, _ in self.selector.select(max(until - time.monotonic(), 0.0)):
                assert isinstance(key.fileobj, socket.socket)
                if b'"failure"' in key.fileobj.recv(1 << 16):
                    self.told[key.data] = time.monotonic()
                    self.selector.unregister(key.fileobj)
            if time.monotonic() >= until:
                return

    def processor_seconds(self) -> float:
        """The processor time of the coordinator so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def memory(self) -> int:
        """The memory of the coordinator, in KiB."""
        return int(self._process.memory_info().rss) // 1024

    def close(self) -> None:
        """All members go."""
        for sock in self.sockets:
            sock.close()
        server.started[-1].wait()


def measure(size: int, seconds: float, heartbeat: float) -> dict[str, float]:
    """Plays a job, and then the loss of one of its members."""
    crowd = Crowd(size, heartbeat)
    crowd.play(2.0)
    before, sent = crowd.processor_seconds(), crowd.sent
    lasted = crowd.play(seconds)
    used, messages = crowd.processor_seconds() - before, crowd.sent - sent
    stuck = crowd.stand_still()
    memory = crowd.memory()
    silent, began = size // 2, time.monotonic()
    crowd.play(heartbeat + 30.0, silent)
    told = [at for index, at in crowd.told.items() if index != silent]
    crowd.close()
    return {
        "members": size,
        "seconds to join": crowd.joining[0],
        "processor seconds of joining": crowd.joining[1],
        "messages a second": messages / lasted,
        "microseconds a message": 1e6 * used / messages,
        "share of a core": used / lasted,
        "share of a core at the full rate": used / messages * size * (1 + 1 / BATCH),
        **{f"stuck: {name}": value for name, value in stuck.items()},
        "KiB": memory,
        "told of a lost one": len(told),
        "seconds until all were told": max(told) - began if told else float("inf"),
    }


def main() -> int:
    """Measures jobs of several sizes; returns 1 if the largest misses a target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_members", description=__doc__)
    parser.add_argument("--members", type=int, default=1000, help="of the largest job (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each size (default %(default)s)")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="the limit, in seconds (default %(default)s)")
    flags = parser.parse_args()
    rows = [measure(flags.members // part, flags.seconds, flags.heartbeat) for part in (4, 1)]
    for row in rows:
        print(json.dumps({name: round(value, 3) for name, value in row.items()}))
    last = rows[-1]
    good = last["share of a core at the full rate"] <= 0.2 and last["told of a lost one"] == flags.members - 1
    good &= last["seconds until all were told"] <= flags.heartbeat + 2.0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
