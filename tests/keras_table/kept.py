"""The file of kept values: each array whole, so that bits can be compared, and one array a line for its history."""

from __future__ import annotations

import json
import pathlib
import platform
from typing import Any

import numpy as np

from tests.baseline.kept import versions
from tests.baseline.record import Recorded
from tests.keras_table.table import beside_before

FILE = pathlib.Path(__file__).parent / "kept.json"


def read() -> tuple[Recorded, dict[str, bool], str]:
    """The values of each program, whether its runs have the same bits, and what they were computed with."""
    kept = json.loads(FILE.read_text())
    programs = kept["programs"]
    values = {
        name: {array: _array(*written) for array, written in each["arrays"].items()} for name, each in programs.items()
    }
    return values, {name: each["repeats"] for name, each in programs.items()}, kept["computed with"]


def write(run: Recorded, again: Recorded, names: list[str]) -> None:
    """Writes what programs compute.

    Args:
        run: what some programs compute.
        again: what they compute in a second run.
        names: all programs, in order. What is kept of others stays.
    """
    kept: dict[str, Any] = json.loads(FILE.read_text())["programs"] if FILE.exists() else {}
    for name, numbers in run.items():
        arrays = {array: _written(value) for array, value in numbers.items()}
        kept[name] = {"repeats": beside_before(numbers, again[name], repeats=True).alike, "arrays": arrays}
    programs = ",\n".join(f"{json.dumps(name)}: {_lines(kept[name])}" for name in names if name in kept)
    FILE.write_text(f'{{"computed with": {json.dumps(computed_with())}, "programs": {{\n{programs}\n}}}}\n')


def computed_with() -> str:
    """What bits depend on: versions, and the processor."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return ", ".join([*(" ".join(each) for each in versions().items()), *(names[:1] or [platform.machine()])])


def _lines(program: dict[str, Any]) -> str:
    arrays = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in program["arrays"].items())
    return f'{{"repeats": {json.dumps(program["repeats"])}, "arrays": {{\n{arrays}}}}}'


def _written(array: np.ndarray) -> list[Any]:
    if array.dtype.kind == "U":
        return ["text", [], str(array)]
    # A float32 as float32 prints it has fewer digits than as a float64, and is the same number when it is read.
    values = [float(str(each)) if array.dtype.kind == "f" else each.item() for each in array.reshape(-1)]
    return [str(array.dtype), [*array.shape], values]


def _array(dtype: str, shape: list[int], values: Any) -> np.ndarray:
    return np.array(values) if dtype == "text" else np.array(values, dtype).reshape(shape)
