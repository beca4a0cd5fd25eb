"""What the file of a timeline tells: its steps, its straggler, a picture; and the command that prints them.

A step is one eager `run`, from beginning to end, as the thread that called it saw it; where replicas have no threads of
their own, a step is one program, from its launch to its end. Steps are compared, and not sums over the recording: the
first step traces, compiles and makes variables, which may take longer than all that follow, and mostly falls on one
replica.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The picture: a line for each track, coloured by the kind of activity, with steps and straggler.

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
MOST_LINES, FEW_LINES = 30, 8  # steps that have a line; steps up to which a line has the word as well
_TITLE = 150  # characters of a line of the title
_LETTER = 0.009  # of the width of the axes: a letter above a line
_COLUMNS = 2000  # of the picture; neighbouring spans of one kind that are narrower than a column are drawn as one bar


def whole(timeline: Timeline) -> tuple[float, float]:
    """All of a recording, as (begin, end) in seconds."""
    return 0.0, max((span.end for track in timeline.tracks for span in track.spans), default=0.0)


def after_tracing(timeline: Timeline) -> tuple[float, float]:
    """A recording from its second step on: the first one traces, and is so long that the others would be invisible."""
    later = numbered(timeline)[1:]
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
    groups = dict.fromkeys(track.group for track in timeline.tracks)
    stragglers = {group: slowest.name for group in groups if (slowest := straggler(timeline, group))}
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
    _draw_steps(axes, timeline, part, factor)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    seen = {span.kind for track in tracks for span in track.spans}
    handles = [patches.Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in seen]
    drawn.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
    title = (line for long in summary(timeline) for line in textwrap.wrap(long, _TITLE))
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


def _draw_steps(axes: Axes, timeline: Timeline, part: tuple[float, float], factor: float) -> None:
    """A line where each step begins, and its number above, from 1; not more numbers than there is place for."""
    begin, end = part
    starts = enumerate((start for start, _ in numbered(timeline)), 1)
    shown = [(number, start) for number, start in starts if begin <= start < end]
    every = max(1, -(-len(shown) // MOST_LINES))
    free = 0.0  # from here on nothing stands above the tracks
    for number, start in shown[::every]:
        axes.axvline(start * factor, color="#444444", linewidth=0.6, linestyle=(0, (4, 3)), zorder=3)
        label = f"step {number}" if len(shown) <= FEW_LINES else str(number)
        if start * factor < free:
            continue
        free = (start + len(label) * _LETTER * (end - begin)) * factor
        above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (2, 1), "textcoords": "offset points"}
        axes.annotate(label, (start * factor, 1), **above, fontsize=8, color="#444444")


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


# The file, read as tracks of spans. Each span has its own time, without the spans inside it.


@dataclasses.dataclass
class DrawnSpan:
    """One activity. Times are in seconds from the beginning of the recording.

    Attributes:
        name: the name of the activity.
        kind: "run", "waiting", "merge", "launch", ...
        begin: when the activity began.
        end: when the activity ended.
        own: the duration without the time of the spans inside this span, in seconds.
    """

    name: str
    kind: str
    begin: float
    end: float
    own: float


@dataclasses.dataclass
class DrawnTrack:
    """A line of spans, sorted by their beginning; of spans that begin together the longest comes first.

    All tracks of one name in a group are one line: a replica has a track for each thread that it ran on.
    """

    group: str
    name: str
    order: int
    spans: list[DrawnSpan]

    @property
    def is_replica(self) -> bool:
        """Whether the track belongs to a replica, and not to the coordinator or to compiling, for example."""
        return self.name.startswith("replica ")


@dataclasses.dataclass
class Timeline:
    """A recording.

    Attributes:
        tracks: the tracks, sorted by group and by their order in the group.
        seconds: the duration of the recording.
        dropped: the number of spans that the recording dropped.
    """

    tracks: list[DrawnTrack]
    seconds: float
    dropped: int

    def replicas(self, group: str) -> list[DrawnTrack]:
        """The tracks of the replicas in a group."""
        return [track for track in self.tracks if track.group == group and track.is_replica]


def read(path: str) -> Timeline:
    """Reads a file that `replica_engine.timeline` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a timeline, or is empty.
    """
    with open(path, errors="replace") as file:
        text = file.read()
    if not text:
        raise ValueError(
            f"{path} is empty: a timeline writes its file when its `with` block ends, so the process still records, or "
            "was killed before it wrote"
        )
    try:
        return _timeline(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path} is not a whole timeline of replica_engine; `with replica_engine.timeline({path!r}):` writes one. "
            "ui.perfetto.dev shows what is there of a file that is cut off"
        ) from None


def _timeline(data: Any) -> Timeline:
    events = data["traceEvents"]
    groups: dict[int, str] = {}
    tracks: dict[tuple[int, int], DrawnTrack] = {}
    for event in events:
        place = event["pid"], event["tid"]
        if event["ph"] == "M" and event["name"] == "process_name":
            groups[event["pid"]] = event["args"]["name"]
            continue
        track = tracks.setdefault(place, DrawnTrack(groups.get(event["pid"], ""), "", 0, []))
        if event["ph"] == "X":
            begin, duration = event["ts"] / 1e6, event["dur"] / 1e6
            track.spans.append(DrawnSpan(event["name"], event["cat"], begin, begin + duration, duration))
        elif event["name"] == "thread_name":
            track.name = event["args"]["name"]
        elif event["name"] == "thread_sort_index":
            track.order = event["args"]["sort_index"]
    for track in tracks.values():
        _share_out(track.spans)
    lines: dict[tuple[str, str], DrawnTrack] = {}
    for track in tracks.values():
        lines.setdefault((track.group, track.name), dataclasses.replace(track, spans=[])).spans.extend(track.spans)
    for line in lines.values():
        line.spans.sort(key=_begins)
    numbers = {group: number for number, group in groups.items()}
    ordered = sorted(lines.values(), key=lambda line: (numbers.get(line.group, 0), line.order))
    about = data["otherData"]
    return Timeline(ordered, about["seconds"], about["dropped_spans"])


def _share_out(spans: list[DrawnSpan]) -> None:
    """Subtracts from each span's own time the time of the spans directly inside it."""
    spans.sort(key=_begins)
    around: list[DrawnSpan] = []
    for span in spans:
        while around and around[-1].end <= span.begin:
            around.pop()
        if around:
            around[-1].own -= min(span.end, around[-1].end) - span.begin
        around.append(span)


def _begins(span: DrawnSpan) -> tuple[float, float]:
    """The place of a span on its line."""
    return span.begin, -span.end


# The steps, how long each replica worked in them, and which replica is the straggler.

WORK = ("run", "host call")
NO_STEP = (
    "no whole step is recorded; of steps in a loop of a tf.function, and of those without marks (marks=False), only "
    "the tracing is seen, so record steps that are calls, or eager ones: tf.config.run_functions_eagerly(True), or "
    "model.compile(..., run_eagerly=True) for fit"
)
ON_HOST = ("host call",)  # kinds compared in a compiled program, as all its replicas run from launch to end
_RUNS = ("run", "trace")
_CALLER = "coordinator"  # the thread that calls run
NOISE = 0.05  # a smaller part of the others' work, or of a replica's share of the step, names nobody
FEWEST = 5  # steps that it takes to name a straggler: the median of fewer may come from one slow moment
LEAST = 0.5e-3  # seconds of a step: threads that are woken late make smaller differences, which mean nothing


@dataclasses.dataclass(frozen=True)
class Straggler:
    """The replica that works longest in a step.

    Attributes:
        name: the name of its track.
        seconds: how long it works in a step, the median over `steps`.
        others: the same for the other replicas, on average.
        steps: how many steps were compared.
        does: what it does for so long.
    """

    name: str
    seconds: float
    others: float
    steps: int
    does: str = "it works"

    def __str__(self) -> str:
        times = f", {self.seconds / self.others:.1f} times as long as the others" if self.others else ""
        return f"{self.name}: {self.does} {_shown(self.seconds)} in a step{times} (median of {self.steps} steps)"


def summary(timeline: Timeline) -> list[str]:
    """A line for each group of tracks: its number of steps, and the replica that works longest in them."""
    lines = []
    for group in dict.fromkeys(track.group for track in timeline.tracks):
        number = len(list_steps(timeline, group))
        counted = f"{number} {'step' if number == 1 else 'steps'} in " if number else ""
        line = f"{group}, {counted}{_shown(timeline.seconds)}"
        if len(timeline.replicas(group)) > 1:
            line += f". Slowest: {_slowest(timeline, group)}"
        lines.append(line)
    if timeline.dropped:
        lines.append(f"{timeline.dropped:,} more spans were not kept: record a shorter time")
    return lines


def list_steps(timeline: Timeline, group: str) -> list[tuple[float, float]]:
    """The steps of a group of tracks, as (begin, end) in seconds of the recording, in order."""
    tracks = [track for track in timeline.tracks if track.group == group]
    if is_compiled(timeline, group):
        # A launch ends before its program does. Each replica has a span for the program.
        spans = [span for track in timeline.replicas(group) for span in track.spans if span.kind == "run"]
    else:
        spans = [span for span in _runs(tracks) if span.name == "run"]
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        middle = (span.begin + span.end) / 2  # not an end: times in files are rounded
        if not found or middle > found[-1][1]:  # not a run inside a merge, nor the same one on another replica
            found.append((span.begin, span.end))
    return found


def numbered(timeline: Timeline) -> list[tuple[float, float]]:
    """The steps that have numbers in a picture, from 1: those of the first group with replicas."""
    groups = [track.group for track in timeline.tracks if track.is_replica]
    groups += [track.group for track in timeline.tracks]
    return list_steps(timeline, groups[0]) if groups else []


def compared(timeline: Timeline, group: str) -> list[tuple[float, float]]:
    """The steps to compare: all but the first, which traces."""
    return list_steps(timeline, group)[1:]


def is_compiled(timeline: Timeline, group: str) -> bool:
    """Whether the replicas of a group run one program, so that no thread calls them."""
    return not _runs([track for track in timeline.tracks if track.group == group])


def straggler(timeline: Timeline, group: str) -> Straggler | None:
    """The replica that works longest in the median step; None if no replica stands out, or of fewer than five steps.

    Of replicas that run one program, the host calls are compared.
    """
    replicas, steps, compiled = timeline.replicas(group), compared(timeline, group), is_compiled(timeline, group)
    if len(replicas) < 2 or len(steps) < FEWEST:
        return None
    work = [_work(track, steps, ON_HOST if compiled else WORK) for track in replicas]
    medians = [statistics.median(each) for each in work]
    most = max(range(len(replicas)), key=lambda index: medians[index])
    others = statistics.mean(median for index, median in enumerate(medians) if index != most)
    step = statistics.median(end - begin for begin, end in steps)
    share = step if compiled else step / len(replicas)  # replicas on threads take turns
    if medians[most] - others <= max(LEAST, NOISE * max(others, share)):
        return None
    does = "its host calls take" if compiled else "it works"
    return Straggler(replicas[most].name, medians[most], others, len(steps), does)


def _slowest(timeline: Timeline, group: str) -> Straggler | str:
    """The straggler, or in words why none is named."""
    if not list_steps(timeline, group):
        return f"not known, {NO_STEP}"
    steps = compared(timeline, group)
    if len(steps) < FEWEST:
        return f"not known: record at least {FEWEST} steps after the first, which traces and compiles"
    if (slowest := straggler(timeline, group)) is not None:
        return slowest
    nobody = "none, the replicas work equally long"
    if is_compiled(timeline, group):
        calls = any(span.kind in ON_HOST for track in timeline.replicas(group) for span in track.spans)
        unseen = "compiled replicas run inside one program, and only their host calls are seen; these make none"
        nobody = "none, their host calls take equally long" if calls else f"not known: {unseen}"
    return f"{nobody} (median of {len(steps)} steps)"


def _shown(seconds: float) -> str:
    """A duration for people: "12.3 ms", "1.25 s"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _runs(tracks: list[DrawnTrack]) -> list[DrawnSpan]:
    """The calls of `run`, as the threads see them that made them; also those that only traced a `tf.function`."""
    calling = [track for track in tracks if track.name.startswith(_CALLER)]
    return [span for track in calling for span in track.spans if span.name in _RUNS and span.kind == "waiting"]


def _work(track: DrawnTrack, steps: list[tuple[float, float]], kinds: Sequence[str]) -> list[float]:
    """For each step the seconds that the replica worked in it, in spans of some kinds."""
    total = [0.0] * len(steps)
    at = 0
    for span in sorted(track.spans, key=lambda span: span.begin):
        middle = (span.begin + span.end) / 2
        while at < len(steps) and steps[at][1] <= middle:
            at += 1
        if span.kind in kinds and at < len(steps) and middle > steps[at][0]:
            total[at] += span.own
    return total


# The command `python -m replica_engine timeline`.

DESCRIPTION = """\
Draws a timeline that `with replica_engine.timeline("run.json"):` recorded, and names the slowest replica: the one that
works longest in a step, by the median over all steps but the first, if they are at least five.
"""
EPILOG = """\
example:
  %(prog)s run.json --output run.svg

The picture needs matplotlib: pip install matplotlib. To zoom, open run.json in ui.perfetto.dev.
"""
FORMATS = (".png", ".svg", ".pdf")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `timeline` command to those of `python -m replica_engine`.

    Args:
        subparsers: the object that `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "timeline", help="draw a recorded timeline and name the slowest replica", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("path", metavar="run.json", help="the recording")
    parser.add_argument(
        "--output",
        metavar="PICTURE",
        type=_picture,
        help="file to draw to: .png, .svg or .pdf (default: the recording's name with .png)",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--all", action="store_true", help="draw the first step too, which traces and compiles")
    part.add_argument(
        "--steps", metavar="2:8", type=_numbers, help="draw some steps only: the numbers of the first and the last one"
    )
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Runs the command, and returns the exit status: 0, or 1 after a failure."""
    try:
        timeline = read(flags.path)
    except FileNotFoundError:
        return _failed(f"no such file: {flags.path}")
    except OSError as error:
        return _failed(f"cannot read {flags.path}: {error.strerror}")
    except ValueError as error:
        return _failed(str(error))
    print("\n".join(summary(timeline)))
    if not any(track.spans for track in timeline.tracks):
        return _failed("nothing is recorded, so there is nothing to draw; steps in a loop of a tf.function are not")
    output = flags.output or f"{os.path.splitext(flags.path)[0]}.png"
    try:
        draw(timeline, output, _part(timeline, flags))
    except ImportError:
        return _failed("drawing needs matplotlib: pip install matplotlib")
    except (OSError, ValueError) as error:
        return _failed(f"could not draw {output}: {error}")
    print(f"wrote {output}")
    return 0


def _part(timeline: Timeline, flags: argparse.Namespace) -> tuple[float, float]:
    """Where the picture begins and ends, as the flags say."""
    if flags.steps is None:
        return whole(timeline) if flags.all else after_tracing(timeline)
    first, last = flags.steps
    found = numbered(timeline)
    if last > len(found):
        raise ValueError(f"there is no step {last} among the {len(found)} that are recorded")
    return found[first - 1][0], found[last - 1][1]


def _numbers(text: str) -> tuple[int, int]:
    """The numbers of two steps, for argparse."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text}: write the numbers of the first and the last step, such as 2:8")
    return int(first), int(last)


def _picture(path: str) -> str:
    """The path of a picture, for argparse."""
    suffix = os.path.splitext(path)[1]
    if suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{suffix or path}: a picture must end in one of {', '.join(FORMATS)}")
    return path


def _failed(why: str) -> int:
    print(f"timeline: {why}", file=sys.stderr)
    return 1
