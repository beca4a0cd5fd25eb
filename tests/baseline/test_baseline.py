"""The programs compute what they did when their values were kept, to 1e-6."""

import gc
import json

import pytest

from soak.trainings.run import make_shared_strategy
from tests.baseline import kept
from tests.baseline.programs import FAMILIES, programs

AT_ONCE = 10
COUNT = sum(FAMILIES.values())


@pytest.fixture
def own_strategies():
    """The strategies that programs share end with the test."""
    yield
    make_shared_strategy.cache_clear()
    gc.collect()


@pytest.mark.full("minutes, and what it finds is found by the tests of the part that is wrong")
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
@pytest.mark.usefixtures("own_strategies")
def test_values_are_as_kept(first):
    values = json.loads(kept.FILE.read_text())
    wrong = []
    for program in programs()[first : first + AT_ONCE]:
        of_program = values[program.name]
        assert of_program["plan"] == program.check, f"{program.name} is drawn otherwise: {program.plan}"
        wrong += [f"{program.name}, {each}\n    {program.plan}" for each in kept.far(of_program, program.numbers())]
    versions = f"kept with {values['versions']}, found with {kept.versions()}"
    assert not wrong, "\n".join([f"{len(wrong)} arrays differ, {versions}", *wrong[:20]])
