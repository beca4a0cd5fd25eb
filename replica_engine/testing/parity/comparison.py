"""Decides when two numbers are the same, and lists the numbers that are not.

N replicas add the same numbers as one device, in another order. A compiled program computes `exp` or a matrix product
with other instructions. Both round differently. The allowed difference must be larger than rounding and smaller than a
mistake, which shows in the second or third digit. The rules:

- A tensor is compared as a whole: the largest difference of an element, relative to the *largest* element. An element
  near zero is the difference of larger numbers and has their rounding error.
- A weight is compared by its *change* since the start. Otherwise a learning rate of 1e-5 would hide every mistake in
  the digits that do not change.
- A loss that has become almost zero is a sum of rounded squares, for example 7e-15 on one device and 0 on another. So
  the allowed difference of a loss or a metric is at least the rounding of its largest value so far, and at least the
  square of one rounding.
- Rounding may be amplified. A bias before a batch normalization has a gradient of exactly 0, which rounding turns into
  1e-9, and Adam divides that by its own size. So the check measures the effect of rounding on one device: it runs the
  same batches with their samples in another order and the last digits of the weights changed, and allows `NOISE` times
  the difference that this makes. For a gradient, this allowance is at most 1e-5 of the largest gradient in the model,
  so that it cannot hide a mistake in a gradient.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.testing.parity.report import ONE_DEVICE, Compared, Difference
from replica_engine.values.structure import flatten

NOISE = 10
"""The allowed multiple of the rounding that was measured on one device."""

ORDERS = 3
"""How many times one device runs with another order of samples and other last digits."""

_LAST_DIGITS = 4
"""The largest change of a weight in such a run, in units in the last place."""

CAP = 1e-5
"""The largest measured rounding that counts for a gradient, relative to the largest gradient of all variables."""

RTOL = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 8e-2, "float16": 2e-2}
"""By the coarsest dtype in the computation: for float32 about 1000 roundings, for float16 20, for bfloat16 10."""

EPSILON = {"float64": 2.3e-16, "float32": 1.2e-7, "bfloat16": 7.9e-3, "float16": 9.8e-4}
"""The relative rounding error of one operation, by dtype."""

KINDS = ("layer output", "prediction", "loss", "gradient", "metric", "result", "weight")
"""The kinds of numbers, in the order in which a step computes them."""

Arrays = Mapping[str, Any]
"""Arrays or numbers by name."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest difference that counts as rounding.

    Attributes:
        rtol: relative to the largest value of a tensor.
        atol: an absolute difference that is added.
        dtype: the coarsest dtype in the computation; the default tolerance depends on it.
        given: whether the user chose `rtol`.
    """

    rtol: float
    atol: float
    dtype: str
    given: bool

    def __str__(self) -> str:
        where = "of a tensor's largest value (for a weight: of its largest change)"
        source = "as given" if self.given else f"the default for {self.dtype}, in which sums depend on their order"
        return f"{self.rtol:g} {where}" + (f" + {self.atol:g}" if self.atol else "") + f"; {source}"


def tolerance(dtype: str, rtol: float | None, atol: float | None) -> Tolerance:
    """Makes the tolerance of a check.

    Args:
        dtype: the coarsest dtype in the computation.
        rtol: the user's relative tolerance, or None.
        atol: the user's absolute tolerance, or None.
    """
    return Tolerance(RTOL[dtype] if rtol is None else rtol, atol or 0.0, dtype, rtol is not None)


class _Verdict(enum.Enum):
    EQUAL = "within the tolerance"
    AMPLIFIED = "within the effect of rounding on one device"
    DIFFERENT = "different"


class Comparison:
    """Compares strategies with one device, and keeps the results.

    Args:
        tolerance: the largest difference that counts as rounding.
    """

    def __init__(self, tolerance: Tolerance):
        self._tolerance = tolerance
        self._rows: dict[tuple[str, str], list[tuple[Difference, _Verdict]]] = {}
        self._found: list[tuple[tuple[int, int], Difference]] = []
        self._largest: dict[tuple[str, str], float] = {}  # of one device: for losses and metrics, by kind and name

    def compare(
        self,
        strategy: str,
        kind: str,
        batch: str,
        expected: Arrays,
        found: Arrays,
        *,
        step: int | None = None,
        noise: Mapping[str, float] | None = None,
        start: Arrays | None = None,
    ) -> None:
        """Compares tensors of one kind, in the order of `expected`.

        Args:
            strategy: the name of the strategy.
            kind: see `Difference`.
            batch: a description of the batch.
            expected: the tensors of one device.
            found: the tensors of the strategy.
            step: the index of the training step.
            noise: the rounding of each tensor, as measured on one device.
            start: for weights: their values before the first step.
        """
        largest = max((_largest(value) for value in expected.values()), default=0.0)
        for name in [*expected, *(name for name in found if name not in expected)]:
            if name not in expected or name not in found:
                has, lacks = (ONE_DEVICE, strategy) if name in expected else (strategy, ONE_DEVICE)
                difference = _unlike(strategy, kind, name, batch, step, f"{has} has it, but {lacks} does not")
                self._note(difference, _Verdict.DIFFERENT)
                continue
            before = None if start is None else start.get(name)
            measured = 0.0 if noise is None else NOISE * noise.get(name, 0.0)
            if kind == "gradient":
                measured = min(measured, CAP * largest)
            difference, verdict = self._one(
                strategy, kind, name, batch, step, expected[name], found[name], before, measured, largest
            )
            self._note(difference, verdict)

    def not_finite(self, kind: str, batch: str, values: Arrays, step: int | None = None) -> bool:
        """Notes values of one device that are not finite and so cannot be compared; returns whether there are any."""
        bad = [name for name, value in values.items() if not _is_finite(value)]
        for name in bad:
            detail = "not finite on one device either, so there is nothing to compare with"
            difference = _unlike(ONE_DEVICE, kind, name, batch, step, detail)
            self._found.append((_rank(difference), difference))
        return bool(bad)

    def rows(self) -> tuple[Compared, ...]:
        """A summary of all comparisons, one row per strategy and kind."""
        made = []
        for (strategy, kind), each in sorted(self._rows.items(), key=lambda item: KINDS.index(item[0][1])):
            verdicts = [verdict for _, verdict in each]
            counted = [difference for difference, verdict in each if verdict is not _Verdict.AMPLIFIED]
            worst = max(counted, key=lambda difference: difference.relative, default=None)
            made.append(
                Compared(
                    strategy,
                    kind,
                    len(each),
                    verdicts.count(_Verdict.DIFFERENT),
                    verdicts.count(_Verdict.AMPLIFIED),
                    worst.relative if worst else 0.0,
                    worst.name if worst else "",
                )
            )
        return tuple(made)

    def differences(self) -> tuple[Difference, ...]:
        """All differences, in the order in which a step computes them."""
        return tuple(difference for _, difference in sorted(self._found, key=lambda item: item[0]))

    def _note(self, difference: Difference, verdict: _Verdict) -> None:
        self._rows.setdefault((difference.strategy, difference.kind), []).append((difference, verdict))
        if verdict is _Verdict.DIFFERENT:
            self._found.append((_rank(difference), difference))

    def _one(
        self,
        strategy: str,
        kind: str,
        name: str,
        batch: str,
        step: int | None,
        expected: Any,
        found: Any,
        before: Any,
        measured: float,
        largest: float,
    ) -> tuple[Difference, _Verdict]:
        one, other = np.asarray(expected), np.asarray(found)
        if one.shape != other.shape:
            detail = f"shape {other.shape} instead of {one.shape}"
            return _unlike(strategy, kind, name, batch, step, detail), _Verdict.DIFFERENT
        if one.size == 0:
            return Difference(strategy, kind, name, batch, step, 0.0, 0.0, 0.0, 0.0, 0.0), _Verdict.EQUAL
        if not _is_number(one) or not _is_number(other):
            is_equal = bool(np.array_equal(one, other))
            difference = _unlike(strategy, kind, name, batch, step, "the values differ, and are not numbers")
            if is_equal:
                return dataclasses.replace(difference, error=0.0), _Verdict.EQUAL
            return difference, _Verdict.DIFFERENT
        one, other = _wide(one), _wide(other)
        with np.errstate(invalid="ignore"):  # infinity minus infinity is invalid
            error = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
        error = np.where(np.isnan(error), np.inf, error)
        index = np.unravel_index(int(np.argmax(error)), error.shape)
        scale, epsilon = _largest(one), EPSILON.get(np.asarray(expected).dtype.name, 0.0)
        rounding = epsilon * largest if kind == "gradient" else 0.0
        if kind in ("loss", "metric", "result"):
            seen = self._largest[kind, name] = max(self._largest.get((kind, name), epsilon), scale)
            rounding = epsilon * seen
        if before is not None:
            scale = _largest(one - _wide(np.asarray(before)))
            rounding = 8 * epsilon * _largest(one)
        strict = self._tolerance.atol + self._tolerance.rtol * scale + rounding
        allowed = max(strict, measured)
        difference = Difference(
            strategy,
            kind,
            name,
            batch,
            step,
            float(error[index]),
            scale or _largest(other),
            allowed,
            float(one[index]),
            float(other[index]),
            tuple(int(i) for i in index),
        )
        if difference.error <= strict:
            return difference, _Verdict.EQUAL
        return difference, _Verdict.AMPLIFIED if difference.error <= allowed else _Verdict.DIFFERENT


def noise(expected: Arrays, others: Sequence[Arrays]) -> dict[str, float]:
    """For each tensor, its largest difference from `others`, which differ from it only by rounding."""
    return {
        name: max((_distance(value, other[name]) for other in others if name in other), default=0.0)
        for name, value in expected.items()
    }


def arrays_in(value: Any, name: str) -> dict[str, Any]:
    """The numbers in a structure, each with its path, which begins with `name`."""
    leaves, spec = flatten(value, name)
    return {path: _dense(leaf) for path, leaf in zip(spec.paths, leaves, strict=True) if leaf is not None}


def _dense(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.to_tensor().numpy()
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(leaf).numpy()
    return np.asarray(tf.convert_to_tensor(leaf) if isinstance(leaf, tf.IndexedSlices) else leaf)


def changed_in_last_digits(value: np.ndarray, seed: int) -> np.ndarray:
    """Changes the last digits of an array of floating-point numbers; returns any other array unchanged."""
    epsilon = EPSILON.get(value.dtype.name)
    if epsilon is None:
        return value
    change = np.random.default_rng(seed).uniform(-_LAST_DIGITS, _LAST_DIGITS, value.shape) * epsilon
    return (_wide(value) * (1 + change)).astype(value.dtype)


def is_within(expected: Arrays, other: Arrays, rtol: float) -> bool:
    """Whether all tensors are equal up to `rtol` times the largest element of all tensors."""
    largest = max((_largest(value) for value in expected.values()), default=0.0)
    return all(name in other and _distance(value, other[name]) <= rtol * largest for name, value in expected.items())


def _distance(one: Any, other: Any) -> float:
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.size == 0 or not _is_number(one):
        return 0.0
    distance = float(np.max(np.abs(_wide(one) - _wide(other))))
    return distance if math.isfinite(distance) else 0.0


def _largest(value: Any) -> float:
    array = np.asarray(value)
    if array.size == 0 or not _is_number(array):
        return 0.0
    wide = np.abs(_wide(array))
    finite = wide[np.isfinite(wide)]
    return float(np.max(finite)) if finite.size else 0.0


def _is_finite(value: Any) -> bool:
    array = np.asarray(value)
    return not _is_number(array) or bool(np.all(np.isfinite(_wide(array))))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "biufc" or array.dtype.name in RTOL  # NumPy gives bfloat16 the kind "V"


def _unlike(strategy: str, kind: str, name: str, batch: str, step: int | None, detail: str) -> Difference:
    nan = float("nan")
    return Difference(strategy, kind, name, batch, step, float("inf"), 0.0, 0.0, nan, nan, (), detail)


def _rank(difference: Difference) -> tuple[int, int]:
    """The order of a step: outputs of layers and predictions come first, then the loss, and the weights last."""
    return difference.step or 0, KINDS.index(difference.kind)
