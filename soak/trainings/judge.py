"""Whether the numbers of a training are right, and what is rounding.

Two things are asked for:

- **From run to run** in one process, from one seed, every number is bitwise the same.
- **One device's numbers**, within rounding. Replicas add up in another order, so the last digits differ. Most
  trainings agree within `TOLERANCES`. Where one does not, the question is how far rounding carries its numbers, and the
  training itself answers: one device trains again, from weights that differ by a unit in the last place. A difference
  is rounding if one device moves as far (`FACTOR` times, as there are only a few such trainings), array by array. So no
  layer, optimizer or metric is an exception by name. A training in float32 must then hold in float64 as well, where
  rounding is a billion times smaller and a fault is as large. Of a compiled strategy, one device whose step TensorFlow
  compiles with XLA may answer too: at an overflow, or at the length of a zero vector, XLA's formulas differ.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from soak.trainings.callbacks import Numbers
from soak.trainings.spec import COMPILED, Spec

TOLERANCES = {"float32": (1e-3, 1e-5), "float64": (1e-7, 1e-9)}  # relative and absolute, by dtype

PARTLY_FLOAT32 = (1e-5, 1e-7)
"""The tolerance of a training in float64 in which Keras computes something in float32."""

FACTOR = 100
NUDGES = 3

RUNS, DEVICE, RAISES = "from run to run", "one device", "raises"

Train = Callable[..., Numbers]
"""`run.trained`, or what a test has in its place."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a training."""

    problem: str | None = None  # None, or what is wrong: `RUNS`, `DEVICE`, or `RAISES` and the name of an exception
    details: str = ""  # the first differences, or the traceback
    # whether numbers differ from one device's by more than the tolerance, which was found to be rounding
    rounding: bool = False
    refused: bool = False  # whether one device raises too, so that the spec is no training


def judged(spec: Spec, train: Train, repeats: int = 3) -> Verdict:
    """Trains a spec on one device, then `repeats` times on its strategy, and compares."""
    try:
        device = train(spec, one_device=True)
    except Exception as error:
        return Verdict(details=_last_line(error), refused=True)
    try:
        first = train(spec)
        for run in range(2, repeats + 1):
            again = train(spec)
            if names := unequal(first, again):
                return Verdict(RUNS, f"run {run} differs from run 1 in {len(names)}: {_shown(names, first, again)}")
    except Exception as error:
        return Verdict(f"{RAISES} {type(error).__name__}", _last_line(error))
    return against_device(spec, train, device, first) if spec.comparable else Verdict()


def keras_differs(spec: Spec, train: Train, repeats: int) -> bool:
    """Whether plain Keras differs from run to run too, so that no strategy can do better."""
    first = train(spec, one_device=True)
    return any(unequal(first, train(spec, one_device=True)) for _ in range(repeats))


def unequal(one: Numbers, other: Numbers) -> list[str]:
    """The names of numbers that are not bitwise the same."""
    return [name for name in one | other if not _both(name, one, other) or one[name].tobytes() != other[name].tobytes()]


def against_device(spec: Spec, train: Train, device: Numbers, numbers: Numbers) -> Verdict:
    """Compares with one device's numbers, and tells rounding from faults."""
    names = far(device, numbers, tolerance(spec))
    if not names:
        return Verdict()
    if spec.strategy == COMPILED and _are_xlas(numbers, spec, train):
        return Verdict(rounding=True)
    nudged = [train(spec, one_device=True, nudge=seed) for seed in range(NUDGES)]
    moved = {name: max(_distance(name, device, each) for each in nudged) for name in device | numbers}
    for name in (name for name in device if " weight " in name):
        # Nothing can be compared: the direction of a vector of length 0, say, whose gradient is divided by the length.
        # A weight that is 0, and stays what `nudged` made of it, says nothing of the others.
        least = FACTOR * np.finfo(spec.dtype).eps
        if moved[name] > least + 0.01 * np.abs(device[name].astype("float64")).max(initial=0):
            return Verdict(details=f"a unit in the last place moves {name} of one device by more than 1%", refused=True)
    names = [name for name in names if _distance(name, device, numbers) > FACTOR * moved[name]]
    if names:
        return Verdict(DEVICE, f"{spec.dtype}: {len(names)} differ: {_shown(names, device, numbers)}")
    if spec.dtype == "float64":
        return Verdict(rounding=True)
    verdict = judged(dataclasses.replace(spec, dtype="float64"), train, repeats=1)
    # A few ops of plain Keras take float32 only: then its own movement is what there is to go by.
    return dataclasses.replace(verdict, rounding=True, refused=False)


def tolerance(spec: Spec) -> tuple[float, float]:
    """The tolerance of a training: relative and absolute."""
    # `Resizing` is bilinear where it does not say.
    bilinear = any(
        part.options.get("interpolation", "bilinear" if part.name == "Resizing" else "") == "bilinear"
        for part in spec.body
    )
    return PARTLY_FLOAT32 if spec.dtype == "float64" and bilinear else TOLERANCES[spec.dtype]


def far(one: Numbers, other: Numbers, within: tuple[float, float]) -> list[str]:
    """The names of numbers that are not within a tolerance, relative and absolute."""
    return [
        name
        for name in one | other
        if not _both(name, one, other) or not np.allclose(one[name], other[name], *within, equal_nan=True)
    ]


def _both(name: str, one: Numbers, other: Numbers) -> bool:
    """Whether both have this number, in one shape."""
    return name in one and name in other and one[name].shape == other[name].shape


def _are_xlas(numbers: Numbers, spec: Spec, train: Train) -> bool:
    """Whether one device has these numbers when TensorFlow compiles its step with XLA."""
    try:
        return not far(train(spec, one_device=True, compiled=True), numbers, tolerance(spec))
    except (tf.errors.OpError, TypeError, ValueError):
        return False  # TensorFlow cannot compile the step: of words, for example


def _distance(name: str, one: Numbers, other: Numbers) -> float:
    """The largest difference of two arrays; infinity if it cannot be said."""
    if not _both(name, one, other):
        return np.inf
    first, second = one[name].astype("float64"), other[name].astype("float64")
    difference = np.where(np.isnan(first) & np.isnan(second), 0, np.abs(first - second))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))


def _shown(names: list[str], one: Numbers, other: Numbers) -> str:
    """The first names, each with the two values that differ most."""
    parts = []
    for name in names[:4]:
        if name not in one or name not in other:
            parts.append(f"{name}: only in {'one' if name in one else 'the other'}")
        elif one[name].shape != other[name].shape:
            parts.append(f"{name}: {one[name].shape} and {other[name].shape}")
        else:
            differences = np.abs(one[name].astype("float64") - other[name].astype("float64"))
            index = np.unravel_index(np.argmax(differences), differences.shape)
            parts.append(f"{name}: {one[name][index]!r} and {other[name][index]!r}")
    return "; ".join(parts)


def _last_line(error: Exception) -> str:
    """The type of an exception with the telling part of its text: that of a graph ends with it, after a traceback."""
    text = str(error)
    if "Detected at node" in text:
        text = text.split("\n\n")[-1]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(text[:600].split())} ({frame.filename}:{frame.lineno})"
