"""The comparison of a parity check: which numbers count as the same, and the report of those that differ.

N replicas add the same numbers as one device, in another order. A compiled program computes `exp` or a matrix product
with other instructions. Both round differently. The allowed difference must be larger than rounding and smaller than a
mistake, which shows in the second or third digit:

- A tensor is compared as a whole: the largest difference of an element, relative to the *largest* element. An element
  near zero is the difference of larger numbers and has their rounding error.
- A weight is compared by its *change* in the step. The change may be nothing but rounding, as that of a bias before a
  batch normalization. So it counts as at least a fiftieth of the largest change in the model.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from replica_engine.errors import ParityError

# By the coarsest dtype in the computation: for float32 about 1000 roundings, for float16 20, for bfloat16 10.
RTOL = {"float64": 1e-8, "float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}
_ROUNDING = {"float64": 2.3e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.9e-3}
_OF_ALL_CHANGES = 0.02  # of the largest change: in float32, the tolerance is then 17 of its roundings
_FINITE = ("prediction", "loss", "weight")  # other numbers are infinite on purpose, such as masked scores


class Numbers(NamedTuple):
    """Numbers of one kind that a run computes at one point.

    Attributes:
        kind: see `Difference`.
        batch: a description of the batch.
        values: arrays and numbers by name, in the order in which they are computed.
        step: the 1-based index of the training step; None outside the training steps.
        start: for weights: their values before the step.
    """

    kind: str
    batch: str
    values: Mapping[str, np.ndarray | float]
    step: int | None = None
    start: Mapping[str, np.ndarray | float] | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor or number under a strategy, and how far it is from that of one device.

    Attributes:
        strategy: the name of the strategy, such as "MirroredStrategy".
        kind: "layer output", "prediction", "loss", "metric" or "weight".
        name: the name of the layer, variable, loss or metric.
        batch: a description of the batch.
        step: the 1-based index of the training step; None outside the training steps.
        error: the largest absolute difference of an element; infinity if shapes differ, or if one of the two values is
            not a number.
        scale: the size that the tolerance is relative to: the largest value of the tensor; for a weight, its largest
            change in the step, or a fiftieth of the largest change in the model.
        allowed: the largest error that counts as rounding.
        expected: the element with the largest difference, on one device.
        found: the same element on replicas.
        index: the position of that element in the tensor.
        detail: further information, such as two shapes.
    """

    strategy: str
    kind: str
    name: str
    batch: str
    step: int | None
    error: float = math.inf
    scale: float = 0.0
    allowed: float = 0.0
    expected: float = math.nan
    found: float = math.nan
    index: tuple[int, ...] = ()
    detail: str = ""

    @property
    def differs(self) -> bool:
        """Whether the error is more than rounding."""
        return not self.error <= self.allowed

    @property
    def relative(self) -> float:
        """The error relative to `scale`."""
        return self.error / self.scale if self.scale else (math.inf if self.error else 0.0)

    def __str__(self) -> str:
        place = f" at {list(self.index)}" if self.index else ""
        numbers = f"{self.found:.7g} instead of {self.expected:.7g}{place}; off by {self.error:.1e}, "
        numbers += f"{self.relative:.1e} of {self.scale:.1e} (allowed {self.allowed:.1e})"
        return f"{self.kind} {self.name!r}, {self.batch}: {self.detail or numbers}"


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The results of `check_parity`. `print(report)` shows a table.

    Attributes:
        subject: what was checked, in words.
        replicas: the number of replicas.
        strategies: the names of the strategies that were compared with one device.
        left_out: strategies that could not run, with the reason.
        batches: the number of rows of each training batch.
        tolerance: the tolerance in words.
        compared: all that was compared, in the order in which a run computes it.
    """

    subject: str
    replicas: int
    strategies: tuple[str, ...]
    left_out: Mapping[str, str]
    batches: tuple[int, ...]
    tolerance: str
    compared: tuple[Difference, ...]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What differs by more than the tolerance."""
        return tuple(each for each in self.compared if each.differs)

    @property
    def ok(self) -> bool:
        """Whether all compared numbers agree."""
        return not self.differences

    @property
    def first(self) -> Mapping[str, Difference]:
        """For each strategy that differs, its first difference."""
        return {each.strategy: each for each in reversed(self.differences)}

    def first_of(self, kind: str, strategy: str | None = None) -> Difference | None:
        """The first difference of a kind, under one strategy or under any; None without such a difference."""
        return next((one for one in self.differences if one.kind == kind and strategy in (None, one.strategy)), None)

    def raise_if_different(self) -> None:
        """Raises ParityError if any number differs.

        Raises:
            ParityError: an AssertionError, with this report as its text.
        """
        if not self.ok:
            raise ParityError(str(self))

    def __str__(self) -> str:
        verdict = "the same numbers as" if self.ok else "DIFFERENT numbers, compared with"
        lines = [
            f"{self.subject}: {self.replicas} replicas compute {verdict} one device",
            f"  batches    {', '.join(map(str, self.batches))} rows, each from the same weights",
            f"  tolerance  {self.tolerance}",
            *(f"  left out   {name}: {why}" for name, why in self.left_out.items()),
        ]
        for strategy in self.strategies:
            lines += ["", f"{strategy}:"]
            for kind in dict.fromkeys(each.kind for each in self.compared):
                every = [each for each in self.compared if (each.kind, each.strategy) == (kind, strategy)]
                wrong, worst = [each for each in every if each.differs], max(each.relative for each in every)
                lines.append(f"  {kind}: {len(every)} compared, {len(wrong)} differ, by {worst:.1e} at most")
                lines += [f"    first {wrong[0]}"] if wrong else []
        wrapper = textwrap.TextWrapper(110, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(wrapper.fill(line) for line in lines)


def compare(
    strategy: str, expected: Sequence[Numbers], found: Sequence[Numbers], rtol: float, atol: float
) -> Iterator[Difference]:
    """Compares the run of a strategy with the run on one device.

    Args:
        strategy: its name.
        expected: the numbers of one device.
        found: the same numbers of the strategy.
        rtol: the tolerance relative to the largest value of a tensor, or to its largest change if it is a weight.
        atol: the absolute tolerance, which is added.
    """
    for one, other in zip(expected, found, strict=True):
        start, arrays = one.start or {}, {name: np.asarray(value) for name, value in one.values.items()}
        scales = {name: _largest(_wide(a) - _wide(start.get(name, 0))) for name, a in arrays.items() if _is_number(a)}
        of_all = _OF_ALL_CHANGES * max(scales.values(), default=0.0) if start else 0.0
        for name, array in arrays.items():
            same = np.asarray(other.values.get(name))
            place = (strategy, one.kind, name, one.batch, one.step)
            if array.shape != same.shape or not _is_number(array):
                error = 0.0 if np.array_equal(array, same) else math.inf
                yield Difference(*place, error, detail=f"{same.dtype}{same.shape}, not {array.dtype}{array.shape}")
            elif array.size:
                a, b = _wide(array), _wide(same)
                with np.errstate(invalid="ignore"):  # infinity minus infinity is invalid
                    alike = (a == b) | (np.isnan(a) & np.isnan(b))
                    errors = np.where(alike & (np.isfinite(a) | (one.kind not in _FINITE)), 0.0, np.abs(a - b))
                errors = np.where(np.isnan(errors), np.inf, errors)
                at = np.unravel_index(int(np.argmax(errors)), errors.shape)
                rounding = 8 * _ROUNDING.get(array.dtype.name, 0.0) * _largest(a) if start else 0.0
                scale = max(scales[name], of_all)
                allowed, scale = atol + rtol * scale + rounding, scale or _largest(b)
                numbers = float(errors[at]), scale, allowed, float(a[at].real), float(b[at].real)
                yield Difference(*place, *numbers, tuple(map(int, at)))


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "biufc" or array.dtype.name in RTOL  # NumPy gives bfloat16 the kind "V"


def _wide(array: np.ndarray | float) -> np.ndarray:
    array = np.asarray(array)
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


def _largest(wide: np.ndarray) -> float:
    """The largest finite element."""
    return float(np.max(np.abs(wide), initial=0.0, where=np.isfinite(wide)))
