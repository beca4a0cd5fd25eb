"""The results of a benchmark: rows of interleaved figures, and the ratio to each peer.

A row has one figure per repeat for each contender. The first contender is the one that the row measures; the others are
its peers. Within a repeat the contenders run directly one after another, so a change of the machine's speed affects all
of them. The ratio to a peer is the median over repeats of the ratio within a repeat.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T, Name, Figure = TypeVar("T"), TypeVar("Name"), TypeVar("Figure")


class WrongResult(Exception):
    """Contenders have different results, so their times cannot be compared."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row beside one of its peers."""

    peer: str  # the name of the peer
    ratios: list[float]  # for each repeat, the figure of the row divided by that of the peer
    target: float | None  # the largest ratio that meets the target; None without a target

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without a target."""
        return None if self.target is None else self.ratio <= self.target


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that was measured."""

    group: str  # the benchmark to which the row belongs
    name: str  # the name of the measured operation
    # by contender, one figure per repeat. The row measures the first contender; the others are its peers.
    figures: dict[str, list[float]]
    unit: str = "ms"  # the unit of the figures
    replicas: int | None = None  # the number of replicas; None if it does not apply
    # by peer, the largest ratio that meets the target
    targets: dict[str, float] = dataclasses.field(default_factory=dict)
    check: str = ""  # the results that were compared and found equal before the timing
    note: str = ""  # further information
    axis: str = ""  # for a point of a plot, the varied quantity
    at: float | None = None  # the position of the point on that axis

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: figures are missing, contenders have different numbers of figures, or a target has no peer.
        """
        repeats = {len(figures) for figures in self.figures.values()}
        if len(repeats) != 1 or 0 in repeats:
            raise ValueError(f"{self.title}: contenders need equally many figures, at least one: {self.figures}")
        if unknown := self.targets.keys() - self.peers.keys():
            raise ValueError(f"{self.title}: there are targets for {sorted(unknown)}, but no figures")

    @property
    def title(self) -> str:
        """The name, with the position on the axis."""
        return self.name if self.at is None else f"{self.name}, {self.at:,.0f} {self.axis}"

    @property
    def contender(self) -> str:
        """The contender that the row measures."""
        return next(iter(self.figures))

    @property
    def ours(self) -> list[float]:
        """The figures of that contender."""
        return self.figures[self.contender]

    @property
    def peers(self) -> dict[str, list[float]]:
        """The figures of the peers."""
        return {name: figures for name, figures in self.figures.items() if name != self.contender}

    @property
    def comparisons(self) -> list[Comparison]:
        """A comparison with each peer."""
        return [
            Comparison(peer, [mine / its for mine, its in zip(self.ours, figures, strict=True)], self.targets.get(peer))
            for peer, figures in self.peers.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields that are set, with figures of five digits."""
        fields = {key: value for key, value in dataclasses.asdict(self).items() if value not in ("", {}, None)}
        fields["figures"] = {name: [float(f"{figure:.5g}") for figure in each] for name, each in self.figures.items()}
        return fields


def interleaved(
    contenders: Mapping[Name, T], repeats: int, figure: Callable[[T], Figure] = operator.call
) -> dict[Name, list[Figure]]:
    """The figures of each contender: in each repeat, all contenders run in turn.

    Each repeat begins with another contender, so that none always follows the same neighbour.

    Args:
        contenders: by name, what `figure` takes: a function to call, if it is not given.
        repeats: the number of figures of each.
        figure: measures a contender; what it returns may be several numbers.
    """
    figures: dict[Name, list[Figure]] = {name: [] for name in contenders}
    names = list(contenders)
    gc.collect()
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(figure(contenders[name]))
    return figures


def seconds(do: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that a call takes, and its result."""
    begin = time.perf_counter()
    result = do()
    return time.perf_counter() - begin, result


def milliseconds(do: Callable[[], Any], times: int = 1) -> float:
    """Milliseconds per call, over the given number of calls."""
    begin = time.perf_counter()
    for _ in range(times):
        do()
    return (time.perf_counter() - begin) / times * 1e3


def same(what: str, results: Mapping[str, float], tolerance: float = 0.0) -> str:
    """Checks that contenders computed the same number, within a relative tolerance, and returns a text that says so.

    Raises:
        WrongResult: the numbers differ, or one is NaN.
    """
    middle = statistics.median(results.values())
    if not all(abs(result - middle) <= tolerance * abs(middle) for result in results.values()):
        raise WrongResult(f"{what} apart by more than {tolerance:g}: {dict(results)}")
    return f"{what} {middle:.6g}" + (f" ±{tolerance:g}" if tolerance else "")


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fits a straight line to points: returns its value at 0 and its slope.

    Each point is weighted by the inverse of its value, so that the relative errors of small and large values count
    equally.
    """
    at, values = np.transpose(points)
    slope, start = np.polyfit(at, values, 1, w=1 / values)
    return float(start), float(slope)
