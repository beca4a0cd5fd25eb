"""Timelines as files, in the Trace Event Format of Chrome ("JSON Object Format"), which Perfetto reads too.

Source of the format: "Trace Event Format", Google, 2016. Times are in microseconds from the beginning of the recording.
A "process" of the format is a group of tracks here: the replicas and the thread that called `run`, or other activities
such as compiling.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple


class Track(NamedTuple):
    """One line of spans in the picture.

    Attributes:
        group: the name of the group of tracks that are drawn together, such as "MirroredStrategy".
        name: "replica 0 of 2 (CPU:0)", "coordinator (MainThread)", "compile", ...
        number: tells tracks of the same name apart, such as the ident of a thread.
        order: the position of the track in its group, lowest first.
    """

    group: str
    name: str
    number: int = 0
    order: int = 0


def write(
    path: str,
    spans: Iterable[Any],
    began: float,
    ended: float,
    dropped: int,
) -> None:
    """Writes a trace file, completely or not at all.

    Args:
        path: the path of the file.
        spans: the `timeline.Span`s.
        began: when the recording began, in seconds of the spans' clock.
        ended: when the recording ended, in seconds of the same clock.
        dropped: the number of spans that the recording dropped.

    Raises:
        OSError: the file cannot be written.
    """
    groups: dict[str, int] = {}
    tracks: dict[Track, tuple[int, int]] = {}
    events: list[dict[str, Any]] = []
    for track, name, kind, begin, end, details in spans:
        where = tracks.get(track)
        if where is None:
            where = groups.setdefault(track.group, len(groups) + 1), len(tracks) + 1
            tracks[track] = where
        event = {"ph": "X", "name": name, "cat": kind, "pid": where[0], "tid": where[1]}
        event |= {"ts": (begin - began) * 1e6, "dur": (end - begin) * 1e6}
        if details:
            event["args"] = details
        events.append(event)
    data: dict[str, Any] = {
        "traceEvents": [*_names(groups, tracks), *events],
        "displayTimeUnit": "ms",
        "otherData": {"producer": "replica_engine", "seconds": ended - began, "dropped_spans": dropped},
    }
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w") as file:
            json.dump(data, file)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _names(groups: dict[str, int], tracks: dict[Track, tuple[int, int]]) -> list[dict[str, Any]]:
    """The events that give the groups and tracks their names and their order."""
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": group}}
        for group, number in groups.items()
    ]
    for track, (group, number) in tracks.items():
        place = {"ph": "M", "pid": group, "tid": number}
        named.append({**place, "name": "thread_name", "args": {"name": track.name}})
        named.append({**place, "name": "thread_sort_index", "args": {"sort_index": track.order}})
    return named
