"""The timeline: spans of time on tracks, written to a file that trace viewers draw; and tables for notebooks.

Code that records a span first asks `recording()`, or uses `span`, which asks. While no timeline records, this question
is the only cost. A span is appended to a list when it is over, with its begin and its end, so recording takes no lock.

While TensorFlow's profiler runs, it gets the spans too. The profiler must be told when a span begins and when it ends,
on the thread of the span; `profiled` does so.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

MOST = 1_000_000
"""The most spans that one timeline keeps, about 300 bytes each; further spans are counted and dropped."""

now = time.perf_counter


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


class Span(NamedTuple):
    """One activity, with its begin and end.

    Attributes:
        track: the track that shows the span.
        name: the name of the activity.
        kind: "run", "waiting", "merge", "compile", "launch", "host call" or "feeding".
        begin: when the activity began, in seconds of `now`.
        end: when the activity ended, in seconds of `now`.
        details: further values that a viewer shows, by name; None for none.
    """

    track: Track
    name: str
    kind: str
    begin: float
    end: float
    details: Mapping[str, object] | None


class Recorder:
    """The spans that one timeline has recorded so far, and the number of dropped ones."""

    def __init__(self) -> None:
        self.began = now()
        self.spans: list[Span] = []
        self.dropped = 0


class Profiler(NamedTuple):
    """Access to TensorFlow's profiler.

    Attributes:
        is_running: whether the profiler runs.
        trace: makes a context manager; the profiler shows its block as a span of the given name.
    """

    is_running: Callable[[], bool]
    trace: Callable[[str], contextlib.AbstractContextManager[object]]


_worker = 0  # which one this process is in its job
_recorders: tuple[Recorder, ...] = ()
_lock = threading.Lock()
_profiler: Profiler | None = None
_nothing = contextlib.nullcontext()


class timeline:
    """Records what each replica and the runtime do and when, and writes a file at the end of the block.

    The file is a Chrome trace: Perfetto (ui.perfetto.dev) and chrome://tracing open it. Each replica has a track that
    shows when the replica ran, waited for the others, and was merged. The thread that called `run` has such a track
    too, and further tracks show compiling, launches, host calls and feeding. `python -m replica_engine timeline
    run.json` draws a picture of the file and names the slowest replica. The file is also written if the block raises.
    At most a million spans are kept; the file says how many further spans it lacks.

    In a job of several workers each writes a file of its own: for `run.json`, worker 0 `run.json` and worker 1
    `run.worker-1.json`. Make the strategy, which takes the process into its job, before the block.

    Args:
        path: the path of the file. Its folder must exist. A relative path is in the current folder of this call.

    Raises:
        OSError: the file cannot be written. This is checked before the block begins.

    Example:
        >>> import os, tempfile
        >>> import replica_engine
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> path = os.path.join(tempfile.mkdtemp(), "run.json")
        >>> with replica_engine.timeline(path):
        ...     strategy.run(lambda: 1)
        1
        >>> os.path.getsize(path) > 0
        True
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        self._whole = self._path if os.path.isabs(self._path) else os.path.join(os.getcwd(), self._path)
        self._file = self._whole
        self._recorder: Recorder | None = None

    def __enter__(self) -> timeline:
        self._file = f".worker-{_worker}".join(os.path.splitext(self._whole)) if _worker else self._whole
        with open(self._file, "a"):  # fails now, not at the end of a long run, if the file cannot be written
            pass
        self._recorder = Recorder()
        _change(lambda recorders: (*recorders, self._recorder))
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "entered"
        _change(lambda recorders: tuple(each for each in recorders if each is not recorder))
        write(self._file, recorder.spans, recorder.began, now(), recorder.dropped)

    def __repr__(self) -> str:
        return f"timeline({self._path!r})"

    def _repr_html_(self) -> str:
        """The picture, and the slowest replica in words, for notebooks, once the block is over."""
        if self._recorder is not None or not os.path.exists(self._file):
            return plain(f"timeline({self._path!r}): nothing is recorded yet")
        from replica_engine.watch import timeline_report  # only to show it

        try:
            recorded = timeline_report.read(self._file)
        except (ValueError, OSError) as error:  # empty or of another program; a notebook shows no other cell for that
            return plain(f"timeline({self._path!r}): {error}")
        return timeline_report.as_svg(recorded) + plain("\n".join(timeline_report.summary(recorded)))


def name_after_worker(worker: int) -> None:
    """Has timelines that begin from now on write the file of a worker of a job."""
    global _worker
    _worker = worker


def _change(how: Callable[[tuple], tuple]) -> None:
    global _recorders
    # A new tuple each time: `add` goes through the old one on other threads, without the lock.
    with _lock:
        _recorders = how(_recorders)


def set_profiler(profiler: Profiler) -> None:
    """Sets the access to TensorFlow's profiler. This package must not import TensorFlow, so its caller provides it."""
    global _profiler
    _profiler = profiler


def recording() -> bool:
    """Whether a timeline records spans or TensorFlow's profiler runs."""
    return bool(_recorders) or (_profiler is not None and _profiler.is_running())


def add(
    track: Track, name: str, kind: str, begin: float, end: float, details: Mapping[str, object] | None = None
) -> None:
    """Adds a span that is over to each timeline that records. `begin` and `end` are in seconds of `now`."""
    for recorder in _recorders:
        if end <= recorder.began:
            continue
        if len(recorder.spans) < MOST:
            recorder.spans.append(Span(track, name, kind, max(begin, recorder.began), end, details))
        else:
            recorder.dropped += 1


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A context manager: a span on the calling thread in TensorFlow's profiler, if the profiler runs."""
    if _profiler is not None and _profiler.is_running():
        return _profiler.trace(f"replica_engine: {name}")
    return _nothing


class span:
    """A context manager that records its block as a span, on a track that many threads may share.

    Args:
        track: the track that shows the span.
        name: the name of the activity.
        kind: the kind of the activity, as in `Span`.
        details: further values that a viewer shows, by name; None for none.
    """

    __slots__ = ("_args", "_begin", "_profiled")

    def __init__(self, track: Track, name: str, kind: str, details: Mapping[str, object] | None = None):
        self._args = track, name, kind, details
        self._begin = 0.0

    def __enter__(self) -> None:
        if recording():
            self._profiled = profiled(f"{self._args[2]} {self._args[1]}")
            self._profiled.__enter__()
            self._begin = now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        # Not where the recording has begun inside the block: the beginning of the span is not known.
        if self._begin:
            self._profiled.__exit__(kind, error, frames)
            track, name, what, details = self._args
            add(track, name, what, self._begin, now(), details)


def write(path: str, spans: Iterable[Span], began: float, ended: float, dropped: int) -> None:
    """Writes a trace file, completely or not at all, in the Trace Event Format of Chrome ("JSON Object Format").

    Source of the format: "Trace Event Format", Google, 2016. Times are in microseconds from the beginning of the
    recording. A "process" of the format is a group of tracks here: the replicas and the thread that called `run`, or
    other activities such as compiling.

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
    events: list[dict[str, object]] = []
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
    data: dict[str, object] = {
        "traceEvents": [*_names(groups, tracks), *events],
        "displayTimeUnit": "ms",
        "otherData": {"producer": "replica_engine", "seconds": ended - began, "dropped_spans": dropped},
    }
    part = f"{path}.{os.getpid()}.{threading.get_ident()}.part"  # nobody else's, so it may be removed at any time
    try:
        with open(part, "w") as file:
            json.dump(data, file)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):  # it is there only after a failure
            os.unlink(part)


def _names(groups: dict[str, int], tracks: dict[Track, tuple[int, int]]) -> list[dict[str, object]]:
    """The events that give the groups and tracks their names and their order."""
    named: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": group}}
        for group, number in groups.items()
    ]
    for track, (group, number) in tracks.items():
        place = {"ph": "M", "pid": group, "tid": number}
        named.append({**place, "name": "thread_name", "args": {"name": track.name}})
        named.append({**place, "name": "thread_sort_index", "args": {"sort_index": track.order}})
    return named


# Tables and texts for notebooks: what the `_repr_html_` of a result returns.


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as HTML; all texts are escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    title = f'<caption style="text-align: left">{html.escape(caption)}</caption>'
    inside = f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<table class="replica-engine" style="font-family: monospace">{inside}</table>'


def plain(text: str) -> str:
    """A text as HTML, whose long lines break at words."""
    return f'<pre style="line-height: 1.3; white-space: pre-wrap; word-break: normal">{html.escape(text)}</pre>'
