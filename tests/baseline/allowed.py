"""Differences from the base that are meant, each with the reason.

A line that nothing needs any more goes. A new line is right if the numbers of before were wrong, or if the docs say
that they are new, and no other program differs for that reason without a line.
"""

from __future__ import annotations

import fnmatch
import math
from typing import NamedTuple

from tests.baseline.compare import Difference

ANY = math.inf


class Allowed(NamedTuple):
    """A difference that is meant.

    Attributes:
        programs: the names of programs, as a pattern.
        arrays: the names of arrays, as a pattern.
        most: how large the difference may be, relative to the largest value of the array.
        why: why the values of before were wrong, or why they are others now.
    """

    programs: str
    arrays: str
    most: float
    why: str

    def allows(self, difference: Difference) -> bool:
        """Whether it is this difference."""
        return (
            fnmatch.fnmatchcase(difference.program, self.programs)
            and fnmatch.fnmatchcase(difference.array, self.arrays)
            and difference.largest <= self.most
        )


ALLOWED: tuple[Allowed, ...] = ()
