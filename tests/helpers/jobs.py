"""Jobs of real processes on this machine, whose coordinator is in the test's process.

A worker is a Python program of a few lines. Before they run, it has joined the job as `member`. The test reads its
output line by line, and the worker waits for the test by reading its standard input. So no test depends on the speed of
the machine.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from replica_engine import workers
from replica_engine.errors.worker_errors import TOKEN
from replica_engine.workers.job import Limits
from replica_engine.workers.joining import HEARTBEAT_TIMEOUT, JOIN_TIMEOUT, LAUNCHED
from replica_engine.workers.server import Coordinator

LONG = 300.0
"""Seconds that are enough on any machine for what must come."""

LONGER = 300.0
"""Seconds that are enough for a job on a machine that does much else."""

HEAD = """
import os, signal, sys, threading
from replica_engine import errors, workers
TRAIN = workers.Program("2d03aa77bb", "train_step", "train.py:40")
EVAL = workers.Program("91c4e0d2aa", "eval_step", "train.py:80")
member = workers.join(versions={versions!r}, replicas={replicas})
"""

TRAIN = workers.Program("2d03aa77bb", "train_step", "train.py:40")
EVAL = workers.Program("91c4e0d2aa", "eval_step", "train.py:80")


class Job:
    """A job of `size` workers, and its coordinator on a thread.

    Args:
        size: the number of workers.
        join: the join limit, in seconds from when the first worker has joined: to start it may take longer.
        heartbeat: the heartbeat limit, in seconds.
        stall: the limit for a worker that is stuck, in seconds.
        statuses: whether the coordinator is told how processes end, as a launcher does.
    """

    def __init__(
        self,
        size: int = 2,
        join: float = LONG,
        heartbeat: float = LONG,
        statuses: bool = False,
        stall: float = math.inf,
    ):
        self.size = size
        self.token = "a secret of the job"
        self.limits = Limits(join, heartbeat, stall)
        self.coordinator = Coordinator(size, self.token, limits=self.limits, knows_statuses=statuses)
        self._begin_with_the_first_worker()
        self.coordinator.start()
        self.address = self.coordinator.address
        self._statuses = statuses
        self._processes: list[subprocess.Popen] = []
        self._members: list[workers.Member] = []
        self._threads: list[threading.Thread] = []

    def _begin_with_the_first_worker(self) -> None:
        """Lets the join limit run from when the first worker has joined: to start it may take long."""
        state = self.coordinator._job
        joined, state._began = state.joined, math.inf

        def joins(worker: int, about: dict, now: float) -> None:
            state._began = min(state._began, now)
            joined(worker, about, now)

        state.joined = joins

    def environment(self, worker: int, address: str | None = None, **more: str) -> dict[str, str]:
        """The variables of a worker."""
        return {
            "REPLICA_ENGINE_PROCESS_ID": str(worker),
            "REPLICA_ENGINE_NUM_PROCESSES": str(self.size),
            "REPLICA_ENGINE_COORDINATOR": address or self.address,
            TOKEN: self.token,
            LAUNCHED: "1",
            JOIN_TIMEOUT: str(self.limits.join),
            HEARTBEAT_TIMEOUT: str(self.limits.heartbeat),
            **more,
        }

    def start(self, worker: int, program: str, *, address=None, versions=None, replicas=1, **more) -> subprocess.Popen:
        """Starts a worker as a process."""
        head = HEAD.format(versions=versions or {}, replicas=replicas)
        process = subprocess.Popen(
            [sys.executable, "-c", head + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment(worker, address, **more)},
        )
        self._processes.append(process)
        if self._statuses:
            thread = threading.Thread(target=lambda: self.coordinator.exited(worker, process.wait()))
            self._threads.append(thread)
            thread.start()
        return process

    def start_all(self, programs: Any, text: str, **environment: str) -> list[Any]:
        """Starts a text as the program of each worker, in processes that have TensorFlow imported."""
        return [programs.start(text, env=self.environment(worker, **environment)) for worker in range(self.size)]

    def join(self, worker: int, *, address=None, versions=None, replicas=1, **more) -> workers.Member:
        """Joins as a worker with the test's process."""
        environ = self.environment(worker, address, **more)
        member = workers.join(versions=versions, replicas=replicas, environ=environ)
        self._members.append(member)
        return member

    def limit(self, **limits: float) -> None:
        """Sets limits of the coordinator from now on; workers keep those that they were told.

        A short limit from the beginning would hold for the start of the workers too, which may take long.
        """
        job = self.coordinator._job
        job.limits = dataclasses.replace(job.limits, **limits)

    def close(self) -> None:
        """Ends everything."""
        for member in self._members:
            member.close()
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
        for thread in self._threads:
            thread.join()
        self.coordinator.close()


def until(holds: Callable[[], bool], limit: float = LONG) -> None:
    """Waits for what nothing announces, such as the state of a process."""
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, "it must come"
        threading.Event().wait(0.01)


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    threads = pathlib.Path(f"/proc/{pid}/task").glob("*/stat")
    return all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads)


class Ending:
    """The end of a process that need not be a child of this one. It may take init long to bury an orphan."""

    def __init__(self, pid: int):
        self._descriptor = os.pidfd_open(pid)

    def wait(self) -> None:
        """Waits for it."""
        try:
            assert select.select([self._descriptor], [], [], LONG)[0], "it has not ended"
        finally:
            os.close(self._descriptor)


class Proxy:
    """A way to an address that can be cut: nothing gets through any more, and no connection ends.

    Args:
        address: where it leads.
    """

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._cut = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Lets nothing through from now on."""
        self._cut.set()

    def close(self) -> None:
        """Ends all connections."""
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection(self._target)
                self._sockets += [inner, outer]
                for source, target in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if not self._cut.is_set():
                    target.sendall(data)


@contextlib.contextmanager
def job(*args, **kwargs) -> Iterator[Job]:
    """A job that is ended with the block."""
    made = Job(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()
