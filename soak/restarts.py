"""Kills a random worker of a job at a random moment; all start again and must come to the same weights, bit by bit.

    python -m soak --only restarts [--restarts 25] [--seed 0]

Each job is `replica-engine launch --workers 2 --max-restarts 1` with `soak/programs/training.py`, two replicas for each
worker, and so many jobs are run with each strategy. The launcher starts all workers again, and they go on from the last
checkpoint in their shared folder.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from soak.outcome import Outcome
from soak.processes import Ended

WORKERS = 2
STRATEGIES = {"workers": "MultiWorkerMirroredStrategy", "compiled workers": "TPUStrategy"}
"""The strategies of several workers, by the names that the programs know."""

STEPS = 25
"""Steps of each training; every fifth one saves a checkpoint."""

LONGEST = 600.0
"""The longest time of a job, in seconds, of which most is starting TensorFlow four times."""

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass(frozen=True)
class Kill:
    """When a worker is killed.

    Attributes:
        worker: its index.
        step: the step, from 0.
        after: seconds from the beginning of the step.
    """

    worker: int
    step: int
    after: float

    @classmethod
    def drawn(cls, seed: int) -> Kill:
        """The one that belongs to a seed."""
        draw = random.Random(f"kill {seed}")
        # Not in the last steps, of which some must be left when the moment has come.
        return cls(draw.randrange(WORKERS), draw.randrange(STEPS - 5), draw.uniform(0.0, 0.02))


def trained(strategy: str, kill: Kill | None) -> Ended:
    """Runs one job to its end, with or without a kill."""
    with tempfile.TemporaryDirectory() as folder:
        train = [os.path.join(ROOT, "soak", "programs", "training.py"), strategy, folder, "--steps", str(STEPS)]
        killed = [] if kill is None else ["--kill", str(kill.worker), str(kill.step), str(kill.after)]
        return launched(["--max-restarts", "1"], [*train, *killed])


def launched(options: list[str], program: list[str]) -> Ended:
    """Runs a program as a job of `WORKERS` workers to its end.

    Args:
        options: of the launcher.
        program: the path of the program, and its arguments.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "replica_engine", "launch", "--workers", str(WORKERS), *options, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    try:
        output, errors = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # which ends the workers too
        output, errors = process.communicate()
        errors += f"\nended, since it was not over after {LONGEST:.0f} s"
    return Ended(process.returncode, output, errors)


def results(ended: Ended) -> dict[str, tuple[str, str]]:
    """What each worker printed last: where its last start began, and the hash of its weights."""
    found = {}
    for line in ended.output.splitlines():
        worker, _, text = line.removeprefix("[").partition("] ")
        if text.startswith("from "):
            began, _, weights = text.partition(": ")
            found[worker] = began, weights
    return found


def problems(kill: Kill, ended: Ended, undisturbed: str) -> list[str]:
    """What is wrong with the end of a job that was disturbed.

    Args:
        kill: what disturbed it.
        ended: how it ended.
        undisturbed: the hash of the weights of a job that nothing disturbed.
    """
    weights = results(ended)
    if ended.code != 0 or len(weights) != WORKERS:
        return [f"{kill}: ended with {ended.code}; printed {ended.output[-500:]!r}; {ended.errors[-1500:]}"]
    wrong = [
        f"{kill}: {worker} {began} came to {own}, not to {undisturbed}"
        for worker, (began, own) in weights.items()
        if own != undisturbed
    ]
    return wrong if "restart 1 of 1" in ended.errors else [*wrong, f"{kill}: nothing was started again"]


def run(count: int, seed: int) -> Iterator[Outcome]:
    """Disturbs `count` jobs of each strategy; one after the other, since each has a process for each worker."""
    for strategy in STRATEGIES:
        yield from _run(strategy, count, seed)


def _run(strategy: str, count: int, seed: int) -> Iterator[Outcome]:
    undisturbed = trained(strategy, None)
    weights = {own for _, own in results(undisturbed).values()}
    outcome = Outcome("restarts", STRATEGIES[strategy], "kill -9 of a worker; all start again")
    if undisturbed.code != 0 or len(weights) != 1:
        outcome.add(0.0, [f"without a fault: {undisturbed.output[-500:]!r}; {undisturbed.errors[-1500:]}"])
        yield outcome
        return
    for number in range(seed, seed + count):
        kill, began = Kill.drawn(number), time.monotonic()
        ended = trained(strategy, kill)
        wrong = problems(kill, ended, *weights)
        outcome.add(time.monotonic() - began, wrong)
        print(f"  {number}: {kill}: {'FAILED ' + str(wrong) if wrong else results(ended)}", flush=True)
    outcome.found = f"{count - len(outcome.problems)} of {count} came to the weights of an undisturbed job, bit by bit"
    yield outcome
