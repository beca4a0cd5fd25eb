"""Decides when two numbers are the same, and lists the numbers that are not.

N replicas add the same numbers as one device, in another order. A compiled program computes `exp` or a matrix product
with other instructions. Both round differently. The allowed difference must be larger than rounding and smaller than a
mistake, which shows in the second or third digit. The rules:

- A tensor is compared as a whole: the largest difference of an element, relative to the *largest* element. An element
  near zero is the difference of larger numbers and has their rounding error.
- A weight is compared by its *change* in the step. Otherwise a learning rate of 1e-5 would hide every mistake in the
  digits that do not change.
- A gradient may be 0 but for the rounding of all others, such as that of a bias before a batch normalization. So the
  allowed difference of a gradient is at least a fiftieth of that of the largest gradient.
- A loss that has become almost zero is a sum of rounded squares, for example 7e-15 on one device and 0 on another. So
  the allowed difference of a loss, a metric or a result is at least the rounding of its largest value so far, and at
  least the square of one rounding.

Rounding does not grow from step to step, because each step of a strategy starts from the weights that one device has
reached (see `model` and `step`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from replica_engine.testing.parity.report import ONE_DEVICE, Compared, Difference
from replica_engine.values.structure import flatten

RTOL = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 8e-2, "float16": 2e-2}
"""By the coarsest dtype in the computation: for float32 about 1000 roundings, for float16 20, for bfloat16 10."""

EPSILON = {"float64": 2.3e-16, "float32": 1.2e-7, "bfloat16": 7.9e-3, "float16": 9.8e-4}
"""The relative rounding error of one operation, by dtype."""

OF_ALL_GRADIENTS = 0.02
"""The share of the tolerance that the largest gradient of the model gives to all gradients: in float32 17 roundings."""

_FINITE = ("prediction", "loss", "result", "weight")  # other numbers are infinite on purpose, such as masked scores

Arrays = Mapping[str, Any]
"""Arrays or numbers by name."""

Maker = Callable[..., Difference]
"""Makes a difference of the numbers at hand, from its size on."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers of one kind that a run computes at one point.

    Attributes:
        kind: see `Difference`.
        batch: a description of the batch.
        values: the numbers by name, in the order in which they are computed.
        step: the 1-based index of the training step; None outside the training steps.
        start: for weights: their values before the step.
    """

    kind: str
    batch: str
    values: Arrays
    step: int | None = None
    start: Arrays | None = None


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest difference that counts as rounding.

    Attributes:
        rtol: relative to the largest value of a tensor.
        atol: an absolute difference that is added.
        source: where `rtol` comes from, in words.
    """

    rtol: float
    atol: float
    source: str

    def __str__(self) -> str:
        where = "of a tensor's largest value (for a weight: of its largest change)"
        return f"{self.rtol:g} {where}" + (f" + {self.atol:g}" if self.atol else "") + f"; {self.source}"


def tolerance(dtypes: Sequence[str], rtol: float | None, atol: float) -> Tolerance:
    """Makes the tolerance of a check.

    Args:
        dtypes: the dtypes in the computation; the default depends on the coarsest.
        rtol: the user's relative tolerance, or None.
        atol: the user's absolute tolerance.
    """
    dtype = max((each for each in dtypes if each in RTOL), key=lambda each: RTOL[each], default="float32")
    if rtol is None:
        return Tolerance(RTOL[dtype], atol, f"the default for {dtype}, in which sums depend on their order")
    return Tolerance(rtol, atol, "as given")


Computed: TypeAlias = Sequence[Numbers]
"""All numbers of a run, in the order in which it computes them."""


def compare(
    expected: Computed, runs: Mapping[str, Computed], limits: Tolerance
) -> tuple[tuple[Compared, ...], tuple[Difference, ...]]:
    """Compares the runs of strategies with the run on one device.

    Args:
        expected: the numbers of one device.
        runs: for each strategy the same numbers; a run may have stopped early.
        limits: the tolerance.

    Returns:
        A summary with one row for each kind and strategy, and all differences, in the order of the numbers.
    """
    compared: dict[tuple[str, str], list[Difference]] = {}
    differences: list[Difference] = []
    largest: dict[tuple[str, str], float] = {}  # so far on one device, by kind and name
    for index, one in enumerate(expected):
        differences += _not_finite(one)
        for name, value in one.values.items():
            largest[one.kind, name] = max(largest.get((one.kind, name), 0.0), _largest(value))
        for strategy, numbers in runs.items():
            found = list(_pairs(strategy, one, numbers[index], largest, limits)) if index < len(numbers) else []
            compared.setdefault((one.kind, strategy), []).extend(found)
            differences += [each for each in found if not each.error <= each.allowed]
    rows = []
    for (kind, strategy), found in compared.items():
        if found:
            worst = max(found, key=lambda each: each.relative)
            differing = sum(not each.error <= each.allowed for each in found)
            rows.append(Compared(strategy, kind, len(found), differing, worst.relative, worst.name))
    return tuple(rows), tuple(differences)


def arrays_in(value: Any, name: str) -> dict[str, Any]:
    """The numbers in a structure, each with its path, which begins with `name`."""
    leaves, spec = flatten(value, name)
    return {path: _dense(leaf) for path, leaf in zip(spec.paths, leaves, strict=True) if leaf is not None}


def largest_of(values: Arrays) -> float:
    """The largest finite number of all tensors."""
    return max((_largest(value) for value in values.values()), default=0.0)


def _pairs(
    strategy: str, one: Numbers, other: Numbers, largest: Mapping[tuple[str, str], float], limits: Tolerance
) -> Iterator[Difference]:
    """Every pair of numbers of one name, whether they differ or not."""
    of_all = largest_of(one.values)
    for name in dict.fromkeys([*one.values, *other.values]):
        make = functools.partial(Difference, strategy, one.kind, name, one.batch, one.step)
        if name not in one.values or name not in other.values:
            has, lacks = (ONE_DEVICE, strategy) if name in one.values else (strategy, ONE_DEVICE)
            yield make(detail=f"{has} has it, but {lacks} does not")
            continue
        expected, found = np.asarray(one.values[name]), np.asarray(other.values[name])
        epsilon = EPSILON.get(expected.dtype.name, 0.0)
        scale, rounding = _largest(expected), 0.0
        if one.kind == "gradient":
            rounding = OF_ALL_GRADIENTS * limits.rtol * of_all
        elif one.kind == "weight":
            before = np.asarray((one.start or {}).get(name, 0))
            scale, rounding = _largest(_wide(expected) - _wide(before)), 8 * epsilon * scale
        elif one.kind in ("loss", "metric", "result"):
            rounding = epsilon * max(largest[one.kind, name], epsilon)
        yield _difference(make, expected, found, scale, limits.atol + limits.rtol * scale + rounding)


def _difference(make: Maker, expected: Any, found: Any, scale: float, allowed: float) -> Difference:
    if expected.shape != found.shape:
        return make(detail=f"shape {found.shape} instead of {expected.shape}")
    if not _is_number(expected) or not _is_number(found):
        return (
            make(error=0.0)
            if np.array_equal(expected, found)
            else make(detail="the values differ, and are not numbers")
        )
    one, other = _wide(expected), _wide(found)
    with np.errstate(invalid="ignore"):  # infinity minus infinity is invalid
        error = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    if not error.size:
        return make(error=0.0)
    error = np.where(np.isnan(error), np.inf, error)
    index = np.unravel_index(int(np.argmax(error)), error.shape)
    numbers = (float(array[index].real) for array in (one, other))
    return make(float(error[index]), scale or _largest(other), allowed, *numbers, tuple(int(i) for i in index))


def _not_finite(numbers: Numbers) -> Iterator[Difference]:
    for name, value in numbers.values.items() if numbers.kind in _FINITE else ():
        array = np.asarray(value)
        if _is_number(array) and not np.all(np.isfinite(_wide(array))):
            detail = "not finite on one device either, so there is nothing to compare with"
            yield Difference(ONE_DEVICE, numbers.kind, name, numbers.batch, numbers.step, detail=detail)


def _largest(value: Any) -> float:
    array = np.asarray(value)
    if not _is_number(array):
        return 0.0
    wide = np.abs(_wide(array))
    return float(np.max(wide, initial=0.0, where=np.isfinite(wide)))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "biufc" or array.dtype.name in RTOL  # NumPy gives bfloat16 the kind "V"


def _dense(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.to_tensor().numpy()
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(leaf).numpy()
    return np.asarray(tf.convert_to_tensor(leaf) if isinstance(leaf, tf.IndexedSlices) else leaf)
