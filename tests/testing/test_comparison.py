"""What counts as rounding, and what does not."""

import numpy as np
import pytest

from replica_engine.testing.parity_report import RTOL, Numbers, compare


def compared(kind, expected, found, start=None, rtol=RTOL["float32"], atol=0.0):
    """The differences of two dictionaries."""
    one, other = (Numbers(kind, "a batch", values, None, start) for values in (expected, found))
    return [each for each in compare("S", [one], [other], rtol, atol) if each.differs]


def differs(kind, expected, found, start=None):
    """Whether two arrays differ, under the default tolerance of float32."""
    return bool(compared(kind, *({"a": np.asarray(each, "float32")} for each in (expected, found)), start=start))


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


def test_weights_are_compared_by_their_change():
    start = {"a": np.ones(2, "float32")}
    assert differs("weight", [1.001, 1], [1.001, 1.00001], start=start)
    assert not differs("weight", [2, 1], [2, 1.00001], start=start)
    assert not differs("weight", [1, 1], [1.0000001, 1], start=start)  # one unit in the last place


def test_a_change_that_is_0_but_for_rounding_may_be_another_rounding():
    expected, start = {"large": np.ones(1), "zero": np.zeros(1)}, {"large": np.zeros(1), "zero": np.zeros(1)}
    assert not compared("weight", expected, {"large": np.ones(1), "zero": np.float64([1e-6])}, start)
    assert compared("weight", expected, {"large": np.ones(1), "zero": np.float64([1e-5])}, start)


def test_what_replicas_do_not_have_differs():
    (found,) = compared("metric", {"a": 1.0}, {"b": 1.0})
    assert (found.name, found.error) == ("a", np.inf)
    (found,) = compared("layer output", {"a": np.ones(3)}, {"a": np.ones(2)})
    assert "(2,), not float64(3,)" in str(found)


def test_what_is_not_finite_on_one_device_differs_but_for_numbers_that_may_be():
    infinite = {"a": np.float32([1, np.inf])}
    assert compared("prediction", infinite, infinite)
    assert not compared("layer output", infinite, infinite)


def test_a_difference_says_how_much():
    (found,) = compared("layer output", {"a": [1.0, 4.0]}, {"a": [2.0, 4.0]})
    assert (found.expected, found.found, found.error, found.relative, found.index) == (1, 2, 1, 0.25, (0,))
    assert "layer output 'a', a batch: 2 instead of 1 at [0]; off by 1.0e+00, 2.5e-01 of 4.0e+00" in str(found)


def test_text_is_compared_as_it_is():
    text = np.array([b"x"])
    assert [
        each.name for each in compared("prediction", {"a": text, "b": text}, {"a": np.array([b"y"]), "b": text})
    ] == ["a"]


def test_tolerances_that_are_given_count():
    found = compared("loss", {"a": 1.0, "b": 1.0}, {"a": 1.7, "b": 1.8}, rtol=0.5, atol=0.25)
    assert [each.name for each in found] == ["b"]
