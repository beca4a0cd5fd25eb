"""Random trainings, one after the other; a failing one is made small.

python -m soak --only trainings [--trainings 500] [--repeats 3] [--seed 0] [--seconds S]
python -m soak --only trainings --seed 17 --trainings 1         the training that was drawn from 17
python -m soak --only trainings --training '{"seed": 17, ...}'  the training that a failure printed
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator

from soak.outcome import Outcome
from soak.trainings import draw, judge, shrink
from soak.trainings.run import trained
from soak.trainings.spec import Spec

SHRINKING = 600.0
"""Seconds to make one failing training small."""


def run(
    specs: Iterable[Spec], repeats: int, seconds: float | None = None, train: judge.Train = trained
) -> Iterator[Outcome]:
    """Judges trainings, and yields an outcome for each strategy and API.

    Args:
        specs: the trainings.
        repeats: how often each one is trained on its strategy.
        seconds: no other training begins after this time.
        train: trains a spec.
    """
    gc.set_threshold(50_000, 20, 20)  # tracing makes many objects that stay
    outcomes: dict[tuple[str, str], Outcome] = {}
    began = time.monotonic()
    for spec in specs:
        if seconds is not None and time.monotonic() - began > seconds:
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
