"""Starts the coordinator as a child process of worker 0, where no launcher of ours has one.

The child is in a session of its own: Ctrl-C in the terminal, or a signal to the process group of worker 0, does not
reach it. Slurm, and systemd, send SIGTERM to all processes of a job: the child ignores it, since the workers need it to
agree on the step after which they save. It ends with its job. It gets the token on its standard input, so that the list
of processes does not show it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from replica_engine.errors import ClusterConfigError
from replica_engine.errors.hosts import tries_again
from replica_engine.hosts import child_process
from replica_engine.hosts.job import Limits

LOGGER = logging.getLogger("replica_engine")

PAUSE = 0.5  # seconds between attempts while an earlier run ends
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # not all systems have all

started: list[subprocess.Popen[str]] = []
"""The child processes that this process has started. They are kept: Python warns of one that is freed while it runs."""


def start(size: int, token: str, address: str, limits: Limits, patience: float = 0.0) -> str:
    """Starts a coordinator in a child process.

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
    settings = {"size": size, "token": token, "address": address, "join": limits.join, "heartbeat": limits.heartbeat}
    deadline, warned = time.monotonic() + patience, False
    while True:
        try:
            return str(child("replica_engine.hosts", settings)["address"])
        except ClusterConfigError as error:
            if os.strerror(errno.EADDRINUSE) not in str(error) or time.monotonic() >= deadline:
                raise
            if not warned:
                LOGGER.warning(tries_again(str(error), patience))
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
