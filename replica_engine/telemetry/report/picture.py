"""The picture of a timeline: a line for each track, coloured by the kind of activity, with steps and straggler."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import textwrap
from typing import TYPE_CHECKING

from replica_engine.telemetry.report import steps
from replica_engine.telemetry.report.spans import DrawnTrack, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "run": "#4c78a8",
    "waiting": "#d9d9d9",
    "merge": "#f58518",
    "launch": "#54a24b",
    "compile": "#b279a2",
    "host call": "#e45756",
    "feeding": "#72b7b2",
}
STRAGGLER = "#c0392b"
MOST_MARKS, FEW_MARKS = 30, 8  # steps that have a mark; steps up to which a mark has the word as well
_TITLE = 150  # characters of a line of the title
_LETTER = 0.009  # of the width of the axes: a letter of a mark
_COLUMNS = 2000  # of the picture; neighbouring spans of one kind that are narrower than a column are drawn as one bar


def whole(timeline: Timeline) -> tuple[float, float]:
    """All of a recording, as (begin, end) in seconds."""
    return 0.0, max((span.end for track in timeline.tracks for span in track.spans), default=0.0)


def after_tracing(timeline: Timeline) -> tuple[float, float]:
    """A recording from its second step on: beside the first one, which traces, the others are not to be seen."""
    later = steps.numbered(timeline)[1:]
    begin, end = whole(timeline)
    return (later[0][0] if later else begin), end


def draw(timeline: Timeline, path: str, part: tuple[float, float]) -> None:
    """Writes the picture.

    Args:
        timeline: the timeline to draw.
        path: the path of the picture; its suffix (.png, .svg, .pdf) selects the format.
        part: where the picture begins and ends, in seconds of the recording.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the picture cannot be written.
        ValueError: nothing is recorded, or matplotlib does not know the format.
    """
    from matplotlib import figure, patches  # imported here, because the words work without matplotlib

    begin, end = part
    shown = [
        dataclasses.replace(track, spans=[span for span in track.spans if span.begin < end and span.end > begin])
        for track in timeline.tracks
    ]
    tracks = [track for track in shown if track.spans]
    if not tracks:
        raise ValueError("nothing is recorded")
    drawn = figure.Figure(figsize=(14, 2.0 + 0.42 * len(tracks)), layout="constrained")
    axes = drawn.subplots()
    unit, factor = ("ms", 1e3) if end - begin < 2 else ("s", 1.0)
    stragglers = _stragglers(timeline)
    for line, track in enumerate(tracks):
        for kind, bars in _bars(track, (end - begin) / _COLUMNS).items():
            scaled = [(start * factor, width * factor) for start, width in bars]
            axes.broken_barh(scaled, (line - 0.38, 0.76), facecolors=COLOURS.get(kind, "#333333"), linewidth=0)
    axes.set_yticks(range(len(tracks)), [f"{track.group}  {track.name}" for track in tracks], fontsize=9)
    for line, (track, label) in enumerate(zip(tracks, axes.get_yticklabels(), strict=True)):
        if stragglers.get(track.group) == track.name:
            label.set(color=STRAGGLER, fontweight="bold")
            axes.axhspan(line - 0.5, line + 0.5, color=STRAGGLER, alpha=0.12, linewidth=0, zorder=0)
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlim(begin * factor, end * factor)
    axes.set_xlabel(f"{unit} from the beginning of the recording")
    _mark_steps(axes, timeline, part, factor)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    seen = {span.kind for track in tracks for span in track.spans}
    handles = [patches.Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in seen]
    drawn.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
    title = (line for long in steps.summary(timeline) for line in textwrap.wrap(long, _TITLE))
    drawn.suptitle("\n".join(title), x=0.01, ha="left", fontsize=11)
    drawn.savefig(path, dpi=130)


def as_svg(timeline: Timeline) -> str:
    """The picture after tracing, as text to put into a page; "" without matplotlib, or if there is nothing to draw."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.svg")
        try:
            draw(timeline, path, after_tracing(timeline))
        except (ImportError, ValueError):
            return ""
        with open(path, encoding="utf-8") as file:
            text = file.read()
    as_wide_as_its_cell = '<svg style="max-width: 100%; height: auto"'
    return text[text.index("<svg") :].replace("<svg", as_wide_as_its_cell, 1)


def _stragglers(timeline: Timeline) -> dict[str, str]:
    """By group: the name of its straggler's track, where there is one."""
    found = {}
    for group in dict.fromkeys(track.group for track in timeline.tracks):
        if slowest := steps.straggler(timeline, group):
            found[group] = slowest.name
    return found


def _mark_steps(axes: Axes, timeline: Timeline, part: tuple[float, float], factor: float) -> None:
    """A line where each step begins, and its number above, from 1; not more numbers than there is place for."""
    begin, end = part
    starts = enumerate((start for start, _ in steps.numbered(timeline)), 1)
    marks = [(number, start) for number, start in starts if begin <= start < end]
    every = max(1, -(-len(marks) // MOST_MARKS))
    free = 0.0  # from here on nothing stands above the tracks
    for number, start in marks[::every]:
        axes.axvline(start * factor, color="#444444", linewidth=0.6, linestyle=(0, (4, 3)), zorder=3)
        label = f"step {number}" if len(marks) <= FEW_MARKS else str(number)
        if start * factor < free:
            continue
        free = (start + len(label) * _LETTER * (end - begin)) * factor
        axes.annotate(
            label,
            (start * factor, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, 1),
            textcoords="offset points",
            fontsize=8,
            color="#444444",
        )


def _bars(track: DrawnTrack, column: float) -> dict[str, list[tuple[float, float]]]:
    """The bars to draw for each kind, as (beginning, width) in seconds; a column of the picture is `column` wide.

    Inner spans come after the spans that contain them, and so are drawn over them.
    """
    bars: dict[str, list[tuple[float, float]]] = {}
    for span in track.spans:
        of_kind = bars.setdefault(span.kind, [])
        last = sum(of_kind[-1]) if of_kind else 0.0
        if of_kind and span.begin - last < column and span.end - span.begin < column:
            of_kind[-1] = of_kind[-1][0], max(of_kind[-1][1], span.end - of_kind[-1][0])
        else:
            of_kind.append((span.begin, span.end - span.begin))
    return bars
