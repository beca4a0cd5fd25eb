"""Random faults in one process, a few hundred of them: the short version of `make soak`.

A failure names the seed, and `python -m soak --only faults --seed SEED --injections 1` injects that fault alone.
"""

import dataclasses

import pytest

from soak import injection
from soak.faults import Injector
from soak.injection import COMPILED, EAGER, Injection
from soak.model import LOWERING


def inject(injections):
    injector = Injector()
    problems = [f"{each}: {problem}" for each in injections for problem in injector.inject(each)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("seed", [0, pytest.param(50, marks=pytest.mark.full("another number"))])
def test_on_threads(seed):
    """Each model and its strategies are new here, so earlier tests cannot hide a fault."""
    inject([Injection.drawn(number, only_quick=True) for number in range(seed, seed + 50)])


def test_in_compiled_bodies():
    """On one strategy, whose program is compiled once."""
    drawn = (Injection.drawn(number) for number in range(10_000))
    compiled = [
        each
        for each in drawn
        if each.strategy == COMPILED and each.size == 3 and each.form == EAGER and each.point != injection.INPUTS
    ]
    on_the_way = [dataclasses.replace(compiled[0], point=point) for point in (LOWERING, injection.COMPILE)]
    inject([each for each in compiled if not each.traces][:30] + on_the_way)


def test_one_seed_draws_one_fault():
    assert Injection.drawn(7) == Injection.drawn(7)
    assert len({str(Injection.drawn(number)) for number in range(1000)}) == 1000
