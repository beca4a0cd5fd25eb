"""What counts as rounding, and the report of what does not."""

import numpy as np
import pytest

from replica_engine.testing.parity.comparison import Numbers, compare, tolerance

LIMITS = tolerance(["float32"], None, 0.0)


def compared(kind, *pairs, start=None, limits=LIMITS):
    """The differences of pairs of dictionaries, one pair a step."""
    expected, found = (
        [Numbers(kind, "a batch", pair[side], step, start) for step, pair in enumerate(pairs)] for side in (0, 1)
    )
    rows, differences = compare(expected, {"S": found}, limits)
    assert sum(row.differing for row in rows) == sum(each.strategy == "S" for each in differences)
    return differences


def differs(kind, expected, found, start=None):
    """Whether two arrays differ, under the default tolerance of float32."""
    expected, found = ({"a": np.asarray(each, "float32")} for each in (expected, found))
    return bool(compared(kind, (expected, found), start=start))


@pytest.mark.parametrize(
    ("expected", "found", "is_different"),
    [
        ([1.0, 0.0], [1.0, 5e-5], False),  # of the largest element
        ([1.0, 0.0], [1.0, 2e-4], True),
        ([1e-6, 0.0], [1e-6, 1e-8], True),  # small numbers are compared as closely
        ([np.nan, np.inf], [np.nan, np.inf], False),
        ([1.0, 2.0], [1.0, np.nan], True),
        ([1.0, 2.0], [1.0, np.inf], True),
        ([1.0, 2.0], [[1.0, 2.0]], True),
        ([], [], False),
        ([0.0], [0.0], False),
        ([0.0], [1e-30], True),
    ],
)
def test_tensors_are_compared_as_a_whole(expected, found, is_different):
    assert differs("layer output", expected, found) == is_different


def test_a_loss_that_has_come_down_to_nothing_is_rounding():
    pairs = [({"loss": np.float32(one)}, {"loss": np.float32(other)}) for one, other in ((2, 2), (0, 1e-7), (0, 1e-6))]
    assert [difference.step for difference in compared("loss", *pairs)] == [2]


def test_a_loss_that_was_never_more_than_rounding_is_rounding():
    assert not differs("loss", 0.0, 7e-15)
    assert differs("loss", 0.0, 1e-12)


def test_weights_are_compared_by_their_change():
    start = {"a": np.ones(2, "float32")}
    assert differs("weight", [1.001, 1], [1.001, 1.00001], start=start)
    assert not differs("weight", [2, 1], [2, 1.00001], start=start)
    assert not differs("weight", [1, 1], [1.0000001, 1], start=start)  # one unit in the last place


def test_a_gradient_that_is_0_but_for_rounding_may_be_another_rounding():
    found = compared("gradient", ({"large": np.ones(1), "zero": np.zeros(1)}, {"large": np.ones(1), "zero": [2e-6]}))
    assert found == ()
    assert differs("gradient", [1.0, 0.0], [1.0, 2e-4])


def test_what_only_one_has_differs():
    assert [(each.name, each.detail) for each in compared("metric", ({"a": 1.0}, {"b": 1.0}))] == [
        ("a", "one device has it, but S does not"),
        ("b", "S has it, but one device does not"),
    ]


def test_what_is_not_finite_on_one_device_is_told_but_for_numbers_that_may_be():
    infinite = {"a": np.float32([1, np.inf])}
    assert [each.strategy for each in compared("prediction", (infinite, infinite))] == ["one device"]
    assert compared("layer output", (infinite, infinite)) == ()


def test_differences_come_in_the_order_of_the_numbers_and_a_run_may_stop_early():
    kinds = [("layer output", None), ("gradient", None), ("loss", 1), ("weight", 1), ("loss", 2)]
    expected, found = ([Numbers(kind, "a batch", {"a": value}, step) for kind, step in kinds] for value in (1.0, 2.0))
    rows, differences = compare(expected, {"S": found, "T": found[:2]}, LIMITS)
    assert [(each.kind, each.step) for each in differences if each.strategy == "S"] == kinds
    assert {(row.kind, row.count) for row in rows if row.strategy == "T"} == {("layer output", 1), ("gradient", 1)}
    first = differences[0]
    assert (first.expected, first.found, first.error, first.relative) == (1, 2, 1, 1)
    assert "layer output 'a', a batch: 2 instead of 1; off by 1.0e+00" in str(first)


def test_text_is_compared_as_it_is():
    pairs = [({"a": np.array([b"x"])}, {"a": np.array([b"y"])}), ({"b": np.array([b"x"])}, {"b": np.array([b"x"])})]
    assert [each.name for each in compared("result", *pairs)] == ["a"]


def test_tolerances_that_are_given_count():
    limits = tolerance(["float32"], 0.5, 0.25)
    found = compared("loss", ({"a": 1.0, "b": 1.0}, {"a": 1.7, "b": 1.8}), limits=limits)
    assert [each.name for each in found] == ["b"]
    assert "as given" in str(limits)


def test_the_default_is_that_of_the_coarsest_dtype():
    assert [tolerance(each, None, 0.0).rtol for each in (["float32", "float16"], ["float64", "int64"], [])] == [
        2e-2,
        1e-8,
        1e-4,
    ]
