"""The last stage: a program compiled for devices, and running it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from replica_engine.errors import InputsError
from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.xla.arguments import Arguments, difference
from replica_engine.xla.counts import count
from replica_engine.xla.graph_mode import check_mode
from replica_engine.xla.input_queue import InputQueue
from replica_engine.xla.launch import Launch
from replica_engine.xla.resident import Resident, resident_of

if TYPE_CHECKING:
    from replica_engine.xla.lower import Lowered

_counting = threading.Lock()


class Compiled:
    """A replica body, ready to run on N devices.

    Args:
        lowered: the stage before.
        devices: a replica runs on each.
        executable: the program compiled for them.

    Attributes:
        variables: the values on the devices of the captured variables.
    """

    def __init__(self, lowered: Lowered, devices: DeviceGroup, executable: Executable):
        self.lowered = lowered
        self.devices = devices
        traced = lowered.traced
        self.executable = executable
        self._results = len(traced.outputs) - len(lowered.host_results)
        self.variables = [resident_of(handle, devices) for handle in traced.handles]
        self._writes = [(self.variables[variable], result) for variable, result in lowered.writes]
        self._constants: list[Array] | None = None

    def run(
        self,
        slots: Sequence[Sequence[np.ndarray]],
        captured: Sequence[np.ndarray] | None = None,
        feed: InputQueue | None = None,
    ) -> list[list[Any]]:
        """Runs the program on all replicas.

        Args:
            slots: of each slot one value for all replicas, or one for each.
            captured: values of the captured tensors; None if they are eager, and so the same at each launch.
            feed: the inputs of a device loop.

        Returns:
            For each tensor that the body returned the values of the replicas, on the host.

        Raises:
            Exception: what a host call raised; then all variables are as before.
        """
        count("launches")
        put = self.devices.put
        on_host = self.lowered.host_slots
        arguments = [put(values) for index, values in enumerate(slots) if index not in on_host]
        if captured is not None:
            arguments += [put([captured[index]]) for index in self.lowered.captured]
        else:
            if self._constants is None:
                tensors = self.lowered.traced.tensors
                self._constants = [put([tensors[index].numpy()]) for index in self.lowered.captured]
            arguments += self._constants
        left = {index: slots[index] for index in on_host}
        with Launch(self.lowered.traced, self.devices, feed, left) as launch:
            arguments += [variable.array() for variable in self.variables]
            results = launch.carry_out(
                lambda: self.executable.launch(arguments), self._adopt, self.executable.wait, self._lose
            )
            for variable, _ in self._writes:
                variable.launched()
        columns = [self.devices.fetch_all(array) for array in results[: self._results]]
        for index, number in sorted(self.lowered.host_results.items()):
            columns.insert(index, launch.stored([number] * self.devices.size))
        return columns

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Launches of a device loop inside: whoever brings its inputs is told at once that it writes these variables.

        Else it would hang on the moment whether they see the old value or are refused.
        """
        written = [variable for variable, _ in self._writes if isinstance(variable, Resident)]
        self._count_loops(written, 1)
        try:
            yield
        finally:
            self._count_loops(written, -1)

    def _count_loops(self, written: Sequence[Resident], more: int) -> None:
        with _counting:
            for variable in written:
                variable.loops += more

    def _adopt(self, results: list[Array]) -> None:
        for variable, result in self._writes:
            variable.set_array(results[result])

    def _lose(self) -> None:
        for variable, _ in self._writes:
            variable.lose()

    def __call__(self, inputs: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """Runs the body: as `replicate`, with inputs of the shapes and dtypes that it was lowered for.

        Raises:
            InputsError: the inputs have another structure, or other shapes or dtypes.
        """
        traced = self.lowered.traced
        arguments = Arguments.of_inputs(inputs, self.devices.size)
        if arguments.key != traced.key:  # equal Python numbers, where there were different ones
            arguments = Arguments.of_inputs(inputs, self.devices.size, numbers=True)
        shapes = tuple(tuple(slot.shape) for slot in arguments.slots if slot.shape.is_fully_defined())
        if arguments.key != traced.key or shapes != self.lowered.shapes:
            wanted = [
                tf.TensorSpec(shape, slot.dtype) for shape, slot in zip(self.lowered.shapes, traced.slots, strict=True)
            ]
            raise InputsError.other_program(traced.name, difference(arguments.slots, traced.slot_names, wanted))
        check_mode()
        if not tf.executing_eagerly():
            raise InputsError.in_function(traced.name)
        return traced.results(self.run(arguments.numpy()))
