"""One timeline of all workers: each sends its spans through the coordinator, and the chief writes the file.

Times are those of the chief. Each worker knows how far its clock is from the coordinator's (`hosts/clock.py`), so it
sends times of the coordinator. The n-th timeline of one worker belongs to the n-th of the others; a worker that records
none is left out. What must never happen is that a program waits for long, or fails, because another worker has not come
to the end of its block: then the file lacks that worker, and says so.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import zlib
from typing import Any, Protocol

from replica_engine.errors import ReplicaEngineError
from replica_engine.telemetry.timeline import Span
from replica_engine.telemetry.trace_file import Track

LOGGER = logging.getLogger("replica_engine")

PATIENCE = 30.0
"""Seconds for which the chief waits for another worker at the end of a timeline."""

_PART = 500_000  # characters of a message, which may have a megabyte


class Ahead(Protocol):
    """How far the coordinator's clock is ahead of this process' clock.

    Attributes:
        seconds: as seconds.
    """

    @property
    def seconds(self) -> float: ...


class Member(Protocol):
    """This process as a worker of its job: `hosts.Member`, as far as it is needed here."""

    worker: int
    size: int

    @property
    def clock_offset(self) -> Ahead | None: ...

    def put(self, key: str, value: Any) -> None: ...

    def drop(self, *prefixes: str) -> None: ...

    def get(self, key: str, timeout: float | None = None) -> Any: ...


class SharedTimelines:
    """The timelines of this process, as parts of the job's.

    Args:
        member: the connection to the job.
    """

    def __init__(self, member: Member):
        self._member = member
        self._numbers = itertools.count()
        self.writes = member.worker == 0
        """Whether this worker writes the file."""

    def begin(self) -> int:
        """A timeline begins; returns its number."""
        number = next(self._numbers)
        self._member.put(f"timeline {number} of worker {self._member.worker} begins", True)
        return number

    def end(self, number: int, spans: list[Span], waits: bool) -> list[Span] | None:
        """A timeline has ended.

        Args:
            number: what `begin` returned.
            spans: what this worker has recorded.
            waits: whether to wait for the other workers; not after a failure.

        Returns:
            The spans of all workers for the file; None if another worker writes it.
        """
        if not self.writes:
            self._send(number, spans)
            return None
        found = [_of_worker(span, 0, 0.0) for span in spans]
        for worker in range(1, self._member.size) if waits else ():
            try:
                found += self._received(number, worker)
            except ReplicaEngineError as error:
                LOGGER.warning("The timeline lacks worker %d: %s", worker, error)
        return found

    def _send(self, number: int, spans: list[Span]) -> None:
        ahead = self._offset()
        data = [_of_worker(span, self._member.worker, ahead) for span in spans]
        text = base64.b85encode(zlib.compress(json.dumps(data, default=str).encode())).decode()
        name = f"timeline {number} of worker {self._member.worker}"
        parts = [text[begin : begin + _PART] for begin in range(0, len(text), _PART)]
        for index, part in enumerate(parts):
            self._member.put(f"{name}, part {index}", part)
        self._member.put(name, len(parts))

    def _received(self, number: int, worker: int) -> list[Span]:
        name = f"timeline {number} of worker {worker}"
        try:
            self._member.get(f"{name} begins", 0.0)
        except TimeoutError:
            return []  # it records none
        parts = self._member.get(name, PATIENCE)
        text = "".join(self._member.get(f"{name}, part {index}", PATIENCE) for index in range(parts))
        for index in range(parts):
            self._member.put(f"{name}, part {index}", "")  # which frees the coordinator's memory
        behind = -self._offset()
        spans = json.loads(zlib.decompress(base64.b85decode(text)))
        return [
            Span(Track(*track), label, kind, begin + behind, end + behind, details)
            for track, label, kind, begin, end, details in spans
        ]

    def _offset(self) -> float:
        """How far the coordinator's clock is ahead; 0 before it was measured, which takes a moment."""
        offset = self._member.clock_offset
        return 0.0 if offset is None else offset.seconds


def _of_worker(span: Span, worker: int, ahead: float) -> Span:
    """The span as that of a worker, with its times in another clock that is so many seconds ahead."""
    track: Any = span.track
    track = track._replace(group=f"worker {worker}: {track.group}")
    return span._replace(track=track, begin=span.begin + ahead, end=span.end + ahead)
