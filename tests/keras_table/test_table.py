"""What the table says of differences, and that the programs are those whose values are kept."""

import numpy as np
import pytest

from tests.keras_table import kept, table
from tests.keras_table.programs import ONE_DEVICE, programs

NUMBERS = {
    "raised/fit": np.array("nothing"),
    "losses/batch 0 loss": np.array(0.7),
    "weights/0 kernel": np.array([[0.1, -2.0]], "float32"),
    "warnings": np.array(""),
}
RAISED = {"raised/fit": np.array("BatchError: a batch of 13 samples"), "warnings": np.array("uneven_rest")}


def moved(by):
    return NUMBERS | {"weights/0 kernel": NUMBERS["weights/0 kernel"] * np.float32(1 + by)}


def test_60_programs_are_kept_and_what_one_device_computes():
    values, repeats, _ = kept.read()
    assert [*values] == [*repeats] == [program.name for program in programs()]
    assert sum(program.way != ONE_DEVICE for program in programs()) == 60
    assert not any(program.device not in values for program in programs())


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (NUMBERS | {"warnings": np.array("any")}, "agrees (0)"),
        (moved(1e-6), "agrees (1e-06)"),
        (moved(0.5), "weights 0.5"),
        (NUMBERS | {"losses/batch 0 loss": np.array(np.nan)}, "losses NaN or shape"),
        ({"raised/fit": RAISED["raised/fit"]}, "fit raises BatchError"),
        ({name: NUMBERS[name] for name in ("raised/fit", "weights/0 kernel")}, "losses NaN or shape"),
        ({"raised": np.array("the process ended with -9")}, "is not made: the process ended with -9"),
    ],
)
def test_what_replicas_compute_beside_one_device(found, text):
    cell = table.beside_one_device(NUMBERS, found)
    assert cell.text == text
    assert cell.alike == text.startswith("agrees")


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (NUMBERS, "same bits"),
        (moved(1e-7), "weights 1e-07"),
        (NUMBERS | {"warnings": np.array("uneven_rest")}, "warnings: nothing -> uneven_rest"),
        (NUMBERS | {"raised/fit": RAISED["raised/fit"]}, "fit raises nothing -> BatchError"),
        (NUMBERS | {"losses/batch 1 loss": np.array(0.6)}, "losses new"),
        ({name: NUMBERS[name] for name in ("raised/fit", "weights/0 kernel", "warnings")}, "losses gone"),
    ],
)
def test_what_a_program_computes_beside_before(now, text):
    cell = table.beside_before(NUMBERS, now, repeats=True)
    assert cell.text == text
    assert cell.alike == (now is NUMBERS)


def test_rounding_is_no_change_of_a_program_whose_runs_differ():
    assert table.beside_before(NUMBERS, moved(1e-7), repeats=False) == ("as before (1e-07)", True, ())
    assert not table.beside_before(NUMBERS, moved(1e-5), repeats=False).alike


def test_a_line_says_what_was_what_is_and_what_has_changed():
    agrees, raises = (table.beside_one_device(NUMBERS, found) for found in (NUMBERS, RAISED))
    line = table.Line("uneven: scope", raises, agrees, table.beside_before(RAISED, NUMBERS, repeats=True))
    text = table.printed([line], values=True)
    cells = [cell.strip() for cell in text.splitlines()[1].split("   ") if cell]
    assert cells[:2] == ["uneven: scope  fit raises BatchError", "agrees (0)"]
    assert "CHANGED: fit raises BatchError -> nothing, warnings: uneven_rest -> nothing, losses new" in cells[2]
    assert "    before: raised/fit: 'BatchError: a batch of 13 samples'" in text
    assert text.endswith("of 1 programs 1 agree with one device, and 0 did before; 1 have changed")


def test_kept_values_have_the_same_bits_when_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "FILE", tmp_path / "kept.json")
    draw = np.random.default_rng(0)
    numbers = {
        **NUMBERS,
        "a": draw.normal(size=(3, 0, 2)),
        "b": draw.normal(size=50).astype("float32"),
        "c": np.array([np.nan, np.inf, -0.0]),
        "d": np.array([2**40, 3]),
        "e": np.array(True),
    }
    kept.write({"one": numbers, "other": numbers}, {"one": numbers, "other": moved(1e-7)}, ["one", "other"])
    values, repeats, _ = kept.read()
    assert repeats == {"one": True, "other": False}
    assert table.beside_before(numbers, values["one"], repeats=True).alike
    kept.write({"other": NUMBERS}, {"other": NUMBERS}, ["one", "other"])
    values, repeats, _ = kept.read()
    assert [*values] == ["one", "other"]
    assert repeats["other"]
    assert [*values["other"]] == [*NUMBERS]
