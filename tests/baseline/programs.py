"""The 200 programs: so many of each family, each drawn with its number.

| family | programs | what they are |
| --- | --- | --- |
| trainings | 42 | Keras' `fit` in a scope, and `replicate_model`: layers, optimizers, losses, callbacks, feeds |
| loops | 58 | loops of the user's own: updates by hand and by optimizers, batches of any size, masks, weights |
| control_flow | 20 | nested branches, loops, functions and tapes with merge calls |
| collectives | 24 | values that cross replicas, in and outside of steps; variables of each synchronization |
| host_calls | 15 | Python functions, strings and tables in steps, and steps of which several are one launch |
| parts | 16 | weights and batches that are divided over devices, along one axis and two |
| saving | 13 | saves that another number of replicas reads |
| errors | 12 | every mistake under both strategies |
"""

from __future__ import annotations

import functools
import random
import zlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tests.baseline import collectives, control_flow, errors, host_calls, loops, parts, saving, trainings
from tests.baseline.record import RAISED
from tests.baseline.start import Numbers, Start

SEED = 54

FAMILIES: dict[ModuleType, int] = {
    trainings: 42,
    loops: 58,
    control_flow: 20,
    collectives: 24,
    host_calls: 15,
    parts: 16,
    saving: 13,
    errors: errors.PROGRAMS,
}
"""The number of programs of each family."""


class Program(NamedTuple):
    """A program.

    Attributes:
        name: its family and its number.
        family: the module that draws and runs it.
        plan: what it is, as data.
    """

    name: str
    family: ModuleType
    plan: Any

    @property
    def check(self) -> int:
        """A number that is another one for another plan."""
        return zlib.crc32(repr(self.plan).encode())

    def numbers(self, nudge: int | None = None) -> Numbers:
        """Runs it: what it computes, by name; a program that raises gives what it raised."""
        try:
            return self.family.run(self.plan, Start(_number(self.name), nudge))
        except Exception as error:
            return {RAISED: np.array(errors.said(error))}


@functools.cache
def programs() -> tuple[Program, ...]:
    """All of them, always the same."""
    return tuple(_drawn(family, index) for family, count in FAMILIES.items() for index in range(count))


def _drawn(family: ModuleType, index: int) -> Program:
    name = f"{family.__name__.rpartition('.')[2]} {index:02d}"
    return Program(name, family, family.drawn(random.Random(f"{SEED} {name}"), index))


def _number(name: str) -> int:
    return random.Random(f"{SEED} {name} values").randrange(2**32)
