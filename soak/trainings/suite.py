"""Random trainings, one after the other; a failing one is made small."""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterable, Iterator

import replica_engine
from soak.outcome import Outcome
from soak.trainings import draw, judge, shrink
from soak.trainings.run import trained
from soak.trainings.spec import Spec

SHRINKING = 600.0  # seconds to make one failing training small


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Judges the training that is given, or drawn ones, and yields an outcome for each strategy and API."""
    replica_engine.logical_devices(64)
    specs = [Spec.from_json(flags.training)] if flags.training else drawn(flags.seed, flags.trainings)
    with tempfile.TemporaryDirectory() as folder:
        replica_engine.xla.set_cache_dir(folder)  # a training that is repeated compiles its programs once
        yield from run(specs, flags.repeats, flags.seconds)
        replica_engine.xla.set_cache_dir(None)


def run(
    specs: Iterable[Spec], repeats: int, seconds: float = float("inf"), train: judge.Train = trained
) -> Iterator[Outcome]:
    """Judges trainings, each trained so often on its strategy; no other one begins after this time."""
    gc.set_threshold(50_000, 20, 20)  # tracing makes many objects that stay
    outcomes: dict[tuple[str, str], Outcome] = {}
    began = time.monotonic()
    for spec in specs:
        if time.monotonic() - began > seconds:
            break
        what = f"trainings of Keras, {spec.api}"
        outcome = outcomes.setdefault((spec.strategy, spec.api), Outcome("trainings", spec.strategy, what))
        start = time.monotonic()
        verdict = judge.judged(spec, train, repeats)
        if verdict.problem == judge.RUNS and judge.keras_differs(spec, train, 3 * repeats):
            verdict = judge.Verdict(details="plain Keras differs from run to run", refused=True)
        took = time.monotonic() - start
        word = verdict.problem or (f"no training: {verdict.details}" if verdict.refused else "ok")
        print(f"  {spec}: {word}{', rounding' * verdict.rounding}, {took:.1f} s", flush=True)
        problems = []
        if verdict.problem is not None:
            print(f"    {verdict.details}", flush=True)
            small = f"--training '{_smallest(spec, verdict.problem, train, repeats).to_json()}'"
            print(f"    {small}", flush=True)
            problems = [f"{spec}: {verdict.problem}: {verdict.details}\n    {small}"]
        outcome.add(took, problems, count=not verdict.refused)
        gc.collect()
    for outcome in outcomes.values():
        outcome.found = f"each {repeats} times, bitwise equal; the numbers of one device"
        yield outcome


def drawn(seed: int, count: int) -> Iterator[Spec]:
    """The trainings of `count` seeds."""
    return (draw.drawn(each) for each in range(seed, seed + count))


def _smallest(spec: Spec, problem: str, train: judge.Train, repeats: int) -> Spec:
    """The smallest training that has the problem."""
    if problem == judge.RUNS:
        repeats = max(repeats, 6)  # a difference may come in few runs, and a smaller training must not pass by luck
    return shrink.smallest(spec, lambda small: judge.judged(small, train, repeats).problem == problem, SHRINKING)
