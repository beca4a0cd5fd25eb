"""How far the clocks of two processes are apart, so that one timeline can hold the events of both.

A member sends the time of its clock, and the coordinator answers with the time of its own. If both ways take equally
long, the coordinator reads its clock in the middle of the round trip. They may not, so the result can be wrong by half
of the round trip. The quickest of the last round trips counts.

The clock is `time.perf_counter`, which timelines use. On one machine it is the same for all processes on Linux.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KEPT = 60  # round trips, one a second: clocks drift, so old ones do not count


@dataclass(frozen=True)
class ClockOffset:
    """How far the coordinator's clock is ahead of this process' clock.

    Attributes:
        seconds: to add to a time of this process; negative if the coordinator's clock is behind.
        error: the most that `seconds` can be wrong, in seconds.
    """

    seconds: float
    error: float


class ClockComparison:
    """Compares this process' clock with the coordinator's."""

    def __init__(self) -> None:
        self._measured: deque[ClockOffset] = deque(maxlen=_KEPT)

    def add(self, sent: float, theirs: float, received: float) -> None:
        """Adds a round trip.

        Args:
            sent: when the question was sent, by this process' clock.
            theirs: when it was answered, by the coordinator's clock.
            received: when the answer came, by this process' clock.
        """
        self._measured.append(ClockOffset(theirs - (sent + received) / 2, (received - sent) / 2))

    @property
    def offset(self) -> ClockOffset | None:
        """The best of what was measured lately; None if nothing was."""
        return min(self._measured, key=lambda each: each.error, default=None)
