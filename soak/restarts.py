"""Kills a random worker of a job at a random moment; all start again and must come to the same weights, bit by bit.

Each job is `replica-engine launch --workers 2 --max-restarts 1` with `soak/programs/training.py`, two replicas for each
worker, and so many jobs are run with each strategy. The launcher starts all workers again, and they go on from the last
checkpoint in their shared folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import signal
import tempfile
from collections.abc import Iterator

from benchmarks.measure import seconds
from soak.outcome import Outcome, tell
from soak.processes import ROOT, Ended, python

WORKERS = 2
STRATEGIES = {"workers": "MultiWorkerMirroredStrategy", "compiled workers": "TPUStrategy"}
"""The strategies of several workers, by the names that the programs know."""

STEPS = 25  # steps of each training; every fifth one saves a checkpoint

LONGEST = 600.0  # the longest time of a job, in seconds, of which most is starting TensorFlow four times


@dataclasses.dataclass(frozen=True)
class Kill:
    """When a worker is killed."""

    worker: int  # its index
    step: int  # the step, from 0
    after: float  # seconds from the beginning of the step

    @classmethod
    def drawn(cls, seed: int) -> Kill:
        """The one that belongs to a seed."""
        draw = random.Random(f"kill {seed}")
        # Not in the last steps, of which some must be left when the moment has come.
        return cls(draw.randrange(WORKERS), draw.randrange(STEPS - 5), draw.uniform(0.0, 0.02))


def trained(strategy: str, kill: Kill | None) -> Ended:
    """Runs one job to its end, with or without a kill."""
    with tempfile.TemporaryDirectory() as folder:
        killed = [] if kill is None else ["--kill", *dataclasses.astuple(kill)]
        return launched(["--max-restarts", 1], "training", strategy, folder, "--steps", STEPS, *killed)


def launched(options: list[object], name: str, *arguments: object) -> Ended:
    """Runs a program of `soak/programs` to its end, as a job of `WORKERS` workers with options of the launcher."""
    launch = ["-m", "replica_engine", "launch", "--workers", WORKERS, *options]
    program = ROOT / "soak" / "programs" / f"{name}.py"
    # SIGTERM ends the workers too.
    return python(*launch, program, *arguments, longest=LONGEST, stop=signal.SIGTERM)


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
    """What is wrong with the end of a job; `undisturbed` is the hash of the weights of one that nothing disturbed."""
    weights = results(ended)
    if ended.code != 0 or len(weights) != WORKERS:
        return [f"{kill}: ended with {ended.code}; printed {ended.output[-500:]!r}; {ended.errors[-1500:]}"]
    wrong = [
        f"{kill}: {worker} {began} came to {own}, not to {undisturbed}"
        for worker, (began, own) in weights.items()
        if own != undisturbed
    ]
    return wrong if "restart 1 of 1" in ended.errors else [*wrong, f"{kill}: nothing was started again"]


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Disturbs jobs of each strategy; one after the other, since each has a process for each worker."""
    for strategy in STRATEGIES:
        yield _outcome(strategy, flags.restarts, flags.seed)


def _outcome(strategy: str, count: int, seed: int) -> Outcome:
    undisturbed = trained(strategy, None)
    weights = {own for _, own in results(undisturbed).values()}
    outcome = Outcome("restarts", STRATEGIES[strategy], "kill -9 of a worker; all start again")
    if undisturbed.code != 0 or len(weights) != 1:
        outcome.add(0.0, [f"without a fault: {undisturbed.output[-500:]!r}; {undisturbed.errors[-1500:]}"])
        return outcome
    for number in range(seed, seed + count):
        kill = Kill.drawn(number)
        taken, ended = seconds(functools.partial(trained, strategy, kill))
        wrong = problems(kill, ended, *weights)
        outcome.add(taken, wrong)
        tell(f"{number}: {kill}", wrong, results(ended))
    outcome.found = f"{count - len(outcome.problems)} of {count} came to the weights of an undisturbed job, bit by bit"
    return outcome
