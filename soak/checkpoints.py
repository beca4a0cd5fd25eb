"""Kills a process that saves checkpoints at a random instant, and starts it again: nothing complete may be lost.

    python -m soak --only checkpoints [--kills 300] [--seed 0]

The process (`soak/programs/saving.py`) saves all the time, half of the times asynchronously, through a
`CheckpointManager` and over one and the same name. It prints which checkpoints are complete. The next one must find
those, or newer ones, and every value in them must be of one step.
"""

from __future__ import annotations

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

from soak.outcome import Outcome

KINDS = {"threads": "MirroredStrategy", "parts": "TPUStrategy, in parts"}
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

LONGEST = 0.3
"""Seconds after the first save in which the process is killed: some dozen saves."""


class Saver:
    """The process that starts the process that is killed; `program` is its module."""

    def __init__(self, program: str = "soak.programs.saving") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": ROOT},
        )

    def killed(self, folder: str, kind: str, asynchronous: bool, after: float) -> dict[str, list[int]]:
        """Starts one, kills it some seconds after its first save, and returns what it printed.

        Returns:
            "found": the steps of the newest checkpoint and of the one that is written over, when it began.
            "saved" and "over": the steps of those that it said are complete.
            "ended": its status, which is that of SIGKILL if nothing was wrong before.
        """
        pid = self.start({"folder": folder, "kind": kind, "asynchronous": asynchronous})
        said: dict[str, list[int]] = {"found": [], "saved": [], "over": [], "ended": []}
        while not said["ended"]:
            words = self.words()
            name = "over" if words[1:2] == ["over"] else words[0]
            said[name] += [int(word) for word in words[1:] if word.lstrip("-").isdigit()]
            if name == "saved" and not said["over"] and len(said["saved"]) == 1:
                time.sleep(after)  # any instant will do
                os.kill(pid, signal.SIGKILL)
        return said

    def start(self, what: dict[str, object]) -> int:
        """Starts one, and returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return int(self.words()[1])

    def words(self) -> list[str]:
        """The words of the next line that it prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the program has ended with {self._process.wait()}")
        return line.split()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run(count: int, seed: int) -> Iterator[Outcome]:
    """Kills `count` processes, half of them of each kind."""
    with contextlib.closing(Saver()) as saver:
        for kind in KINDS:
            yield _run(saver, kind, count // len(KINDS), seed)


def _run(saver: Saver, kind: str, count: int, seed: int) -> Outcome:
    outcome, complete, half = Outcome("checkpoints", KINDS[kind], "kill -9 while checkpoints are saved"), [0, 0], 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(seed, seed + count + 1):  # the last one only looks
            draw, began = random.Random(f"save {number}"), time.monotonic()
            said = saver.killed(folder, kind, draw.random() < 0.5, draw.uniform(0.0, LONGEST))
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
    print(f"  {kind}: {outcome.count} kills, {outcome.found}, {len(outcome.problems)} lost", flush=True)
    return outcome
