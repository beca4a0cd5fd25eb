"""Replicas whose shares of a batch differ in shape: the last batch of a dataset, where nothing is summed.

One program has one shape, so replicas with different shapes cannot run the same program. If the body has no
cross-replica operation they need not: each replica's program is compiled for its own share and runs on its own
device. That serves evaluation and prediction, where each sample counts. With cross-replica operations, as in
training, replicas of different shapes are refused before anything runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from replica_engine.errors import ReplicaMismatchError
from replica_engine.errors.base import at
from replica_engine.errors.hosts import JOB_FAILURES
from replica_engine.hosts import Program
from replica_engine.pjrt.executable import ALL, NO_STORES, Executable, Stores
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS
from replica_engine.pjrt.lowered_module import of_replica
from replica_engine.xla.stages.body_graph import BodyGraph
from replica_engine.xla.stages.launch import Launch, Launchable, Slots
from replica_engine.xla.stages.lower import Lowered
from replica_engine.xla.stages.results import Column

Compile = Callable[[str, Lowered, DeviceGroup], Executable]
"""Compiles the text of a lowered program for devices, or finds it already compiled."""


class Uneven(Launchable):
    """A body compiled for shares of different shapes, for a `Launch`.

    Its `itself` stays None: the replicas run different programs, and the body has no last one then.

    Args:
        devices: the devices; one replica runs on each.
        lowered: the body lowered for each replica. It is asked for one after the other, so that an error comes early.
        compile_: compiles the lowered body.
        slots: for each slot, one value for all replicas or one value for each.

    Raises:
        ReplicaMismatchError: the body has cross-replica operations.
    """

    def __init__(self, devices: DeviceGroup, lowered: Iterable[Lowered], compile_: Compile, slots: Slots):
        programs, executables = [], []
        for replica, each in enumerate(lowered):
            if each.has_collectives:
                raise _mismatch(each.traced, slots)
            text = of_replica(each.as_text(), devices.first + replica)
            programs.append(each.program)
            executables.append(compile_(text, each, devices.alone(replica)))
        written = [index for _, index in programs[0].writes]
        super().__init__(programs, devices, _Apart(devices, executables, written))

    def prepared(self, slots: Slots, captured: Sequence[np.ndarray] | None) -> Callable[[], list[Array]]:
        """See `Launchable.prepared`: the arguments of each replica's program."""
        on_host = self.program.host_slots
        constants = [tensor.numpy() for tensor in self.program.traced.tensors] if captured is None else captured

        def arguments() -> list[Array]:
            # All parts are taken before the first launch: it may donate its part, and then the whole array counts as
            # gone.
            states = [self.devices.parts(variable.array()) for variable in self.variables]
            inputs = []
            for replica, program in enumerate(self.programs):
                put = self.devices.alone(replica).put
                share = [values[replica % len(values)] for index, values in enumerate(slots) if index not in on_host]
                values = [*share, *(constants[index] for index in program.captured)]
                given = [put([value], each) for value, each in zip(values, program.axes, strict=False)]
                inputs.append([*given, *(state[replica] for state in states)])
            return inputs

        return arguments

    def columns(self, launch: Launch, results: list[Array], as_arrays: bool) -> list[Column]:
        """See `Launch.columns`: always arrays."""
        returned = results[: self.program.returned]
        launch.wait_for([array for arrays in returned for array in arrays])
        return [
            [
                self.devices.alone(replica).fetch(array, 0, program.results[index][0])
                for replica, (program, array) in enumerate(zip(self.programs, arrays, strict=True))
            ]
            for index, arrays in enumerate(returned)
        ]


def _mismatch(traced: BodyGraph, slots: Sequence[Sequence[np.ndarray]]) -> ReplicaMismatchError:
    slot = next(index for index, values in enumerate(slots) if len({value.shape for value in values}) > 1)
    name, shapes = traced.slot_names[slot], [value.shape for value in slots[slot]]
    other = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
    met = next((f"{each.kind}{at(each.where)}" for each in traced.collectives), "")
    error = ReplicaMismatchError.shapes(name, other, str(shapes[0]), str(shapes[other]), met)
    error.by_replica = shapes
    return error


class _Results:
    """The results of one replica's program; None until it is launched."""

    def __init__(self) -> None:
        self.on_devices: list[Array] | None = None
        self.stores = Stores([(self, ALL)])

    def invalidate(self) -> None:
        """See `Stores.invalidate`."""
        self.on_devices = None

    def launched(self) -> None:
        """See `Stores.launched`: nothing is to be done on the host."""


class _Apart:
    """Executables that are launched together, one for each replica; they do not wait for each other.

    Args:
        devices: the devices.
        executables: the executables.
        written: which results are values of variables.
    """

    compared: Program | None = None
    limits: tuple[float | None, float | None] = (None, None)

    def __init__(self, devices: DeviceGroup, executables: list[Executable], written: list[int]):
        self._devices = devices
        self._executables = executables
        self._written = written

    def wait_for_turn(self) -> None:
        for executable in self._executables:
            executable.wait_for_turn()

    def launch(self, arrays: list[Array], stores: Stores = NO_STORES) -> list[Array]:
        """Launches all programs, or none.

        Returns:
            For each result of the body the arrays of the replicas, and each variable's value, joined.
        """
        launched = [_Results() for _ in self._executables]
        try:
            return self._launch(launched, arrays, stores)
        except (*RUNTIME_ERRORS, *JOB_FAILURES):
            raise
        except BaseException:  # of a signal or a thread: the programs that are not launched yet are launched too
            # The values that some replicas gave away are gone, and only all new ones can be joined.
            if stores.objects and any(each.on_devices for each in launched):
                self._launch(launched, arrays, stores)
            raise

    def _launch(self, launched: Sequence[_Results], arrays: list[Array], stores: Stores) -> list[Array]:
        for each, executable, given in zip(launched, self._executables, arrays, strict=True):
            if each.on_devices is None:
                executable.launch(given, each.stores)
        of_each = [each.on_devices or [] for each in launched]
        results: list[Any] = list(map(list, zip(*of_each, strict=True)))
        for index in self._written:
            results[index] = self._devices.join(results[index])
        stores.store(results)
        return results

    def wait(self, left: threading.Event | None = None) -> None:
        for executable in self._executables:
            executable.wait(left)
