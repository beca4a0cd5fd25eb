"""One timeline of all workers: each sends its spans through the coordinator, and the chief writes the file.

Times are those of the chief. Each worker knows how far its clock is from the coordinator's
(`hosts/member/clock.py`), so it sends times of the coordinator.

Timelines belong together if they have one path and overlap: the chief announces its timeline of a path with a number,
and a worker that ends one of that path sends its spans for the number. A worker that finds no announcement records
alone, and writes a file of its own. The chief drops all that a timeline has stored at the coordinator.

What must never happen is that a program waits for long, or fails, because another worker has not come to the end of its
block: then the file lacks that worker, and says so.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
import zlib
from typing import Any, NamedTuple, Protocol

from replica_engine.errors import ReplicaEngineError
from replica_engine.telemetry.timeline import Ended, Span
from replica_engine.telemetry.trace_file import Track

LOGGER = logging.getLogger("replica_engine")

PATIENCE = 30.0
"""Seconds for which the chief waits for all other workers together at the end of a timeline."""

_TO_BEGIN = 1.0  # seconds to wait for the word that another worker has begun a timeline of the same path

_PART = 500_000  # characters of a message, which may have a megabyte


class Ahead(Protocol):
    """How far the coordinator's clock is ahead of this process' clock.

    Attributes:
        seconds: as seconds.
        error: the most that this can be wrong, in seconds.
    """

    @property
    def seconds(self) -> float: ...

    @property
    def error(self) -> float: ...


class JobMember(Protocol):
    """This process as a worker of its job: `hosts.Member`, as far as it is needed here."""

    worker: int
    size: int

    @property
    def clock_offset(self) -> Ahead | None: ...

    def put(self, key: str, value: Any) -> None: ...

    def drop(self, *prefixes: str) -> None: ...

    def get(self, key: str, timeout: float | None = None) -> Any: ...


class _Received(NamedTuple):
    """The spans that another worker has sent.

    Attributes:
        spans: its spans, with the chief's times.
        clock_error: the most that these times can be wrong, in seconds; None if that was not measured.
    """

    spans: list[Span]
    clock_error: float | None


class SharedTimelines:
    """The timelines of this process, as parts of the job's.

    Args:
        member: the connection to the job.
    """

    def __init__(self, member: JobMember):
        self._member = member
        self._last: dict[str, int] = {}  # by path: the number of the chief's last timeline that this worker was part of
        self.writes = member.worker == 0
        """Whether this worker writes the file."""

    def begin(self, path: str) -> None:
        """A timeline of a path begins."""
        if self.writes:
            number = self._last[path] = self._last.get(path, 0) + 1
            self._member.put(_announced(path, number), number)
            self._member.put(_announced(path), number)
        else:
            self._member.put(_begun(path, self._member.worker), True)

    def end(self, path: str, spans: list[Span], waits: bool) -> Ended:
        """A timeline has ended.

        Args:
            path: what `begin` was given.
            spans: what this worker has recorded.
            waits: whether to wait for the other workers; not after a failure.

        Returns:
            What to write, and where; nothing if the chief writes it.
        """
        if self.writes:
            return self._collected(path, spans, waits)
        number = self._number(path)
        if number is None:
            own = f".worker-{self._member.worker}".join(os.path.splitext(path))
            LOGGER.warning(
                "Worker %d records a timeline of %r alone, and writes it to %r: the chief records none of that path "
                "now. Enter the block on all workers with one path.",
                self._member.worker,
                path,
                own,
            )
        else:
            self._last[path] = number
            self._send(_spans(path, number, self._member.worker), spans)
        self._member.drop(_begun(path, self._member.worker))
        return Ended(None, spans) if number is not None else Ended(own, spans)

    # The chief

    def _collected(self, path: str, spans: list[Span], waits: bool) -> Ended:
        number = self._last[path]
        found = [_of_worker(span, 0, 0.0) for span in spans]
        lacks = {}
        clock_errors = {}
        others = range(1, self._member.size)
        now = time.monotonic()
        to_begin, deadline = now + _TO_BEGIN, now + PATIENCE
        for worker in others if waits else ():
            try:
                received = self._received(path, number, worker, to_begin, deadline)
            except ReplicaEngineError as error:
                received = str(error)
            if isinstance(received, str):
                lacks[worker] = received
                LOGGER.warning("The timeline %r lacks worker %d: %s", path, worker, received)
            else:
                found += received.spans
                clock_errors[worker] = received.clock_error
        self._member.drop(_announced(path, number), _announced(path), _spans(path, number))
        if not waits:
            lacks = dict.fromkeys(others, "the block of the chief has raised")
        return Ended(path, found, lacks, clock_errors)

    def _received(self, path: str, number: int, worker: int, to_begin: float, deadline: float) -> _Received | str:
        """The spans of another worker, or why there are none."""
        name = _spans(path, number, worker)
        parts = self._found(name)
        if parts is None:
            begun = self._found(_begun(path, worker), _until(to_begin))
            # Without an announcement the worker may just have sent its spans and withdrawn the announcement.
            parts = self._found(name, _until(deadline) if begun else 0.0)
            if parts is None:
                late = f"it has not ended its block within {PATIENCE:g} s after the chief"
                return late if begun else "it records no timeline of this path now"
        text = "".join(self._member.get(f"{name}, part {index}", _until(deadline)) for index in range(parts))
        ahead, error = self._clock()
        spans, its_error = json.loads(zlib.decompress(base64.b85decode(text)))
        return _Received(
            [
                Span(Track(*track), label, kind, begin - ahead, end - ahead, details)
                for track, label, kind, begin, end, details in spans
            ],
            None if error is None or its_error is None else error + its_error,
        )

    # The other workers

    def _number(self, path: str) -> int | None:
        """The number of the chief's timeline that this worker's is part of; None if it records alone."""
        after = self._last.get(path, 0)
        try:
            now = self._found(_announced(path))
            if now is not None and now > after:  # more than one later if the chief has recorded alone
                return int(now)
            return self._found(_announced(path, after + 1), _TO_BEGIN)
        except ReplicaEngineError:  # the job has failed, which the program is told elsewhere
            return None

    def _send(self, name: str, spans: list[Span]) -> None:
        ahead, error = self._clock()
        data = [_of_worker(span, self._member.worker, ahead) for span in spans], error
        text = base64.b85encode(zlib.compress(json.dumps(data, default=str).encode())).decode()
        parts = [text[begin : begin + _PART] for begin in range(0, len(text), _PART)]
        for index, part in enumerate(parts):
            self._member.put(f"{name}, part {index}", part)
        self._member.put(name, len(parts))

    def _found(self, key: str, patience: float = 0.0) -> Any:
        """A value at the coordinator; None if there is none in time."""
        try:
            return self._member.get(key, patience)
        except TimeoutError:
            return None

    def _clock(self) -> tuple[float, float | None]:
        """How far the coordinator's clock is ahead, and the error; 0 and None before it was measured."""
        offset = self._member.clock_offset
        return (0.0, None) if offset is None else (offset.seconds, offset.error)


def _of_worker(span: Span, worker: int, ahead: float) -> Span:
    """The span as that of a worker, with its times in another clock that is so many seconds ahead."""
    track: Any = span.track
    track = track._replace(group=f"worker {worker}: {track.group}")
    return span._replace(track=track, begin=span.begin + ahead, end=span.end + ahead)


def _announced(path: str, number: int | None = None) -> str:
    return f"the chief's timeline of {path!r}" + ("." if number is None else f", {number}.")


def _begun(path: str, worker: int) -> str:
    return f"timeline of {path!r} on worker {worker}."


def _spans(path: str, number: int, worker: int | None = None) -> str:
    return f"spans of {path!r}, {number}," + ("" if worker is None else f" of worker {worker}.")


def _until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
