"""For how long a member has heard nothing of the coordinator.

Time in which the process itself did not run does not count: a machine that was suspended, or is much too busy, could
not hear anything either.
"""

from __future__ import annotations

_LATE = 0.2  # seconds; a process that runs later than this after it was to has stood still


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
