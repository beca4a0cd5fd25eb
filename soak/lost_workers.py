"""How soon a worker raises when the other one of its job is lost: the time limits of docs/hosts/failures.md, measured.

A test cannot measure this on a machine that does other work. So the tests look at what is raised and why, and this
prints how long it took.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator

from soak.outcome import Outcome, tell
from soak.processes import Ended
from soak.restarts import STRATEGIES, WORKERS, launched

HEARTBEAT = 3.0  # the heartbeat limit of these jobs, in seconds

FAULTS = {
    "killed": "kill -9",
    "raised": "an exception",
    "left": "sys.exit(0)",
    "left past Python": "os._exit(0)",
    "stopped": f"SIGSTOP, with a heartbeat limit of {HEARTBEAT:g} s",
}


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Has each fault happen to each worker of each strategy."""
    for name, strategy in STRATEGIES.items():
        for fault, what in FAULTS.items():
            outcome, times = Outcome("lost", strategy, f"{what}: the other worker raises"), []
            for victim in [*range(WORKERS)] * flags.lost:
                began = time.monotonic()
                ended = launched(["--heartbeat-timeout", HEARTBEAT], "lost", name, fault, victim)
                seconds, wrong = judged(ended, fault, victim)
                times += [] if seconds is None else [seconds]
                outcome.add(time.monotonic() - began, wrong)
            if times:
                outcome.found = f"after {min(times):.2f} to {max(times):.2f} s"
            tell(f"{strategy}, {fault}", outcome.problems, outcome.found)
            yield outcome


def judged(ended: Ended, fault: str, victim: int) -> tuple[float | None, list[str]]:
    """The seconds from the fault until the other worker raised, or None; and what is wrong with that."""
    lost = re.search(rf"^\[worker {victim}\] lost at ([\d.]+)$", ended.output, re.MULTILINE)
    told = re.search(rf"^\[worker {1 - victim}\] told at ([\d.]+) of {victim}$", ended.output, re.MULTILINE)
    if lost is None or told is None:
        return None, [f"{fault} {victim}: printed {ended.output[-500:]!r}; {ended.errors[-1500:]}"]
    seconds = float(told[1]) - float(lost[1])
    limit = 1.0 + (HEARTBEAT if fault == "stopped" else 0.0)
    return seconds, [] if seconds <= limit else [f"{fault} {victim}: raised after {seconds:.2f} s, not {limit:g} s"]
