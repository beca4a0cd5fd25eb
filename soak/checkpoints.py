"""Kills a process that saves checkpoints at a random instant, and starts it again: nothing complete may be lost.

The process (`soak/programs/saving.py`) saves all the time, half of the times asynchronously, through a
`CheckpointManager` and over one and the same name. It prints which checkpoints are complete. The next one must find
those, or newer ones, and every value in them must be of one step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from soak.outcome import Outcome, tell
from soak.processes import ROOT

KINDS = {"threads": "MirroredStrategy", "parts": "TPUStrategy, in parts"}

LONGEST = 0.3  # seconds after the first save in which the process is killed: some dozen saves


class Forks:
    """A process of `soak/programs` that starts the processes that are killed, in forks."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"soak.programs.{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def run(self, what: dict[str, object], ready: str, after: float | None) -> list[list[str]]:
        """Starts one, and kills it some seconds after the first line that begins so; None leaves it alone.

        Returns:
            The words of each line that it printed; the last line is "ended" with its status.
        """
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        _, pid = self._process.stdout.readline().split()
        said: list[list[str]] = []
        while not said or said[-1][0] != "ended":
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the program has ended with {self._process.wait()}")
            said.append(line.split())
            if after is not None and said[-1][0] == ready:
                time.sleep(after)  # any instant will do
                after = None
                with contextlib.suppress(ProcessLookupError):  # it has come to its end
                    os.kill(int(pid), signal.SIGKILL)
        return said

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Kills processes, half of them of each kind."""
    with contextlib.closing(Forks("saving")) as forks:
        for kind in KINDS:
            yield _outcome(forks, kind, flags.kills // len(KINDS), flags.seed)


def _outcome(forks: Forks, kind: str, count: int, seed: int) -> Outcome:
    outcome, complete, half = Outcome("checkpoints", KINDS[kind], "kill -9 while checkpoints are saved"), [0, 0], 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(seed, seed + count + 1):  # the last one only looks
            draw, began = random.Random(f"save {number}"), time.monotonic()
            start = {"folder": folder, "kind": kind, "asynchronous": draw.random() < 0.5}
            # The steps of the newest checkpoint and of the one that is written over, when it began; then of those that
            # it said are complete.
            said: dict[str, list[int]] = {"found": [], "saved": [], "over": [], "ended": []}
            for name, *words in forks.run(start, "saved", draw.uniform(0.0, LONGEST)):
                is_over = words[0] == "over"
                said["over" if is_over else name] += map(int, words[is_over:])
            wrong = []
            if said["ended"] != [-signal.SIGKILL] or not said["found"]:
                wrong.append(f"{kind} {number}: ended with {said['ended']} after {said}")
            elif any(now < before for now, before in zip(said["found"], complete, strict=True)):
                wrong.append(f"{kind} {number}: found {said['found']}, but {complete} were complete")
            complete = [
                max([before, *said[name], *said["found"][place : place + 1]])
                for place, (before, name) in enumerate(zip(complete, ("saved", "over"), strict=True))
            ]
            half += any(name.endswith("_temp") for name in os.listdir(folder))
            outcome.add(time.monotonic() - began, wrong, count=int(number < seed + count))
        left = len(os.listdir(folder))
    outcome.found = f"{half} kills while files were being written; {complete[0]:,} checkpoints; {left} files at the end"
    tell(f"{kind}: {outcome.count} kills", outcome.problems, outcome.found)
    return outcome
