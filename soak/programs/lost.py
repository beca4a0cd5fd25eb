"""A worker of a job of two: it gets lost in one of several ways, or tells when it was told that the other one is."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from replica_engine.errors import WorkerLostError
from soak.programs.common import all_reduce_ones, make_strategy, say

STEPS = 20  # steps before the fault


def _raise() -> None:
    raise ValueError("the body")


FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raised": _raise,
    "left": sys.exit,
    "left past Python": lambda: os._exit(0),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main() -> None:
    """Runs steps without end. The clock is the machine's own, so that times of both workers can be subtracted."""
    name, fault, victim = sys.argv[1:]
    strategy = make_strategy(name)
    try:
        while True:
            for _ in range(STEPS):
                strategy.run(all_reduce_ones)
            if os.environ["REPLICA_ENGINE_PROCESS_ID"] == victim:
                say(f"lost at {time.monotonic()}")
                FAULTS[fault]()
    except WorkerLostError as error:
        say(f"told at {time.monotonic()} of {error.worker}")
        raise


if __name__ == "__main__":
    main()
