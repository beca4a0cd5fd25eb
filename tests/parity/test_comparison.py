"""What counts as rounding, and the report of what does not."""

import numpy as np
import pytest

from replica_engine.testing.parity.comparison import Comparison, noise, tolerance

LIMITS = tolerance("float32", None, None)


@pytest.fixture
def differs():
    """`differs(kind, expected, found)`: whether they differ, under the default tolerance of float32."""

    def differs(kind, expected, found, **options):
        comparison = Comparison(LIMITS)
        expected, found = ({"a": np.asarray(each, "float32")} for each in (expected, found))
        comparison.compare("S", kind, "a batch", expected, found, **options)
        (row,) = comparison.rows()
        assert row.differing == len(comparison.differences())
        return bool(row.differing), row.amplified

    return differs


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
def test_tensors_are_compared_as_a_whole(differs, expected, found, is_different):
    assert differs("prediction", expected, found) == (is_different, 0)


def test_a_loss_that_has_come_down_to_nothing_is_rounding():
    comparison = Comparison(LIMITS)
    for step, (expected, found) in enumerate([(2.0, 2.0), (0.0, 1e-7), (0.0, 1e-6)]):
        one, other = ({"loss": np.float32(each)} for each in (expected, found))
        comparison.compare("S", "loss", "a batch", one, other, step=step)
    assert [difference.step for difference in comparison.differences()] == [2]


def test_a_loss_that_was_never_more_than_rounding_is_rounding(differs):
    assert differs("loss", 0.0, 7e-15) == (False, 0)
    assert differs("loss", 0.0, 1e-12) == (True, 0)


def test_weights_are_compared_by_their_change(differs):
    start = {"a": np.ones(2, "float32")}
    assert differs("weight", [1.001, 1], [1.001, 1.00001], start=start) == (True, 0)
    assert differs("weight", [2, 1], [2, 1.00001], start=start) == (False, 0)
    assert differs("weight", [1, 1], [1.0000001, 1], start=start) == (False, 0)  # one unit in the last place


def test_measured_rounding_is_allowed_ten_times(differs):
    assert differs("weight", [1.0], [1.01], noise={"a": 0.002}) == (False, 1)
    assert differs("weight", [1.0], [1.03], noise={"a": 0.002}) == (True, 0)


def test_measured_rounding_cannot_hide_a_wrong_gradient(differs):
    assert differs("gradient", [1.0], [1.01], noise={"a": 0.1}) == (True, 0)
    comparison = Comparison(LIMITS)
    one, other = {"large": np.ones(1), "zero": np.zeros(1)}, {"large": np.ones(1), "zero": np.full(1, 5e-6)}
    comparison.compare("S", "gradient", "a batch", one, other, noise={"zero": 1e-6})
    assert comparison.differences() == ()


def test_noise_is_the_largest_difference_of_finite_numbers():
    others = [{"a": np.float32([1, 2.5]), "b": np.float32(3)}, {"a": np.float32([1.25, 2]), "b": np.float32(np.nan)}]
    assert noise({"a": np.float32([1, 2]), "b": np.float32(3)}, others) == {"a": 0.5, "b": 0}


def test_what_only_one_has_differs():
    comparison = Comparison(LIMITS)
    comparison.compare("S", "metric", "a batch", {"a": 1.0}, {"b": 1.0})
    assert [(each.name, each.detail) for each in comparison.differences()] == [
        ("a", "one device has it, but S does not"),
        ("b", "S has it, but one device does not"),
    ]


def test_differences_come_in_the_order_of_a_step():
    comparison = Comparison(LIMITS)
    for kind, step in (("weight", 1), ("loss", 2), ("loss", 1), ("gradient", None), ("layer output", None)):
        comparison.compare("S", kind, "a batch", {"a": 1.0}, {"a": 2.0}, step=step)
    assert [(each.kind, each.step) for each in comparison.differences()] == [
        ("layer output", None),
        ("gradient", None),
        ("loss", 1),
        ("weight", 1),
        ("loss", 2),
    ]
    first = comparison.differences()[0]
    assert (first.expected, first.found, first.error, first.relative) == (1, 2, 1, 1)
    assert "layer output 'a', a batch: 2 instead of 1; off by 1.0e+00" in str(first)


def test_text_is_compared_as_it_is():
    comparison = Comparison(LIMITS)
    comparison.compare("S", "result", "a batch", {"a": np.array([b"x"])}, {"a": np.array([b"y"])})
    comparison.compare("S", "result", "a batch", {"b": np.array([b"x"])}, {"b": np.array([b"x"])})
    assert [each.name for each in comparison.differences()] == ["a"]


def test_tolerances_that_are_given_count():
    limits = tolerance("float32", 0.5, 0.25)
    comparison = Comparison(limits)
    comparison.compare("S", "loss", "a batch", {"a": 1.0, "b": 1.0}, {"a": 1.7, "b": 1.8})
    assert [each.name for each in comparison.differences()] == ["b"]
    assert "as given" in str(limits)
