"""A script whose compiled steps are planned and not run: what `replica-engine plan` does.

While a rehearsal is on, each program is planned where it would be compiled, and its launch changes nothing: variables
keep their values, and what a step returns is zero. So the script comes to its later steps without having trained. It
ends as soon as a step that writes variables would run once too often, in the middle of whatever it does: nothing after
the steps may happen, such as writing a checkpoint of a model that was not trained.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from replica_engine.errors import DeviceError, ProgramError
from replica_engine.pjrt.executable import Executable, Stores
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.pjrt.plans.chips import slice_named
from replica_engine.pjrt.plans.plan import Plan

FITS, DOES_NOT = 0, 1
"""Exit statuses: all steps fit; a step does not fit, or cannot be compiled."""


@dataclass
class Rehearsal:
    """A script without its steps.

    Attributes:
        topology: the chips to plan for; None for CPU devices.
        launches: how often a step that writes variables may run before the script ends.
        planned: how many steps were planned.
        status: the exit status so far.
    """

    topology: str | None
    launches: int = 1
    planned: int = field(default=0, init=False)
    status: int = field(default=FITS, init=False)

    @property
    def count(self) -> int | None:
        """How many devices a strategy gets that does not say; None for as many as without a rehearsal."""
        return None if self.topology is None else slice_named(self.topology).size

    def note(self, name: str, make: Callable[[], Plan]) -> Plan | None:
        """Plans a step and prints the plan. Returns it, or None if the step cannot be compiled."""
        self.planned += 1
        try:
            plan = make()
        except (DeviceError, ProgramError) as error:
            self.status = DOES_NOT
            print(f"\n{name}: cannot be compiled for {self.topology or 'CPU'}:\n  {error}", flush=True)
            return None
        if plan.fits is False:
            self.status = DOES_NOT
        print(f"\n{plan}", flush=True)
        return plan

    def end(self) -> NoReturn:
        """Ends the process at once; no code of the script runs any more."""
        print(f"\nplanned {self.planned} step{'s' * (self.planned != 1)}; nothing was trained", flush=True)
        sys.stderr.flush()
        os._exit(self.status)


_current: list[Rehearsal] = []


def begin(rehearsal: Rehearsal) -> None:
    """Begins a rehearsal, which goes on until the process ends."""
    _current.append(rehearsal)


def current() -> Rehearsal | None:
    """The rehearsal that is on, or None."""
    return _current[-1] if _current else None


class Rehearsed(Executable):
    """A program that was planned in place of being compiled; see the head of this file.

    Args:
        rehearsal: the rehearsal.
        devices: the devices that its results are put on.
        results: shape and dtype of each result.
        writes: for each variable that is written, its index among the last `variables` arguments, and among the
            results.
        variables: how many variables the program takes.
        trains: whether it is a step that writes variables other than metrics, so its launches count.
        planned: the plan of it; None if it is not a step, or cannot be compiled.
        ends: whether the script ends when it is launched: what the host does in a launch does not happen here.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        devices: DeviceGroup,
        results: Sequence[tuple[tuple[int, ...], np.dtype]],
        writes: Sequence[tuple[int, int]],
        variables: int,
        trains: bool,
        planned: Plan | None,
        ends: bool,
    ):
        self._rehearsal = rehearsal
        self._devices = devices
        self._shapes = results
        self._writes = {result: variable for variable, result in writes}
        self._variables = variables
        self._counts = trains
        self._planned = planned
        self._ends = ends
        self._launches = 0
        self.waits = True
        self.bytes_needed = 0
        self.seconds = 0.0

    def serialized(self) -> bytes | None:
        """None: there is no program."""
        return None

    def plan(self, name: str, chip: int | None) -> Plan:
        """The plan that was made of it."""
        assert self._planned is not None, "the program of a step that could be compiled"
        return self._planned

    def launch(self, arrays: list[Array], stores: Stores | None = None) -> list[Array]:
        """Returns zeros, and the old values of variables in place of new ones."""
        self._launches += self._counts
        if self._ends or self._launches > self._rehearsal.launches:
            self._rehearsal.end()
        first = len(arrays) - self._variables
        results: list[Any] = [
            arrays[first + self._writes[index]] if index in self._writes else self._devices.put([np.zeros(*like)])
            for index, like in enumerate(self._shapes)
        ]
        if stores is not None:
            stores.store(results)
        return results

    def wait_for_turn(self) -> None:
        """Returns at once: nothing runs."""

    def wait(self, left: Any = None) -> None:
        """Returns at once: nothing runs."""
