"""The sweep over operations of divided values: what it compares, and how what fails is named.

`python -m soak --only parts` compares hundreds; here the faults are planted.
"""

import json

import numpy as np
import pytest

from soak import parts
from soak.part_operations import INDEXED, OPERATIONS
from soak.processes import Ended
from soak.programs.parts import agree, different

BAD = "conv2d"


def test_the_sweep_has_ten_thousand_cases():
    assert len({name.rpartition(", ")[0] or name for name in OPERATIONS}) >= 90
    assert all({f"{name}, int32", f"{name}, int64"} <= set(OPERATIONS) for name in INDEXED)
    assert {layout.mesh for layout in parts.LAYOUTS.values()} == {(4, 1), (1, 4), (2, 2)}
    assert len(OPERATIONS) * len(parts.LAYOUTS) * len(parts.SIZES) >= 10_000


def test_values_and_gradients_are_compared_in_a_process_of_their_own():
    names = ["lookup, int64", "any and all", BAD]
    (found,) = parts.swept("tiny", ["2 x 2, batch and length"], names)
    assert found == {"layout": "2 x 2, batch and length", "count": 5, "wrong": []}


def test_a_process_that_ends_is_halved_until_the_operation_is_known(monkeypatch):
    """The layouts after it are compared too."""

    def program(name, task, longest):
        _, layouts, names = json.loads(task)
        good = [each for each in layouts if each != "2 x 2, batch" or BAD not in names]
        lines = [json.dumps({"layout": each, "count": len(names), "wrong": []}) for each in good]
        if len(good) < len(layouts):
            return Ended(-6, "\n".join(lines[: layouts.index("2 x 2, batch")]), "Check failed")
        return Ended(0, "\n".join([*lines, "done"]), "")

    monkeypatch.setattr(parts, "program", program)
    found = list(parts.swept("odd", list(parts.LAYOUTS), ["softmax", BAD, "matmul"]))
    assert sum(each["count"] for each in found) == 3 * len(parts.LAYOUTS)
    assert {each["layout"] for each in found} == set(parts.LAYOUTS)
    (wrong,) = [each for each in found if each["wrong"]]
    assert (wrong["layout"], wrong["wrong"]) == ("2 x 2, batch", [f"{BAD}: the process ended with -6: Check failed"])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, np.nan], [1.00001, np.nan], True),
        ([1.0, np.nan], [1.001, np.nan], False),
        ([1.0, 2.0], [1.0, np.nan], False),
        ([1000.0, 0.0], [1000.0, 0.05], True),
        ([1, 2], [1, 3], False),
        ([[1.0]], [1.0], False),
    ],
)
def test_what_is_more_than_rounding_differs(one, other, same):
    assert agree(one, other) is same
    expected = {"name": ([np.asarray(other)], [])}
    assert different([{"name": ([np.asarray(one)], [])}], expected) == ({} if same else {"name": ["value"]})
