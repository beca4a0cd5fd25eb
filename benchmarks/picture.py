"""Draws the pictures of the documentation: the summary, ratios to the peers, and how the cost grows."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import matplotlib
from matplotlib import lines, patches, pyplot, ticker
from matplotlib.axes import Axes

from benchmarks import summary
from benchmarks.measure import Comparison, Row
from benchmarks.report import Report

# Without a window. Text is written as text, and the same figures make the same file.
matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 9})

FASTER, SLOWER = "#2a9d8f", "#e76f51"
"""Colours of bars: this library is faster than the peer, or slower. A target is a mark, not a colour."""

BAR, HEAD, WIDTH = 0.19, 0.65, 9.5
"""Sizes in inches: the height of a bar, the space around the bars of a group, and the width."""

_COLUMNS = 3  # plots beside each other

LINES = {"MirroredStrategy": FASTER, "TPUStrategy": "#6c8ebf", "tf.distribute": SLOWER}
"""The colour of each contender's line."""


def draw_summary(report: Report, path: str | pathlib.Path) -> None:
    """Draws the rows of the summary: a bar from 1 to the ratio, on an axis where less is better."""
    bars = summary.rows(report)
    figure, axis = pyplot.subplots(figsize=(WIDTH, 1.5 + 0.42 * len(bars)), layout="constrained")
    for height, (chosen, _, each) in enumerate(bars):
        _bar(axis, height, each, thickness=0.62, target=False)
        colour = FASTER if each.ratio < 1 else SLOWER
        place = {"xycoords": ("axes fraction", "data"), "va": "center"}
        axis.annotate(f"{each.ratio:.2f}", (1.01, height), fontweight="bold", color=colour, **place)
        label = f"{chosen.title}\n{chosen.contender}, compared with {summary.called(chosen.peer)}"
        axis.annotate(label, (-0.01, height), ha="right", fontsize=8.5, **place)
    axis.set(xscale="log", yticks=[], ylim=(len(bars) - 0.4, -0.6), xlim=(0.06, 4))
    _ratio_axis(axis)
    axis.set_xlabel("time here / time of the other      \u2190 lower is better")
    sizes = {chosen.replicas for chosen, *_ in bars}
    replicas = f"{sizes.pop()} replicas" if len(sizes) == 1 else "N replicas"
    axis.set_title(f"The time of an operation, {replicas} on one machine: 1 is as long as the other", loc="left")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    _legend(figure, target=False)
    _save(figure, path)


def draw_ratios(report: Report, path: str | pathlib.Path) -> None:
    """Draws bars with the ratio to a peer for each group; left of 1 is faster than the peer.

    A row with a target is compared with the peer of the target. In a group without targets, each row is compared with
    its first peer. The table has all other peers. The thin line spans the smallest to the largest ratio of a repeat.
    """
    groups = {group: list(_shown(report.list_rows(group))) for group in report.groups}
    groups = {group: bars for group, bars in groups.items() if bars}
    heights = [HEAD + BAR * len(bars) for bars in groups.values()] or [HEAD]
    figure, axes = pyplot.subplots(
        len(heights), figsize=(WIDTH, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, (group, bars) in zip(axes[:, 0], groups.items(), strict=False):
        _bars(axis, group, bars)
    axes[-1, 0].set_xlabel("time here / time of the other      \u2190 lower is better")
    _legend(figure, target=True)
    _save(figure, path)


def draw_growth(report: Report, path: str | pathlib.Path) -> None:
    """Draws a plot for each varied quantity, with a line for each contender."""
    plots: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        if row.at is not None:
            plots.setdefault((row.name, row.axis), []).append(row)
    columns = max(1, min(len(plots), _COLUMNS))
    rows_of_plots = max(1, math.ceil(len(plots) / _COLUMNS))
    size = (4 * columns, 3.6 * rows_of_plots)
    figure, axes = pyplot.subplots(rows_of_plots, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(plots) :]:
        axis.set_axis_off()
    for axis, ((name, what), rows) in zip(axes.flat, plots.items(), strict=False):
        _lines(axis, rows)
        axis.set(title=name, xlabel=what, ylabel=rows[0].unit, yscale="log")
        if any(row.at == 0 for row in rows):
            axis.set_xscale("symlog")
            axis.set_xlim(left=-0.1)
        else:
            axis.set_xscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _save(figure, path)


def _shown(rows: list[Row]) -> Iterator[tuple[Row, Comparison]]:
    """The comparisons of a group that are drawn as bars."""
    targets = any(row.targets for row in rows)
    for row in rows:
        if row.at is None:
            chosen = [each for each in row.comparisons if each.target is not None]
            yield from ((row, each) for each in (chosen if targets else row.comparisons[:1]))


def _bars(axis: Axes, group: str, bars: list[tuple[Row, Comparison]]) -> None:
    labels = []
    for height, (row, each) in enumerate(bars):
        _bar(axis, height, each, thickness=0.7, target=True)
        axis.annotate(f"{each.ratio:.2f}", (1, height), (1.01, height), ("axes fraction", "data"), va="center")
        size = "" if row.replicas is None else f", N = {row.replicas}"
        labels.append(f"{row.title}{size}: {row.contender} to {each.peer}")
    axis.set_yticks(range(len(bars)), labels, fontsize=8)
    axis.set(title=group, xscale="log", ylim=(len(bars) - 0.4, -0.6))
    every = [1.0, *(value for _, each in bars for value in (*each.ratios, each.target) if value is not None)]
    axis.set_xlim(min(0.5, *every) / 1.1, max(2.0, *every) * 1.1)
    _ratio_axis(axis)


def _bar(axis: Axes, height: float, each: Comparison, thickness: float, target: bool) -> None:
    """A bar from 1 to the ratio, the range of the repeats as a thin line, and if wanted the target as a mark."""
    colour = FASTER if each.ratio < 1 else SLOWER
    axis.barh(height, each.ratio - 1, left=1, height=thickness, color=colour)
    axis.hlines(height, min(each.ratios), max(each.ratios), color="black", linewidth=0.8)
    if target and each.target is not None:
        axis.plot(each.target, height, marker="D", markersize=5, color="white", markeredgecolor="black")


def _ratio_axis(axis: Axes) -> None:
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.axvline(1, color="black", linewidth=1)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _legend(figure: Any, target: bool) -> None:
    mark = {"linestyle": "none", "marker": "D", "markersize": 5, "color": "white", "markeredgecolor": "black"}
    handles = [
        patches.Patch(color=FASTER, label="faster here"),
        patches.Patch(color=SLOWER, label="slower here"),
        *[lines.Line2D([], [], label="target", **mark)] * target,
        lines.Line2D([], [], color="black", linewidth=0.8, label="range of the repeats"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8)


def _lines(axis: Axes, rows: list[Row]) -> None:
    points: dict[str, list[tuple[float, list[float]]]] = {}
    for row in rows:
        for who, figures in row.figures.items():
            points.setdefault(who, []).append((row.at or 0.0, figures))
    for who, line in points.items():
        at = [x for x, _ in line]
        colour = LINES.get(who)
        axis.plot(at, [statistics.median(each) for _, each in line], "o-", label=who, color=colour, markersize=4)
        axis.fill_between(at, [min(each) for _, each in line], [max(each) for _, each in line], color=colour, alpha=0.2)


def _save(figure: Any, path: str | pathlib.Path) -> None:
    dated = {"Date": None} if pathlib.Path(path).suffix == ".svg" else {}
    figure.savefig(path, metadata=dated)
    pyplot.close(figure)
