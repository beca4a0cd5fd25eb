"""Kills a `fit` with `BackupAndRestore` at random instants, until it has come to its end: the bits must be the same.

    python -m soak --only backups [--kills 300] [--seed 0]

A training (`soak/programs/backing_up.py`) is started, killed some time after its first step, and started again. What it
comes to in the end is compared with what an undisturbed one comes to: weights, optimizer, history.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator

from soak.checkpoints import Saver
from soak.outcome import Outcome

KINDS = {"threads": "MirroredStrategy", "compiled": "TPUStrategy"}

LONGEST = 0.4
"""Seconds after the first step in which the process is killed: some dozen steps."""

MOST = 40
"""Kills of one training; then it is left alone."""


class Trainer(Saver):
    """The process that starts the process that is killed."""

    def train(self, folder: str, kind: str, after: float | None) -> dict[str, str]:
        """Starts a training, and kills it some seconds after its first step; None leaves it alone.

        Returns:
            "goes": the steps that it went on from. "came": the hash of what it came to. "ended": its status.
        """
        pid = self.start({"folder": folder, "kind": kind})
        said: dict[str, str] = {}
        while "ended" not in said:
            name, value = self.words()
            said[name] = value
            if name == "goes" and after is not None:
                time.sleep(after)  # any instant will do
                with contextlib.suppress(ProcessLookupError):  # it has come to its end
                    os.kill(pid, signal.SIGKILL)
        return said


def run(count: int, seed: int) -> Iterator[Outcome]:
    """Kills `count` times, half of them of each kind."""
    with contextlib.closing(Trainer("soak.programs.backing_up")) as trainer:
        for kind in KINDS:
            yield _run(trainer, kind, count // len(KINDS), seed)


def _run(trainer: Trainer, kind: str, count: int, seed: int) -> Outcome:
    outcome = Outcome("backups", KINDS[kind], "kill -9 of a fit with BackupAndRestore, until it has come to its end")
    draw, trainings = random.Random(f"backup {kind} {seed}"), 0
    with tempfile.TemporaryDirectory() as folder:
        expected = trainer.train(os.path.join(folder, "undisturbed"), kind, None).get("came")
        while outcome.count < count:
            kills, reached, wrong = 0, 0, []
            said = {"ended": str(-signal.SIGKILL)}
            while said["ended"] == str(-signal.SIGKILL):
                began = time.monotonic()
                is_left = kills >= MOST or outcome.count >= count
                after = None if is_left else draw.uniform(0.0, LONGEST)
                said = trainer.train(os.path.join(folder, str(trainings)), kind, after)
                if int(said.get("goes", reached)) < reached:
                    wrong.append(f"{kind} {trainings}: went on from step {said['goes']}, after {reached}")
                reached = int(said.get("goes", reached))
                killed = said["ended"] == str(-signal.SIGKILL)
                kills += killed
                outcome.add(time.monotonic() - began, [], count=int(killed))
            if said["ended"] != "0" or said.get("came", expected) != expected:
                wrong.append(f"{kind} {trainings}: ended with {said} after {kills} kills, not with {expected}")
            outcome.add(0.0, wrong, count=0)
            trainings += 1
    same = trainings - len(outcome.problems)
    outcome.found = f"{same} of {trainings} trainings came to the bits of an undisturbed one"
    print(f"  {kind}: {outcome.count} kills, {outcome.found}", flush=True)
    return outcome
