"""`python -m replica_engine.hosts`: the coordinator of a job, as `serve.start` starts it.

It reads what it needs from its standard input, answers with one line on its standard output, and ends when the job is
over.
"""

from __future__ import annotations

import json
import os
import sys

from replica_engine.hosts.coordinator import Coordinator
from replica_engine.hosts.job import Limits

LINGER = 30.0  # seconds after a failure in which members that come late are told of it


def main() -> int:
    """Serves a job; returns the exit status."""
    settings = json.load(sys.stdin)
    limits = Limits(settings["join"], settings["heartbeat"])
    try:
        coordinator = Coordinator(settings["size"], settings["token"], settings["address"], limits)
    except OSError as error:
        # Python adds the address to the text; the error that worker 0 raises has it already.
        print(json.dumps({"wrong": str(error.strerror).partition(" (")[0]}), flush=True)
        return 1
    print(json.dumps({"address": coordinator.address}), flush=True)
    # Somebody who waits for the end of worker 0's output must not wait for this process too.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    coordinator.serve(LINGER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
