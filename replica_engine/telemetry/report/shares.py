"""The table of a timeline: how each replica spent its time, and which replica was the slowest."""

from __future__ import annotations

from replica_engine.telemetry.report import steps
from replica_engine.telemetry.report.spans import DrawnTrack, Timeline, between, by_replica

KINDS = ("run", "waiting", "merge", "host call")


def table(timeline: Timeline, begin: float = 0.0, end: float | None = None) -> str:
    """The table as text.

    Shares are relative to the time of the part. A replica that neither runs nor waits is outside a run. Merges are
    counted on the replica's track. A "-" stands for a kind of span that the group does not have.

    Args:
        timeline: the whole recording.
        begin: the second of the recording at which the part begins that the table is about.
        end: the second at which the part ends; None for the end of the recording.
    """
    part = between(timeline, begin, end)
    lines = []
    for group in dict.fromkeys(track.group for track in part.tracks):
        tracks = [track for track in part.tracks if track.group == group]
        if replicas := by_replica(tracks):
            of_steps = steps.compared(timeline, group, begin, begin + part.seconds)
            slowest = _slowest(replicas, of_steps, timeline)
            lines += [group, *_replicas(replicas, part.seconds), *slowest, ""]
        lines += _beside([track for track in tracks if not track.is_replica], part.seconds)
    if worker := steps.slow_worker(timeline, begin, begin + part.seconds):
        lines.append(f"slowest worker: {worker}")
    shown = "" if part.seconds == timeline.seconds else f", of which {part.seconds:.3f} s are shown"
    lines.append(f"recorded: {timeline.seconds:.3f} s{shown}")
    if not part.tracks:
        lines.append(f"no replica was seen: {steps.NO_STEP}")
    if timeline.dropped:
        lines.append(f"{timeline.dropped:,} more spans were not kept: record a shorter time")
    return "\n".join(lines)


def _replicas(tracks: list[DrawnTrack], seconds: float) -> list[str]:
    has = {span.kind for track in tracks for span in track.spans}
    rows: list[tuple[str, ...]] = [("replica", *KINDS, "outside", "merges/s")]
    for track in tracks:
        own = {kind: _own(track, kind) for kind in KINDS}
        outside = max(0.0, seconds - sum(own.values()))
        merges = sum(span.kind == "merge" for span in track.spans)
        shares = [_share(own[kind], seconds) if kind in has else "-" for kind in KINDS]
        rate = "-" if "merge" not in has else f"{merges / seconds:.1f}"
        rows.append((track.name, *shares, _share(outside, seconds), rate))
    return _aligned(rows)


def _slowest(replicas: list[DrawnTrack], of_steps: list[tuple[float, float]], timeline: Timeline) -> list[str]:
    """The line about the replica that works longest in a step."""
    if len(replicas) < 2:
        return []
    if not of_steps:
        return [f"  slowest: not known, {steps.NO_STEP}"]
    group = replicas[0].group
    found = steps.straggler(replicas, of_steps, steps.is_compiled(timeline, group))
    return [f"  slowest: {found or f'{steps.nobody(timeline, group)} ({steps.counted(len(of_steps))})'}"]


def _beside(tracks: list[DrawnTrack], seconds: float) -> list[str]:
    lines = []
    for track in tracks:
        kinds = dict.fromkeys(span.kind for span in track.spans)
        parts = []
        for kind in kinds:
            number = sum(span.kind == kind for span in track.spans)
            parts.append(f"{kind} {_share(_own(track, kind), seconds)} ({number:,})")
        lines.append(f"  {track.group}, {track.name}: {', '.join(parts)}")
    return [*lines, ""] if lines else []


def _own(track: DrawnTrack, kind: str) -> float:
    return sum(span.own for span in track.spans if span.kind == kind)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
