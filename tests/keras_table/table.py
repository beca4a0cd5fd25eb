"""The lines of the table: what a program computes beside one device, and beside what it computed before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tests.baseline.compare import difference
from tests.baseline.record import RAISED

Numbers = dict[str, np.ndarray]

ONE_DEVICE_TOLERANCE = 1e-5
"""How far an element may be from that of one device, relative to the largest of its array: float32 has 6e-8."""
REPEATED_TOLERANCE = 1e-6
"""The same for kept values of a program whose runs differ."""
NOTHING = "nothing"
"""What a method raised that raised nothing."""


class Cell(NamedTuple):
    """One comparison.

    Attributes:
        text: what the table shows.
        alike: whether both compute the same.
        arrays: each difference in full.
    """

    text: str
    alike: bool
    arrays: tuple[str, ...] = ()


class Line(NamedTuple):
    """A program.

    Attributes:
        name: its name.
        before: what it computed before, beside one device.
        now: what it computes now, beside one device.
        change: what it computes now, beside before.
    """

    name: str
    before: Cell
    now: Cell
    change: Cell


def beside_one_device(device: Numbers, found: Numbers) -> Cell:
    """What replicas compute, beside one device; dtypes and warnings may differ."""
    if RAISED in found or RAISED in device:
        return Cell(f"is not made: {_error_class(found.get(RAISED, device.get(RAISED)))}", False)
    raised = {name: text for name, text in _raised(found).items() if text != _raised(device).get(name)}
    apart: dict[str, float] = {}
    arrays = [f"{name} raised {text}" for name, text in raised.items()]
    for name in device | found:
        kind = name.partition("/")[0]
        if kind in ("raised", "warnings") or (name not in found and raised):
            continue
        distance, values = _apart(device, found, name)
        apart[kind] = max(apart.get(kind, 0.0), distance)
        if distance > ONE_DEVICE_TOLERANCE:
            arrays.append(f"{name}: {values}")
    parts = [f"{name} raises {_error_class(text)}" for name, text in raised.items()]
    # What a method that raised was to make is not there: no size of a difference says anything then.
    shown = [kind for kind in apart if kind in ("losses", "metrics") or "fit" not in raised]
    parts += [f"{kind} {_size(apart[kind])}" for kind in shown if apart[kind] > ONE_DEVICE_TOLERANCE]
    if parts:
        return Cell(", ".join(parts), False, tuple(arrays))
    return Cell(f"agrees ({max(apart.values(), default=0.0):.1g})", True)


def beside_before(before: Numbers, now: Numbers, repeats: bool) -> Cell:
    """What a program computes now, beside what it computed before; if its runs `repeats`, each bit counts."""
    parts: dict[str, str] = {}
    apart: dict[str, float] = {}
    arrays, most = [], 0.0
    for name, distance, shown in _differences(before, now):
        most = max(most, distance)
        if not repeats and distance <= REPEATED_TOLERANCE:
            continue
        kind, _, rest = name.partition("/")
        arrays.append(f"{name}: {shown}")
        if kind == "raised":
            parts[name] = f"{rest} raises {' -> '.join(_error_class(of.get(name)) for of in (before, now))}"
        elif kind in ("warnings", RAISED):
            parts[name] = f"{kind}: {' -> '.join(str(of.get(name, '')) or NOTHING for of in (before, now))}"
        elif name in before and name in now:
            apart[kind] = max(apart.get(kind, 0.0), distance)
        else:
            parts[f"{kind} of one"] = f"{kind} {'gone' if name in before else 'new'}"
    texts = [*parts.values(), *(f"{kind} {_size(distance)}" for kind, distance in apart.items())]
    if texts:
        return Cell(", ".join(texts), False, tuple(arrays))
    return Cell("same bits" if most == 0 else f"as before ({most:.1g})", True)


def printed(lines: list[Line], values: bool) -> str:
    """The table; with `values`, each array that differs."""
    heads = ("program", "before, beside one device", "now, beside one device", "now, beside before")
    rows = [heads, *((line.name, line.before.text, _new(line), _marked(line.change)) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if values:
        for index, line in reversed([*enumerate(lines, 1)]):
            texts[index + 1 : index + 1] = [
                f"    {of}: {each}"
                for of, cell in (("one device", line.now), ("before", line.change))
                for each in cell.arrays
            ]
    before, now, changed = (
        sum(cells)
        for cells in zip(*((line.before.alike, line.now.alike, not line.change.alike) for line in lines), strict=True)
    )
    counts = f"of {len(lines)} programs {now} agree with one device, and {before} did before; {changed} have changed"
    return "\n".join([*texts, counts])


def _new(line: Line) -> str:
    return "the same" if line.now.text == line.before.text else line.now.text


def _marked(cell: Cell) -> str:
    return cell.text if cell.alike else f"CHANGED: {cell.text}"


def _differences(one: Numbers, other: Numbers) -> Iterator[tuple[str, float, str]]:
    for name in one | other:
        if name not in one or name not in other:
            yield name, np.inf, f"{'is gone' if name in one else 'is new'}: {(one | other)[name]!r:.200}"
        elif (found := difference(_with_one_nan(one[name]), _with_one_nan(other[name]))) is not None:
            yield name, *found


def _with_one_nan(array: np.ndarray) -> np.ndarray:
    """The array with NaNs of the same bits: a file does not keep their signs."""
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array) if array.dtype.kind == "f" else array


def _apart(device: Numbers, found: Numbers, name: str) -> tuple[float, str]:
    if name not in device or name not in found:
        return np.inf, "is only on one device" if name in device else "is not on one device"
    return difference(*(np.asarray(of[name]).astype("float64") for of in (device, found))) or (0.0, "")


def _raised(numbers: Numbers) -> dict[str, str]:
    return {name.partition("/")[2]: str(text) for name, text in numbers.items() if name.startswith("raised/")}


def _error_class(text: object) -> str:
    return NOTHING if text is None else str(text).partition(":")[0]


def _size(distance: float) -> str:
    return "NaN or shape" if np.isinf(distance) else f"{distance:.1g}"
