"""`python -m replica_engine.workers`: the coordinator of a job, as `server.start` starts it.

It reads what it needs from its standard input, answers with one line on its standard output, and ends when the job is
over.
"""

from __future__ import annotations

import json
import sys

from replica_engine.workers.job import Limits
from replica_engine.workers.server import Coordinator, answer

LINGER = 30.0  # seconds after a failure in which members that come late are told of it


def main() -> int:
    """Serves a job; returns the exit status."""
    settings = json.load(sys.stdin)
    limits = Limits(*settings["limits"])
    try:
        coordinator = Coordinator(settings["size"], settings["token"], settings["address"], limits)
    except OSError as error:
        # Python adds the address to the text; the error that worker 0 raises has it already.
        print(json.dumps({"wrong": str(error.strerror).partition(" (")[0]}), flush=True)
        return 1
    answer({"address": coordinator.address})
    coordinator.serve(LINGER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
