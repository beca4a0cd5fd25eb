"""Everything made and called once before the first strategy, and then used under it: see `helpers/made_before`.

What this library puts in place of functions of TensorFlow and Keras comes when a strategy needs it. It must serve the
names, functions and objects that a program had before.
"""

import pytest
from helpers import made_before
from helpers.made_before import MIRRORED, REPLICATE, TPU
from helpers.versions import HAS_XLA

FULL = pytest.mark.full("what each strategy puts in place is there in `make test` when it is the first one")
ORDERS = [[MIRRORED], [TPU], [REPLICATE], [MIRRORED, TPU], [TPU, MIRRORED], [REPLICATE, TPU, MIRRORED]]
CASES = [(kinds, imports) for kinds in ORDERS if HAS_XLA or TPU not in kinds for imports in (False, True)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=", then ".join([*["import"] * case[1], *case[0]]), marks=[FULL] * (case not in CASES[:6:2])
        )
        for case in CASES
    ],
)
def test_what_was_made_before_the_first_strategy_works_under_it(programs, case):
    failed = programs.value(made_before.not_served, *case)
    assert not failed, "\n\n".join([f"Not served: {'; '.join(failed)}.", *failed.values()])
