"""What counts as a difference, and that the programs are those whose values are kept."""

import json

import numpy as np
import pytest

from tests.baseline import __main__ as command
from tests.baseline import compare, errors, kept, record
from tests.baseline.allowed import Allowed
from tests.baseline.programs import programs

VALUES = np.random.default_rng(0).normal(size=(3, 4))


def changed(array, change):
    made = array.copy()
    change(made)
    return made


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (changed(VALUES, lambda made: made.__setitem__((1, 2), np.nextafter(made[1, 2], 9))), "is now"),
        (changed(VALUES, lambda made: made.__setitem__((0, 0), np.nan)), "is now nan"),
        (VALUES.astype("float32"), r"is now float32\[3, 4\]"),
        (VALUES.reshape(4, 3), r"is now float64\[4, 3\]"),
        (np.array("raised"), "is now <U6"),
    ],
    ids=["one bit", "NaN", "dtype", "shape", "text"],
)
def test_one_bit_is_a_difference(other, words):
    (found,) = compare.differences({"a": {"x": VALUES, "y": VALUES}}, {"a": {"x": other, "y": VALUES}})
    assert (found.program, found.array) == ("a", "x")
    assert words.replace("\\", "") in str(found)


def test_the_same_bits_are_none_also_where_they_are_no_numbers():
    values = np.array([np.nan, np.inf, -0.0])
    assert not list(compare.differences({"a": {"x": values}}, {"a": {"x": values.copy()}}))
    assert list(compare.differences({"a": {"x": values}}, {"a": {"x": np.abs(values)}}))  # of the zeros


def test_what_only_one_library_has_is_a_difference():
    missing = [*compare.differences({"a": {"x": VALUES}}, {"a": {}, "b": {"x": VALUES}})]
    assert [(each.program, each.array) for each in missing] == [("a", "x"), ("b", "x")]


def test_what_both_libraries_raise_is_a_difference():
    raised = {"raised": np.array("TypeError: one")}
    assert [each.array for each in compare.differences({"a": raised}, {"a": dict(raised)})] == ["raised"]
    assert len([*compare.differences({"a": raised}, {"a": {"x": VALUES}})]) == 2


def test_a_line_allows_what_it_names_and_no_more():
    line = Allowed("loops 0*", "loss *", 1e-6, "the sum is rounded once")
    one = compare.Difference("loops 07", "loss 1", 1e-7, "")
    assert line.allows(one)
    assert not line.allows(one._replace(largest=1e-5))
    assert not line.allows(one._replace(array="weight 1"))
    assert not line.allows(one._replace(program="loops 17"))


def test_a_line_allows_a_text_of_its_pattern_and_no_other():
    line = Allowed("errors *", "no device", "DeviceError: * devices *", "it says how many there are")
    for text, allowed in (("DeviceError: 0 devices of 2", True), ("DeviceError: none", False), ("", False)):
        before, now = ({"errors 00": {"no device": np.array(each)}} for each in ("ValueError", text))
        (found,) = compare.differences(before, now)
        assert line.allows(found) == allowed


@pytest.fixture
def found(monkeypatch):
    """What each library computes, for the command; both the same."""
    values = {"base": {"a": {"x": VALUES}}, "checkout": {"a": {"x": VALUES}}}
    monkeypatch.setattr(record, "of_library", lambda library, folder, only, nudge=None: values[folder.name])
    monkeypatch.setattr(command, "ALLOWED", ())
    return values


def test_what_differs_and_what_nothing_needs_makes_the_command_fail(found, monkeypatch, tmp_path):
    assert not command._compare(tmp_path, "")
    monkeypatch.setattr(command, "ALLOWED", (Allowed("a", "x", 1.0, "twice"),))
    assert command._compare(tmp_path, "")
    assert not command._compare(tmp_path, "a")  # other programs may need the line
    found["checkout"]["a"] = {"x": 2 * VALUES}
    assert not command._compare(tmp_path, "")
    found["checkout"]["a"] = {"x": 3 * VALUES}
    assert command._compare(tmp_path, "a")


def test_what_programs_raised_is_not_kept(monkeypatch):
    raised = {"a": {"raised": np.array("the process ended with -9")}}
    monkeypatch.setattr(record, "of_library", lambda *_: raised)
    with pytest.raises(SystemExit, match="a: the process ended with -9"):
        command._keep("")


def test_a_name_that_no_program_has_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["baseline", "--base", ".", "--only", "typo"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no program has 'typo' in its name" in capsys.readouterr().err


def test_errors_are_compared_with_all_lines_and_notes_and_kept_with_the_first_line():
    error = ValueError("one " * 100 + "line\nand another")
    error.add_note("replica 1 of 2, CPU:1, at /a/b.py:3")
    numbers = {"it": np.array(errors.said(error)), f"it{record.IN_FULL}": np.array(errors.said_in_full(error))}
    assert str(numbers["it"]) == "ValueError: " + "one " * 75
    rest = "line\nand another\nnote: a replica of 2, at a line"
    assert str(numbers["it, in full"]) == "ValueError\n" + "one " * 100 + rest
    assert [*kept.joined(numbers)] == ["it"]


@pytest.mark.parametrize(
    "array", [VALUES, VALUES[0, :2], VALUES * (1 + 2j), np.arange(7)], ids=["many", "two", "complex", "whole"]
)
def test_kept_values_find_more_than_a_millionth(array):
    kept_values = {"arrays": {"x": json.loads(json.dumps(kept.summary(array)))}, "tolerances": {}, "rounding": []}

    def wrong(other):
        return [*kept.far(kept_values, {"x": other})]

    assert not wrong(array)
    if array.dtype.kind != "i":
        assert not wrong(array * (1 + 1e-7))
        assert wrong(array * (1 + 1e-5))
        assert wrong(array.astype("complex64" if array.dtype.kind == "c" else "float32"))
    assert wrong(array[::-1].copy())
    assert wrong(-array)
    assert wrong(array + (array == array.flat[0]))
    assert [*kept.far(kept_values, {})]
    assert [*kept.far(kept_values, {"x": array, "y": array})]


def test_kept_values_find_what_is_no_number_and_another_text():
    broken = changed(VALUES, lambda made: made.__setitem__((0, 0), np.nan))
    for one, other in ((VALUES, broken), (np.array("TypeError: one"), np.array("TypeError: two"))):
        kept_values = {"arrays": {"x": kept.summary(one)}, "tolerances": {}, "rounding": []}
        assert not [*kept.far(kept_values, {"x": one})]
        assert [*kept.far(kept_values, {"x": other})]


def test_the_programs_are_those_whose_values_are_kept():
    """A change of a draw, or of what it draws from, needs new values."""
    values = json.loads(kept.FILE.read_text())
    assert {name: of["plan"] for name, of in values.items() if name != "versions"} == {
        program.name: program.check for program in programs()
    }
    assert len(programs()) == 200
