"""Starts the coordinator as a child process of worker 0, where no launcher of ours has one.

The child is in a session of its own: Ctrl-C in the terminal, or a signal to the process group of worker 0, does not
reach it. It gets the token on its standard input, so that the list of processes does not show it.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from replica_engine.errors import ClusterConfigError
from replica_engine.hosts.job import Limits

_FOLDER = str(pathlib.Path(__file__).parents[2])  # that has the package

started: list[subprocess.Popen[str]] = []
"""The coordinators that this process has started. They are kept: Python warns of one that is freed while it runs."""


def start(size: int, token: str, address: str, limits: Limits) -> str:
    """Starts a coordinator in a child process.

    Args:
        size: the number of workers.
        token: the secret of the job.
        address: where to listen, as "host:port"; port 0 takes a free one.
        limits: how long to wait.

    Returns:
        Where it listens.

    Raises:
        ClusterConfigError: it cannot listen there.
    """
    path = os.environ.get("PYTHONPATH", "")
    process = subprocess.Popen(
        [sys.executable, "-m", "replica_engine.hosts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{_FOLDER}{os.pathsep}{path}" if path else _FOLDER},
    )
    started.append(process)
    settings = {"size": size, "token": token, "address": address, "join": limits.join, "heartbeat": limits.heartbeat}
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin:
        json.dump(settings, stdin)
    with process.stdout as stdout:
        line = stdout.readline()
    answer = json.loads(line) if line else {"wrong": f"its process ended with status {process.wait()}"}
    if "wrong" in answer:
        raise ClusterConfigError.not_bound(address, answer["wrong"])
    return str(answer["address"])
