"""Reads the file of a timeline as tracks of spans, and computes each span's own time, without the spans inside it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


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
