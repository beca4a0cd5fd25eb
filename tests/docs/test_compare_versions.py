"""The script that compares the numbers of versions."""

import importlib.util
import json
import pathlib

import pytest
from helpers.versions import HAS_XLA, WHY_NO_XLA

SCRIPT = pathlib.Path(__file__).parents[2] / "docs" / "compare_versions.py"
spec = importlib.util.spec_from_file_location("compare_versions", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

NAMES = ("abs", "math.xlogy", "norm of all")


def test_at_least_100_functions_are_compared():
    assert len(script.CASES) >= 100


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
def test_one_version_differs_from_another_only_where_its_bits_do(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    for file in (first, second):
        script.record(file, NAMES)
    assert set(script.read(first)) == set(NAMES)
    script.main("compare", first, second)
    printed = capsys.readouterr().out
    assert "Old and new, other values: 0" in printed
    assert "|" not in printed

    changed = script.read(second)
    (result,) = changed["norm of all"]["gradients, one device"]
    result["bits"] = "0000803f" + result["bits"][8:]  # 1.0
    second.write_text(json.dumps(changed))
    script.main("compare", first, second)
    assert "| norm of all | gradients |" in capsys.readouterr().out


def _result(*numbers):
    array = script.np.array(numbers, "float32")
    return [{"dtype": "float32", "shape": [len(numbers)], "bits": array.tobytes().hex()}]


@pytest.mark.parametrize(
    ("old", "new", "kind", "elements"),
    [
        (_result(1, float("nan")), _result(1, -float("nan")), "the same", []),
        (_result(1, 0.0), _result(1, -0.0), "other signs of zeros", [1]),
        (_result(1, 2), _result(1.000001, 2), "other last bits", [0]),
        (_result(1, 2), _result(1.0, 2.1), "other values", [1]),
        (_result(1, float("inf")), _result(1, 3e38), "other values", [1]),
        (_result(1), _result(1, 1), "other values", []),
        (_result(1), "ValueError: no", "other values", []),
        ("ValueError: no", "TypeError: no", "the same", []),
    ],
)
def test_a_difference_has_a_kind_and_a_place(old, new, kind, elements):
    found, places = script.difference(old, new)
    assert (found, places.tolist()) == (kind, elements)
