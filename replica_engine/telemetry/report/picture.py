"""The picture of a timeline: a line for each track, coloured by the kind of activity, with steps and straggler."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from replica_engine.telemetry.report import steps
from replica_engine.telemetry.report.spans import DrawnSpan, DrawnTrack, Timeline, between, by_replica

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
_COLUMNS = 2000  # of the picture; neighbouring spans of one kind that are narrower than a column are drawn as one bar


def draw(timeline: Timeline, path: str, begin: float = 0.0, end: float | None = None) -> None:
    """Writes the picture.

    Args:
        timeline: the timeline to draw.
        path: the path of the picture; its suffix (.png, .svg, .pdf) selects the format.
        begin: the second of the recording at which the picture begins.
        end: the second at which the picture ends; None for the end of the recording.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the picture cannot be written.
        ValueError: no span lies in that time, or matplotlib does not know the format.
    """
    from matplotlib import figure, patches  # imported here, because the table works without matplotlib

    last = max((span.end for track in timeline.tracks for span in track.spans), default=0.0)
    end = last if end is None else min(end, last)
    tracks = [track for track in timeline.tracks if any(_within(span, begin, end) for span in track.spans)]
    if not tracks:
        raise ValueError(f"there is nothing to draw between {begin:g} s and {end:g} s")
    whole = figure.Figure(figsize=(14, 2.0 + 0.42 * len(tracks)), layout="constrained")
    axes = whole.subplots()
    unit, factor = ("ms", 1e3) if end - begin < 2 else ("s", 1.0)
    stragglers = _stragglers(timeline, begin, end)
    for line, track in enumerate(tracks):
        for kind, bars in _bars(track, begin, end).items():
            scaled = [(start * factor, width * factor) for start, width in bars]
            axes.broken_barh(scaled, (line - 0.38, 0.76), facecolors=COLOURS.get(kind, "#333333"), linewidth=0)
    axes.set_yticks(range(len(tracks)), [f"{track.group}  {track.name}" for track in tracks], fontsize=9)
    for line, (track, label) in enumerate(zip(tracks, axes.get_yticklabels(), strict=True)):
        found = stragglers.get(track.group)
        if found and found.name == track.name:
            label.set(color=STRAGGLER, fontweight="bold")
            axes.axhspan(line - 0.5, line + 0.5, color=STRAGGLER, alpha=0.12, linewidth=0, zorder=0)
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlim(begin * factor, end * factor)
    axes.set_xlabel(f"{unit} from the beginning of the recording")
    _mark_steps(axes, timeline, tracks, begin, end, factor)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    seen = {span.kind for track in tracks for span in track.spans}
    handles = [patches.Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in seen]
    whole.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
    whole.suptitle("\n".join(_title(timeline, tracks, stragglers, begin, end)), x=0.01, ha="left", fontsize=11)
    whole.savefig(path, dpi=130)


def as_svg(timeline: Timeline) -> str:
    """The picture as text to put into a page; "" without matplotlib, or if there is nothing to draw."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.svg")
        try:
            draw(timeline, path)
        except (ImportError, ValueError):
            return ""
        with open(path, encoding="utf-8") as file:
            text = file.read()
    return text[text.index("<svg") :]


def _stragglers(timeline: Timeline, begin: float, end: float) -> dict[str, steps.Straggler | None]:
    """For each group with replicas its straggler, or None."""
    part = between(timeline, begin, end)
    found = {}
    for group in dict.fromkeys(track.group for track in part.tracks if track.is_replica):
        replicas = by_replica([track for track in part.tracks if track.group == group])
        of_steps = steps.compared(timeline, group, begin, end)
        found[group] = steps.straggler(replicas, of_steps, steps.is_compiled(timeline, group))
    return found


def _title(
    timeline: Timeline,
    tracks: list[DrawnTrack],
    stragglers: dict[str, steps.Straggler | None],
    begin: float,
    end: float,
) -> list[str]:
    """For each group a line: its number of steps, and its straggler."""
    lines = []
    for group in dict.fromkeys(track.group for track in tracks):
        number = sum(start < end and stop > begin for start, stop in steps.steps_of(timeline, group))
        line = f"{group}, {number} {'step' if number == 1 else 'steps'} in {steps.shown(end - begin)}"
        if group in stragglers and number:  # of a tf.function only the tracing is seen, which is no step
            line += f". Slowest: {stragglers[group] or steps.nobody(timeline, group)}"
        lines.append(line)
    return lines


def _mark_steps(
    axes: Axes, timeline: Timeline, tracks: list[DrawnTrack], begin: float, end: float, factor: float
) -> None:
    """A line where each step begins, and its number above, from 1; not more numbers than there is place for."""
    group = next((track.group for track in tracks if track.is_replica), tracks[0].group)
    marks = [
        (number, start)
        for number, (start, stop) in enumerate(steps.steps_of(timeline, group), 1)
        if begin <= start < end and stop > begin
    ]
    every = max(1, -(-len(marks) // MOST_MARKS))
    for number, start in marks[::every]:
        axes.axvline(start * factor, color="#444444", linewidth=0.6, linestyle=(0, (4, 3)), zorder=3)
        axes.annotate(
            f"step {number}" if len(marks) <= FEW_MARKS else str(number),
            (start * factor, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, 1),
            textcoords="offset points",
            fontsize=8,
            color="#444444",
        )


def _within(span: DrawnSpan, begin: float, end: float) -> bool:
    return span.end > begin and span.begin < end


def _bars(track: DrawnTrack, begin: float, end: float) -> dict[str, list[tuple[float, float]]]:
    """The bars to draw for each kind, as (beginning, width) in seconds.

    Inner spans come after the spans that contain them, and so are drawn over them.
    """
    column = (end - begin) / _COLUMNS
    bars: dict[str, list[tuple[float, float]]] = {}
    for span in track.spans:
        if not _within(span, begin, end):
            continue
        start, stop = max(span.begin, begin), min(span.end, end)
        of_kind = bars.setdefault(span.kind, [])
        if of_kind and start - (of_kind[-1][0] + of_kind[-1][1]) < column and stop - start < column:
            of_kind[-1] = of_kind[-1][0], max(of_kind[-1][1], stop - of_kind[-1][0])
        else:
            of_kind.append((start, stop - start))
    return bars
