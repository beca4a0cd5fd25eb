"""The steps of a recording, how long each replica worked in them, and which replica is the straggler.

A step is one eager `run`, from beginning to end, as the thread that called it saw it; where replicas have no threads of
their own, a step is one program, from its launch to its end. Steps are compared, and not sums over the recording: the
first step traces, compiles and makes variables, which may take longer than all that follow, and mostly falls on one
replica.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from replica_engine.telemetry.report.spans import DrawnSpan, DrawnTrack, Timeline

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
FEWEST = 5  # steps of which a straggler is named: the median of fewer may be that of a slow moment
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
        number = len(steps_of(timeline, group))
        counted = f"{number} {'step' if number == 1 else 'steps'} in " if number else ""
        line = f"{group}, {counted}{_shown(timeline.seconds)}"
        if len(timeline.replicas(group)) > 1:
            line += f". Slowest: {_slowest(timeline, group)}"
        lines.append(line)
    if timeline.dropped:
        lines.append(f"{timeline.dropped:,} more spans were not kept: record a shorter time")
    return lines


def steps_of(timeline: Timeline, group: str) -> list[tuple[float, float]]:
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
    return steps_of(timeline, groups[0]) if groups else []


def compared(timeline: Timeline, group: str) -> list[tuple[float, float]]:
    """The steps to compare: all but the first, which traces."""
    return steps_of(timeline, group)[1:]


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
    if not steps_of(timeline, group):
        return f"not known, {NO_STEP}"
    steps = compared(timeline, group)
    if len(steps) < FEWEST:
        return f"not known: record at least {FEWEST} steps after the first, which traces and compiles"
    return straggler(timeline, group) or f"{_nobody(timeline, group)} (median of {len(steps)} steps)"


def _nobody(timeline: Timeline, group: str) -> str:
    """The words for a group without a straggler."""
    if not is_compiled(timeline, group):
        return "none, the replicas work equally long"
    tracks = timeline.replicas(group)
    if any(span.kind in ON_HOST for track in tracks for span in track.spans):
        return "none, their host calls take equally long"
    return "not known: compiled replicas run inside one program, and only their host calls are seen; these make none"


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
