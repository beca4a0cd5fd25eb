"""Kept values: a few numbers of each array, which hold for any processor to 1e-6."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.baseline.record import IN_FULL, Recorded

FILE = pathlib.Path(__file__).parent / "kept.json"
TOLERANCE = 1e-6
ABSOLUTE = 1e-9  # what would be 0 without rounding
FACTOR = 100
"""How much farther than a nudge by a unit in the last place values may move."""
MOST = 1e-2
"""An array that rounding alone moves farther than this says nothing, and is not kept."""
WHOLE = 2
"""Arrays of as many elements are kept whole."""
LIBRARIES = ("tensorflow", "keras", "jax", "numpy")


def summary(array: np.ndarray) -> list[Any]:
    """What is kept of an array: dtype and shape, then its elements, or two sums over them.

    The first adds up their sizes. In the second each has a factor of its own, so it is another one for another order.
    """
    if array.dtype.kind in "USO":
        return ["text", array.tolist()]
    values = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64).reshape(-1)
    values = np.concatenate([values.real, values.imag]) if array.dtype.kind == "c" else values
    finite = np.isfinite(values)
    kind = f"{array.dtype}{list(array.shape)}".replace(" ", "") + (
        f" of which {int((~finite).sum())} not finite" * (not finite.all())
    )
    values = np.where(finite, values, 0)
    if values.size <= WHOLE:
        return [kind, *map(_short, values)]
    places = np.arange(values.size)
    return [kind, *map(_short, (np.abs(values).sum(), (values * np.cos(1.3 * places + 0.7)).sum()))]


def _short(value: float) -> float:
    return float(f"{value:.8g}")


def joined(numbers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with one array for the values of all replicas, if they are alike, so that the file is small.

    For that reason texts in full are left out; the first line of each of them is there.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for name, array in numbers.items():
        if not name.endswith(IN_FULL):
            parts.setdefault(re.sub(r" of replica \d+$", " of replicas", name), []).append(array)
    made = {}
    for name, arrays in parts.items():
        alike = len({(array.dtype, array.shape[1:], array.ndim) for array in arrays}) == 1
        if len(arrays) == 1:
            made[name] = arrays[0]
        elif alike:
            made[name] = np.concatenate([np.atleast_1d(array) for array in arrays])
        else:
            made |= {f"{name} {index}": array for index, array in enumerate(arrays)}
    return made


def apart(kept: list[Any], found: list[Any]) -> float:
    """How far two summaries are from each other, relative to the largest of their numbers."""
    if kept[0] != found[0] or len(kept) != len(found):
        return np.inf
    if kept[0] == "text":
        return 0.0 if kept == found else np.inf
    one, other = np.array(kept[1:], np.float64), np.array(found[1:], np.float64)
    largest, distance = np.abs(one).max(initial=0), np.abs(one - other).max(initial=0) - ABSOLUTE
    if distance <= 0:
        return 0.0
    return float(distance / largest) if largest else np.inf


def far(kept: dict[str, Any], numbers: dict[str, np.ndarray]) -> Iterator[str]:
    """What is not as kept: the array with both summaries."""
    numbers = joined(numbers)
    for name, summarized in kept["arrays"].items():
        tolerance = kept["tolerances"].get(name, TOLERANCE)
        if name not in numbers:
            yield f"{name}: kept {summarized}, and now there is none"
        elif (distance := apart(summarized, found := summary(numbers[name]))) > tolerance:
            yield f"{name}: kept {summarized}\n    found {found}\n    apart by {distance:.1e}, {tolerance:.1e} may be"
    for name in numbers.keys() - kept["arrays"].keys() - set(kept["rounding"]):
        yield f"{name}: found {summary(numbers[name])}, and none is kept"


def write(plain: Recorded, nudged: list[Recorded], plans: dict[str, int]) -> None:
    """Writes what was computed, and how far a nudge moves it where that is more than the tolerance.

    Args:
        plain: what some programs compute.
        nudged: the same after each nudge.
        plans: the numbers of all plans. The values of other programs stay.
    """
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    programs = {
        name: _kept(plain[name], [each[name] for each in nudged], plan) if name in plain else before[name]
        for name, plan in plans.items()
    }
    lines = [f'"versions": {json.dumps(versions())}']
    for name, kept in programs.items():
        arrays = ",\n".join(f" {_compact(key)}:{_compact(value)}" for key, value in kept["arrays"].items())
        rest = _compact({key: value for key, value in kept.items() if key != "arrays"})
        lines.append(f'{_compact(name)}:{rest[:-1]},"arrays":{{\n{arrays}}}}}')
    FILE.write_text("{" + ",\n".join(lines) + "}\n")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _kept(numbers: dict[str, np.ndarray], nudged: list[dict[str, np.ndarray]], plan: int) -> dict[str, Any]:
    numbers, nudged = joined(numbers), [joined(each) for each in nudged]
    kept: dict[str, Any] = {"plan": plan, "tolerances": {}, "rounding": [], "arrays": {}}
    for name, array in numbers.items():
        summarized = summary(array)
        moved = FACTOR * max(apart(summarized, summary(other[name])) for other in nudged)
        if moved > MOST:
            kept["rounding"].append(name)
            continue
        kept["arrays"][name] = summarized
        if moved > TOLERANCE:
            kept["tolerances"][name] = float(f"{moved:.1e}")
    return kept


def versions() -> dict[str, str]:
    """The versions of the libraries that numbers may depend on."""
    return {name: importlib.import_module(name).__version__ for name in LIBRARIES}
