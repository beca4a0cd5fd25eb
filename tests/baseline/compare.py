"""Compares what two libraries compute, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tests.baseline.record import RAISED, Recorded


class Difference(NamedTuple):
    """Two arrays that are not the same, or a program that raised.

    Attributes:
        program: the name of the program.
        array: the name of the array.
        largest: the largest difference, relative to the largest value; infinite where values cannot be subtracted.
        shown: the two values that differ most, or what the arrays are.
        text: the text that the checkout has, if it is one.
    """

    program: str
    array: str
    largest: float
    shown: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.program}, {self.array}: {self.shown} (differ by {self.largest:.1e} of the largest)"


def differences(base: Recorded, now: Recorded) -> Iterator[Difference]:
    """All arrays whose bits, shapes or dtypes are not the same, or that only one has.

    What a program raised is a difference even if both raised the same: nothing of that program was compared.
    """
    for program in base | now:
        one, other = base.get(program, {}), now.get(program, {})
        for name in one | other:
            text = str(other[name]) if name in other and other[name].dtype.kind in "US" else ""
            if name not in one or name not in other:
                which = "base" if name in one else "checkout"
                shown = f"only the {which} has it: {(one | other)[name]!r:.300}"
                yield Difference(program, name, np.inf, shown, text)
            elif (found := difference(one[name], other[name])) is not None:
                yield Difference(program, name, *found, text)
            elif name == RAISED:
                yield Difference(program, name, np.inf, f"so nothing is compared: {text}", text)


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, str] | None:
    """The largest difference of two arrays with the values there; None if all bits are the same."""
    if (one.dtype.kind in "US") and one.dtype.kind == other.dtype.kind and one.shape == other.shape:
        return None if np.array_equal(one, other) else (np.inf, f"{one.tolist()!r}\n    is now {other.tolist()!r}")
    if one.dtype != other.dtype or one.shape != other.shape:
        return np.inf, f"{one.dtype}{list(one.shape)} is now {other.dtype}{list(other.shape)}"
    if one.tobytes() == other.tobytes():
        return None
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    left, right = one.astype(wide).reshape(-1), other.astype(wide).reshape(-1)
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(left - right), nan=np.inf, posinf=np.inf)
    apart[(np.isnan(left) & np.isnan(right)) | (left == right)] = 0
    place = int(np.argmax(apart))
    scale = np.nan_to_num(np.abs(left), nan=0, posinf=0).max(initial=0)
    relative = float(apart[place] / scale) if scale else float(apart[place])
    return relative, f"{left[place]:.9g} is now {right[place]:.9g}"
