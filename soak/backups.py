"""Kills a `fit` with `BackupAndRestore` at random instants, until it has come to its end: the bits must be the same.

A training (`soak/programs/backing_up.py`) is started, killed some time after its first step, and started again. What it
comes to in the end is compared with what an undisturbed one comes to: weights, optimizer, history.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator

from soak.checkpoints import Forks
from soak.outcome import Outcome, tell

KINDS = {"threads": "MirroredStrategy", "compiled": "TPUStrategy"}

KILLED = str(-signal.SIGKILL)

LONGEST = 0.4  # seconds after the first step in which the process is killed: some dozen steps

MOST = 40  # kills of one training; then it is left alone


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Kills trainings, half of them of each kind."""
    with contextlib.closing(Forks("backing_up")) as forks:
        for kind in KINDS:
            yield _outcome(forks, kind, flags.kills // len(KINDS), flags.seed)


def _outcome(forks: Forks, kind: str, count: int, seed: int) -> Outcome:
    outcome = Outcome("backups", KINDS[kind], "kill -9 of a fit with BackupAndRestore, until it has come to its end")
    draw, trainings = random.Random(f"backup {kind} {seed}"), 0
    with tempfile.TemporaryDirectory() as folder:

        def train(name: object, after: float | None) -> dict[str, str]:
            """The steps that it "goes" on from, the hash of what it "came" to, and the status when it "ended"."""
            start: dict[str, object] = {"folder": os.path.join(folder, str(name)), "kind": kind}
            return dict(forks.run(start, "goes", after))

        expected = train("undisturbed", None).get("came")
        while outcome.count < count:
            kills, reached, wrong, said = 0, 0, [], {"ended": KILLED}
            while said["ended"] == KILLED:
                began = time.monotonic()
                is_left = kills >= MOST or outcome.count >= count
                said = train(trainings, None if is_left else draw.uniform(0.0, LONGEST))
                goes = int(said.get("goes", reached))
                if goes < reached:
                    wrong.append(f"{kind} {trainings}: went on from step {goes}, after {reached}")
                reached = goes
                killed = said["ended"] == KILLED
                kills += killed
                outcome.add(time.monotonic() - began, [], count=int(killed))
            if said["ended"] != "0" or said.get("came", expected) != expected:
                wrong.append(f"{kind} {trainings}: ended with {said} after {kills} kills, not with {expected}")
            outcome.add(0.0, wrong, count=0)
            trainings += 1
    same = trainings - len(outcome.problems)
    outcome.found = f"{same} of {trainings} trainings came to the bits of an undisturbed one"
    tell(f"{kind}: {outcome.count} kills", outcome.problems, outcome.found)
    return outcome
