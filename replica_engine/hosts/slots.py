"""Which workers of a launched job start: all at first, fewer while some are lost.

A job of `--workers 2:4` has four slots. A worker keeps its slot, while its index says which place it has among those
that started together. One failure says little, since after `kill -9` the same slot works again. A second one before the
slot has made a step says that it is lost, and the next start leaves it out, unless too few would be left.

Two slots that are lost together take turns in failing first. So what counts is a failure of the same slot since the job
last made a step, not that of the start before.
"""

from __future__ import annotations

AT_ONCE = 1  # the step of a worker that has failed in its first step


class Slots:
    """The slots of a job.

    Args:
        fewest: how many workers are started at least.
        most: how many there are.

    Attributes:
        present: those that the next start has, in the order of the workers.
    """

    def __init__(self, fewest: int, most: int):
        self._fewest, self._most = fewest, most
        self._suspects: set[int] = set()
        self.present = list(range(most))

    @property
    def missing(self) -> int:
        """How many slots the next start leaves out."""
        return self._most - len(self.present)

    def failed(self, slot: int, step: int | None) -> bool:
        """Takes note that a slot failed first in a start.

        Args:
            slot: which.
            step: the last step that it reported; None if it reported none.

        Returns:
            Whether the next start leaves it out.
        """
        at_once = (step or 0) <= AT_ONCE
        lost = at_once and slot in self._suspects and len(self.present) > self._fewest
        if lost:
            self._suspects.remove(slot)
            self.present.remove(slot)
        else:
            self._suspects = {slot, *(self._suspects if at_once else ())}
        return lost

    def restore(self) -> None:
        """Has all slots in the next start: those that were lost are said to be back."""
        self._suspects.clear()
        self.present = list(range(self._most))
