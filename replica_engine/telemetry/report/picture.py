"""The picture of a timeline: one line for each track, coloured by the kind of activity."""

from __future__ import annotations

from replica_engine.telemetry.report.spans import DrawnSpan, DrawnTrack, Timeline

COLOURS = {
    "run": "#4c78a8",
    "waiting": "#d9d9d9",
    "merge": "#f58518",
    "launch": "#54a24b",
    "compile": "#b279a2",
    "host call": "#e45756",
    "feeding": "#72b7b2",
}
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
    whole = figure.Figure(figsize=(14, 1.2 + 0.42 * len(tracks)), layout="constrained")
    axes = whole.subplots()
    unit, factor = ("ms", 1e3) if end - begin < 2 else ("s", 1.0)
    for line, track in enumerate(tracks):
        for kind, bars in _bars(track, begin, end).items():
            scaled = [(start * factor, width * factor) for start, width in bars]
            axes.broken_barh(scaled, (line - 0.38, 0.76), facecolors=COLOURS.get(kind, "#333333"), linewidth=0)
    axes.set_yticks(range(len(tracks)), [f"{track.group}  {track.name}" for track in tracks], fontsize=9)
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlim(begin * factor, end * factor)
    axes.set_xlabel(f"{unit} from the beginning of the recording")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    seen = {span.kind for track in tracks for span in track.spans}
    handles = [patches.Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in seen]
    whole.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=9)
    whole.savefig(path, dpi=130)


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
