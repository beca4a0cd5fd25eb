"""The results of a parity check: as data, and as a table to read."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping

from replica_engine.errors import ParityError

ONE_DEVICE = "one device"
_WIDTH = 110
_PLURAL = {"loss": "losses"}
_SHOWN = 4  # the largest number of differences to show for one strategy


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor or number that differs by more than the tolerance.

    Attributes:
        strategy: the strategy that computed it, such as "MirroredStrategy"; "one device" if the reference value is not
            finite.
        kind: "layer output", "prediction", "loss", "gradient", "metric", "weight" or "result".
        name: the name of the layer, variable, loss or metric.
        batch: a description of the batch.
        step: the 1-based index of the training step; None outside the training steps.
        error: the largest absolute difference of an element; infinity if shapes differ, or if one of the two values is
            not a number.
        scale: the size that the tolerance is relative to: the largest value of the tensor; for a weight, its largest
            change in the step.
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
    def relative(self) -> float:
        """The error relative to `scale`."""
        return self.error / self.scale if self.scale else (math.inf if self.error else 0.0)

    def __str__(self) -> str:
        what = f"{self.kind} {self.name!r}, {self.batch}: "
        if self.detail:
            return what + self.detail
        place = f" at {list(self.index)}" if self.index else ""
        return (
            f"{what}{self.found:.7g} instead of {self.expected:.7g}{place}; off by {self.error:.1e}, "
            f"{self.relative:.1e} of {self.scale:.1e} (allowed {self.allowed:.1e})"
        )


@dataclasses.dataclass(frozen=True)
class Cause:
    """A known cause of differences that was found in the model or step.

    Attributes:
        kind: "batch normalization", "random numbers", "loss", "metric", "scaled by replicas", "not combined" or
            "unequal shares".
        name: the name of the layer, loss, metric or variable.
        why: why one device and replicas then differ.
        remedy: what to write instead.
    """

    kind: str
    name: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why} {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Compared:
    """All comparisons of one kind under one strategy.

    Attributes:
        strategy: the name of the strategy.
        kind: the kind of the compared numbers; see `Difference`.
        count: the number of compared tensors or numbers.
        differing: how many of them differ by more than is allowed.
        worst: the largest relative error.
        worst_name: the name of the tensor or number with that error.
    """

    strategy: str
    kind: str
    count: int
    differing: int
    worst: float
    worst_name: str


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The results of `check_parity`. `print(report)` shows a table.

    Attributes:
        subject: what was checked, in words.
        replicas: the number of replicas.
        strategies: the names of the strategies that were compared with one device.
        left_out: strategies and comparisons that could not be made, with the reason.
        batches: the number of rows of each training batch.
        tolerance: the tolerance in words.
        compared: a summary of the comparisons, one row per strategy and kind.
        differences: all differences beyond the tolerance, in the order in which a step computes them.
        causes: the known causes that were found; empty if nothing differs.
        notes: further information for the reader.
        seed: the seed of the random numbers.
    """

    subject: str
    replicas: int
    strategies: tuple[str, ...]
    left_out: Mapping[str, str]
    batches: tuple[int, ...]
    tolerance: str
    compared: tuple[Compared, ...]
    differences: tuple[Difference, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    seed: int

    @property
    def ok(self) -> bool:
        """Whether all compared numbers agree."""
        return not self.differences

    @property
    def first(self) -> Mapping[str, Difference]:
        """For each strategy that differs, its first difference."""
        found: dict[str, Difference] = {}
        for difference in self.differences:
            found.setdefault(difference.strategy, difference)
        return found

    def first_of(self, kind: str, strategy: str | None = None) -> Difference | None:
        """The first difference of a kind, under one strategy or under any; None without such a difference."""
        for difference in self.differences:
            if difference.kind == kind and strategy in (None, difference.strategy):
                return difference
        return None

    def raise_if_different(self) -> None:
        """Raises ParityError if any number differs.

        Raises:
            ParityError: an AssertionError, with this report as its text.
        """
        if not self.ok:
            raise ParityError(str(self))

    def __str__(self) -> str:
        verdict = "the same numbers" if self.ok else "DIFFERENT numbers"
        lines = [
            f"{self.subject}: {self.replicas} replicas compute {verdict}"
            f"{' as' if self.ok else ', compared with'} one device",
            *_wrapped("  batches    ", f"{', '.join(map(str, self.batches))} rows; same weights, seed {self.seed}"),
            *_wrapped("  tolerance  ", self.tolerance),
            *(line for name, why in self.left_out.items() for line in _wrapped("  left out   ", f"{name}: {why}")),
            "",
            *self._table(),
        ]
        for strategy in dict.fromkeys(each.strategy for each in self.differences):
            lines += ["", f"First differences under {strategy}:"]
            lines += [line for each in self._leading(strategy) for line in _wrapped("  - ", str(each))]
        if self.causes:
            lines += ["", "Known causes found:"]
            lines += [line for cause in self.causes for line in _wrapped("  - ", str(cause))]
        elif self.differences:
            lines += ["", "None of the known causes was found. Start at the first difference above."]
        if self.notes:
            lines += ["", *(line for note in self.notes for line in _wrapped("Note: ", note))]
        return "\n".join(lines)

    def _leading(self, strategy: str) -> list[Difference]:
        """The first difference of each kind."""
        kinds: dict[str, Difference] = {}
        for each in self.differences:
            if each.strategy == strategy:
                kinds.setdefault(each.kind, each)
        return list(kinds.values())[:_SHOWN]

    def _table(self) -> list[str]:
        kinds = list(dict.fromkeys(row.kind for row in self.compared))
        header = ["largest relative difference of", "compared", *self.strategies]
        rows = [header]
        for kind in kinds:
            cells = {row.strategy: row for row in self.compared if row.kind == kind}
            count = max(row.count for row in cells.values())
            rows.append(
                [_PLURAL.get(kind, f"{kind}s"), str(count), *(_cell(cells.get(name)) for name in self.strategies)]
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        rows.insert(1, ["-" * width for width in widths])
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(row: Compared | None) -> str:
    if row is None:
        return "not compared"
    return f"{row.worst:.1e} {row.differing} DIFFER" if row.differing else f"{row.worst:.1e}"


def _wrapped(prefix: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    )
