"""The timeline: who did what when, as spans of time on tracks, in a file that trace viewers draw.

Whoever does something worth seeing asks `recording()` first, or uses `span`, which does. While nobody records, that is
all there is. A span is appended to a list when it is over, with both its times, so recording takes no lock.

The spans are in TensorFlow's profiler too, while that runs. It wants to be told when a span begins and when it ends, on
the thread that it is of; `profiled` does that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from replica_engine.telemetry.trace_file import Track, write

MOST = 1_000_000
"""Spans that one timeline keeps, about 300 bytes each; it counts the rest."""

now = time.perf_counter


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        track: where it is drawn.
        name: of what was done.
        kind: "run", "waiting", "merge", "compile", "launch", "host call" or "feeding".
        begin: in seconds of `now`.
        end: likewise.
        details: what else to show.
    """

    track: Track
    name: str
    kind: str
    begin: float
    end: float
    details: dict[str, Any] | None


class Recorder:
    """What one timeline has seen so far."""

    def __init__(self) -> None:
        self.began = now()
        self.spans: list[Span] = []
        self.dropped = 0


class Profiler(NamedTuple):
    """TensorFlow's profiler: is it running, and a context manager around what it is to show."""

    is_running: Callable[[], bool]
    trace: Callable[[str], contextlib.AbstractContextManager[Any]]


_recorders: tuple[Recorder, ...] = ()
_lock = threading.Lock()
_profiler: Profiler | None = None
_nothing = contextlib.nullcontext()


class timeline:
    """Records who did what when, and writes it to a file at the end of the block.

    The file is a Chrome trace: Perfetto (ui.perfetto.dev) and chrome://tracing open it. Each replica has a track with
    when it ran, waited for the others, and was merged; so has the thread that called `run`, and there are tracks for
    compiling, launches, host calls and feeding. `python -m replica_engine timeline run.json` draws a picture of it and
    prints a table. The file is written too if the block raises. A million spans are kept; if there are more, the file
    says how many it lacks.

    Args:
        path: of the file. Its folder must exist.

    Raises:
        OSError: the file cannot be written, which is found out before the block begins.

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
        self._recorder: Recorder | None = None

    def __enter__(self) -> timeline:
        with open(self._path, "a"):  # so that a day's run does not end in "No such file or directory"
            pass
        self._recorder = Recorder()
        _change(lambda recorders: (*recorders, self._recorder))
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "entered"
        _change(lambda recorders: tuple(each for each in recorders if each is not recorder))
        write(self._path, recorder.spans, recorder.began, now(), recorder.dropped)


def _change(how: Callable[[tuple], tuple]) -> None:
    global _recorders
    with _lock:
        _recorders = how(_recorders)


def set_profiler(profiler: Profiler) -> None:
    """Says how to reach TensorFlow's profiler, of which this package may know nothing."""
    global _profiler
    _profiler = profiler


def recording() -> bool:
    """Whether anybody wants to see spans."""
    return bool(_recorders) or (_profiler is not None and _profiler.is_running())


def add(track: Track, name: str, kind: str, begin: float, end: float, details: dict[str, Any] | None = None) -> None:
    """Adds a span that is over."""
    for recorder in _recorders:
        if end <= recorder.began:
            continue
        if len(recorder.spans) < MOST:
            recorder.spans.append(Span(track, name, kind, max(begin, recorder.began), end, details))
        else:
            recorder.dropped += 1


def profiled(name: str) -> contextlib.AbstractContextManager[Any]:
    """A span on this thread in TensorFlow's profiler, if that runs."""
    if _profiler is not None and _profiler.is_running():
        return _profiler.trace(f"replica_engine: {name}")
    return _nothing


class span:
    """A span around a block, on a track that many threads may share.

    Args:
        track: where it is drawn.
        name: of what is done.
        kind: as of `Span`.
        details: what else to show.
    """

    __slots__ = ("_args", "_begin", "_profiled")

    def __init__(self, track: Track, name: str, kind: str, details: dict[str, Any] | None = None):
        self._args = track, name, kind, details
        self._begin = 0.0

    def __enter__(self) -> None:
        if recording():
            self._profiled = profiled(f"{self._args[2]} {self._args[1]}")
            self._profiled.__enter__()
            self._begin = now()

    def __exit__(self, kind: Any, error: Any, frames: Any) -> None:
        if self._begin:
            self._profiled.__exit__(kind, error, frames)
            track, name, what, details = self._args
            add(track, name, what, self._begin, now(), details)
