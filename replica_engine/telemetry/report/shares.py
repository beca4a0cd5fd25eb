"""The table of a timeline: how each replica spent its time, and which replica was the slowest."""

from __future__ import annotations

from replica_engine.telemetry.report.spans import DrawnTrack, Timeline

KINDS = ("run", "waiting", "merge", "host call")
OTHERS = ("compile", "launch", "feeding")


def table(timeline: Timeline) -> str:
    """The table as text.

    Shares are relative to the time of the whole recording. A replica that neither runs nor waits is outside a run.
    Merges are counted on the replica's track. A "-" stands for a kind of span that the group does not have.
    """
    lines = []
    for group in dict.fromkeys(track.group for track in timeline.tracks):
        tracks = [track for track in timeline.tracks if track.group == group]
        replicas = _by_name([track for track in tracks if track.is_replica])
        if replicas:
            lines += [group, *_replicas(replicas, timeline.seconds), *_slowest(replicas), ""]
        lines += _beside([track for track in tracks if not track.is_replica], timeline.seconds)
    lines.append(f"recorded: {timeline.seconds:.3f} s")
    if timeline.dropped:
        lines.append(f"{timeline.dropped:,} more spans were not kept: record a shorter time")
    return "\n".join(lines)


def _by_name(tracks: list[DrawnTrack]) -> list[DrawnTrack]:
    """One track for each replica, joined from its tracks: a replica has one for each thread that it ran on."""
    joined: dict[str, DrawnTrack] = {}
    for track in tracks:
        known = joined.setdefault(track.name, DrawnTrack(track.group, track.name, track.order, []))
        known.spans.extend(track.spans)
    return list(joined.values())


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


def _slowest(tracks: list[DrawnTrack]) -> list[str]:
    """The line about the replica that computed longest.

    It names the replica only if the replica took at least 5 % longer than the others on average.
    """
    busy = [(_own(track, "run") + _own(track, "host call"), track.name) for track in tracks]
    most, name = max(busy)
    if len(busy) < 2 or most <= 0:
        return []
    others = (sum(seconds for seconds, _ in busy) - most) / (len(busy) - 1)
    if most < 1.05 * others:
        return ["  slowest: none, the replicas ran equally long"]
    times = f", {most / others:.2f} times as long as the others on average" if others else ""
    return [f"  slowest: {name}: it ran {most:.3f} s{times}"]


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
