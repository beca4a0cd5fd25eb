"""Timelines as files, in the Trace Event Format of Chrome ("JSON Object Format"), which Perfetto reads too.

Source of the format: "Trace Event Format", Google, 2016. Times are in microseconds from the beginning of the recording.
A process of the format is a group of tracks here: the replicas and the thread that called `run`, or what happens beside
them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple


class Track(NamedTuple):
    """One line of spans.

    Attributes:
        group: the tracks that are drawn together, such as "MirroredStrategy".
        name: "replica 0 of 2 (CPU:0)", "coordinator", "compile", ...
        number: tells tracks of one name apart: the ident of a thread, say.
        order: where in its group it is drawn.
    """

    group: str
    name: str
    number: int = 0
    order: int = 0


def write(path: str, spans: Iterable[Any], began: float, ended: float, dropped: int) -> None:
    """Writes a trace, as a whole or not at all.

    Args:
        path: of the file.
        spans: `timeline.Span`s.
        began: when the recording did, on their clock, in seconds.
        ended: likewise.
        dropped: how many spans are missing.
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
    data = {
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
    """The events that give groups and tracks their names and order."""
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": group}}
        for group, number in groups.items()
    ]
    for track, (group, number) in tracks.items():
        place = {"ph": "M", "pid": group, "tid": number}
        named.append({**place, "name": "thread_name", "args": {"name": track.name}})
        named.append({**place, "name": "thread_sort_index", "args": {"sort_index": track.order}})
    return named
