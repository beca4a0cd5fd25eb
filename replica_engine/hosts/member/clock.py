"""Time, as the processes of a job see it: how far two clocks are apart, and for how long a member has heard nothing.

One timeline can hold the events of two processes if it is known how far their clocks are apart. A member sends the time
of its clock, and the coordinator answers with the time of its own. If both ways take equally long, the coordinator
reads its clock in the middle of the round trip. They may not, so the result can be wrong by half of the round trip. The
quickest of the last round trips counts.

This clock is `time.perf_counter`, which timelines use. On one machine it is the same for all processes on Linux.

For silence, time in which the process itself did not run does not count: a machine that was suspended, or is much too
busy, could not hear anything either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KEPT = 60  # round trips, one a second: clocks drift, so old ones do not count
_LATE = 0.2  # seconds; a process that runs later than this after it was to has stood still


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
        measured = tuple(self._measured)  # the thread that talks to the coordinator adds to it at any time
        return min(measured, key=lambda each: each.error, default=None)


class Silence:
    """For how long nothing was heard, less the time in which this process itself did not run and could not hear.

    Args:
        now: the time, in seconds of `time.monotonic`, as all times here.
    """

    def __init__(self, now: float):
        self._since = self._round = now

    def end(self, now: float) -> None:
        """Something has been heard."""
        self._since = now

    def seconds(self, now: float, planned: float) -> float:
        """How long it has lasted.

        Args:
            now: the time at the end of a round of waiting and reading.
            planned: how many seconds the round was to wait at most. What arrived while it lasted longer may be read
                in the next round only.
        """
        stood_still = max(now - self._round - planned - _LATE, 0.0)
        self._since = min(self._since + stood_still, now)
        self._round = now
        return now - self._since
