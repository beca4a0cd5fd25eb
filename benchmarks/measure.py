"""What a benchmark measures: rows of figures, interleaved, and the ratio to each peer.

A row has one figure a repeat for each contender. The first contender is what the row is about; the others are its
peers. Within a repeat all contenders follow each other at once, so a change in the machine's speed meets all of them.
The ratio to a peer is the median over repeats of the ratio within a repeat.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class WrongResult(Exception):
    """Contenders came to different results: there is nothing to compare."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row beside one of its peers.

    Attributes:
        peer: its name.
        ratios: of the row's figure to the peer's, one a repeat.
        target: what the ratio should be at most; None if nobody said.
    """

    peer: str
    ratios: list[float]
    target: float | None

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None if there is none."""
        return None if self.target is None else self.ratio <= self.target


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that was measured.

    Attributes:
        group: the benchmark that it is a part of.
        name: what is measured.
        figures: one a repeat, by contender; the first contender is what the row is about, the others are its peers.
        unit: of the figures.
        replicas: how many; None where the number means nothing.
        targets: what the ratio to a peer should be at most, by peer.
        check: what was found equal before anything was timed.
        note: what else there is to say.
        axis: what is varied, where the row is a point of a plot.
        at: where on that axis the point lies.
    """

    group: str
    name: str
    figures: dict[str, list[float]]
    unit: str = "ms"
    replicas: int | None = None
    targets: dict[str, float] = dataclasses.field(default_factory=dict)
    check: str = ""
    note: str = ""
    axis: str = ""
    at: float | None = None

    def __post_init__(self) -> None:
        """Says at once what a table could not show.

        Raises:
            ValueError: there are no figures, not equally many, or there is a target without its peer.
        """
        repeats = {len(figures) for figures in self.figures.values()}
        if len(repeats) != 1 or 0 in repeats:
            raise ValueError(f"{self.title}: contenders need equally many figures, at least one: {self.figures}")
        if unknown := self.targets.keys() - self.peers.keys():
            raise ValueError(f"{self.title}: there are targets for {sorted(unknown)}, but no figures")

    @property
    def title(self) -> str:
        """The name, with the point where it was measured."""
        return self.name if self.at is None else f"{self.name}, {self.at:,.0f} {self.axis}"

    @property
    def contender(self) -> str:
        """What the row is about."""
        return next(iter(self.figures))

    @property
    def ours(self) -> list[float]:
        """Its figures."""
        return self.figures[self.contender]

    @property
    def peers(self) -> dict[str, list[float]]:
        """The others' figures."""
        return {name: figures for name, figures in self.figures.items() if name != self.contender}

    @property
    def comparisons(self) -> list[Comparison]:
        """The row beside each of its peers."""
        return [
            Comparison(peer, [mine / its for mine, its in zip(self.ours, figures, strict=True)], self.targets.get(peer))
            for peer, figures in self.peers.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields that say something, with figures to five digits."""
        fields = {key: value for key, value in dataclasses.asdict(self).items() if value not in ("", {}, None)}
        fields["figures"] = {name: [float(f"{figure:.5g}") for figure in each] for name, each in self.figures.items()}
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        """What `to_json` made."""
        return cls(**fields)


def interleaved(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """The figures of each contender: all in turn, then all in turn again.

    A repeat begins with another one each time, so that none always follows the same neighbour.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    gc.collect()
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(contenders[name]())
    return figures


def seconds(do: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, and its result."""
    begin = time.perf_counter()
    result = do()
    return time.perf_counter() - begin, result


def milliseconds(do: Callable[[], Any], times: int = 1) -> float:
    """Milliseconds a call, of so many calls."""
    begin = time.perf_counter()
    for _ in range(times):
        do()
    return (time.perf_counter() - begin) / times * 1e3


def same(what: str, results: Mapping[str, float], tolerance: float = 0.0) -> str:
    """Says that contenders came to the same number.

    Args:
        what: the number is.
        results: by contender.
        tolerance: how far they may be apart, relative to their size.

    Raises:
        WrongResult: they did not; a NaN is equal to nothing.
    """
    middle = statistics.median(results.values())
    if not all(abs(result - middle) <= tolerance * abs(middle) for result in results.values()):
        raise WrongResult(f"{what} apart by more than {tolerance:g}: {dict(results)}")
    return f"{what} {middle:.6g}" + (f" ±{tolerance:g}" if tolerance else "")


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The straight line through points: what it is at 0, and how much a unit adds.

    Each point weighs by the inverse of its height, so that small and large ones are met equally well in percent.
    """
    weights = [1 / y**2 for _, y in points]
    total = math.fsum(weights)
    x_mean = math.fsum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = math.fsum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = math.fsum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = math.fsum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True)) / spread
    return y_mean - slope * x_mean, slope
