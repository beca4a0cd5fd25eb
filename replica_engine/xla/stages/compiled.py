"""The last stage: a program compiled for devices, and running it."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.errors import InputsError
from replica_engine.pjrt.devices import chip_memory
from replica_engine.pjrt.plan import Memory, Plan
from replica_engine.xla import body
from replica_engine.xla.arguments import Arguments, difference
from replica_engine.xla.stages import body_graph, launch
from replica_engine.xla.state.device_value import DeviceValue


class Compiled(launch.Launchable):
    """A replica body, ready to run on N devices.

    Args:
        program: the data of the lowered body.
        devices: the devices; one replica runs on each.
        executable: the program compiled for these devices.
        branches: as for `Launchable`.

    Attributes:
        variables: the values of the captured variables on the devices.
        step_seconds: how long a step of a device loop takes, by earlier launches; None before the first.
    """

    step_seconds: float | None = None

    def plan(self) -> Plan:
        """What the compiler says of the program: memory and work on each device. Nothing runs.

        Returns:
            A `Plan`. CPU devices share the machine's memory, so each has an equal part of it; `cost.cycles` is None.
        """
        return self.executable.plan(self.program.name, chip_memory(self.devices))

    def memory(self) -> Memory:
        """The `memory` of `plan`, without the rest, which takes longer."""
        return self.executable.memory(chip_memory(self.devices))

    def run(
        self, slots: launch.Slots, captured: Sequence[np.ndarray] | None = None, as_arrays: bool = False
    ) -> list[body_graph.Column]:
        """Runs the program on all replicas.

        Args:
            slots: for each slot, one value for all replicas or one value for each.
            captured: values of the captured tensors; None if they are eager, and so the same at each launch.
            as_arrays: whether the values of the replicas are wanted as arrays.

        Returns:
            For each tensor that the body returned, the values of the replicas, on the host, or what makes them.

        Raises:
            Exception: a host call raised it. Then all variables are as before.
        """
        return launch.Launch(self)(slots, captured).columns(as_arrays)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, a device loop runs: a thread that reads these variables for its inputs gets an error at once.

        Otherwise timing would decide between a stale value and an error.
        """
        sets = [variable.loops for variable in self.stores.objects if isinstance(variable, DeviceValue)]
        this = object()
        try:
            # One call in C: an exception of a signal comes before it or after it, and leaves no variable marked for
            # ever.
            deque(map(set.add, sets, itertools.repeat(this)), 0)
            yield
        finally:
            deque(map(set.discard, sets, itertools.repeat(this)), 0)

    def __call__(self, inputs: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """Runs the body, like `replicate`, with inputs of the shapes and dtypes that it was lowered for.

        Raises:
            InputsError: the inputs have another structure, or other shapes or dtypes.
        """
        program = self.program
        arguments = Arguments.from_inputs(inputs, self.devices.size)
        key = program.traced.key
        if arguments.key != key:  # Python numbers that are equal now and differed when the body was lowered
            arguments = Arguments.from_inputs(inputs, self.devices.size, numbers=True)
        shapes = tuple(tuple(slot.shape) for slot in arguments.slots if slot.shape.is_fully_defined())
        if arguments.key != key or shapes != program.shapes:
            unlike = difference(arguments.slots, program.traced.slot_names, program.slots)
            raise InputsError(
                f"`{program.name}` was not compiled for these inputs: {unlike}. Lower it again with the new inputs: "
                "xla.lower(fn, inputs).compile()."
            )
        body.check_mode()
        if not tf.executing_eagerly():
            raise InputsError(
                f"`{program.name}` is compiled and runs in eager mode. In a tf.function, call xla.replicate(fn, "
                "inputs)."
            )
        return program.traced.replicas_results(self.run(arguments.numpy(), as_arrays=self.is_queued))
