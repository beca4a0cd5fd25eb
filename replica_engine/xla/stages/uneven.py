"""Replicas whose shares of a batch differ in shape: the last batch of a dataset, where nothing is summed.

One program has one shape, so replicas with different shapes cannot run the same program. If the body has no
cross-replica operation they need not: each replica's program is compiled for its own share and runs on its own
device. That serves evaluation and prediction, where each sample counts. With cross-replica operations, as in
training, replicas of different shapes are refused before anything runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replica_engine.errors import ReplicaMismatchError
from replica_engine.errors.base import at
from replica_engine.pjrt.executable import ALL, Executable, Stores
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS
from replica_engine.pjrt.lowered_module import of_replica
from replica_engine.xla.stages.body_graph import BodyGraph
from replica_engine.xla.stages.launch import Execution, Launch
from replica_engine.xla.stages.lower import Lowered
from replica_engine.xla.stages.program import BodyProgram
from replica_engine.xla.stages.results import Column, Shape, count
from replica_engine.xla.state.device_value import device_value_of

Lower = Callable[[Sequence[Shape], Sequence[Shape] | None], Lowered]
"""Lowers the body for shapes of its slots and of its captured tensors, or finds it already lowered."""

Compile = Callable[[str, Lowered, DeviceGroup], Executable]
"""Compiles the text of a lowered program for devices, or finds it already compiled."""


def ready_uneven(
    devices: DeviceGroup,
    traced: BodyGraph,
    lower: Lower,
    compile_: Compile,
    slots: Sequence[Sequence[np.ndarray]],
    captured: Sequence[np.ndarray] | None,
) -> Callable[[], list[Column]]:
    """Compiles a body for shares of different shapes.

    Args:
        devices: the devices; one replica runs on each.
        traced: the body.
        lower: lowers the body.
        compile_: compiles the lowered body.
        slots: for each slot, one value for all replicas or one value for each.
        captured: values of the captured tensors; see `Compiled.run`.

    Returns:
        A function that runs the programs, and returns for each result the values of the replicas.

    Raises:
        ReplicaMismatchError: the body has cross-replica operations.
    """
    constants = [tensor.numpy() for tensor in traced.tensors] if captured is None else list(captured)
    shares = [[values[replica % len(values)] for values in slots] for replica in range(devices.size)]
    captured_shapes = None if captured is None else [value.shape for value in captured]
    parts = []
    for replica, share in enumerate(shares):
        lowered = lower([value.shape for value in share], captured_shapes)
        if lowered.has_collectives:
            raise _mismatch(traced, slots)
        text = of_replica(lowered.as_text(), devices.first + replica)
        parts.append((lowered.program, compile_(text, lowered, devices.alone(replica))))
    return functools.partial(_run, devices, parts, shares, constants)


def _mismatch(traced: BodyGraph, slots: Sequence[Sequence[np.ndarray]]) -> ReplicaMismatchError:
    name, shapes = next(
        (name, [value.shape for value in values])
        for name, values in zip(traced.slot_names, slots, strict=True)
        if len({value.shape for value in values}) > 1
    )
    other = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
    met = next((f"{each.kind}{at(each.where)}" for each in traced.collectives), "")
    error = ReplicaMismatchError.shapes(name, other, str(shapes[0]), str(shapes[other]), met)
    error.by_replica = shapes
    return error


def _run(
    devices: DeviceGroup,
    parts: list[tuple[BodyProgram, Executable]],
    shares: list[list[np.ndarray]],
    constants: list[np.ndarray],
) -> list[Column]:
    program = parts[0][0]  # the replicas' programs differ only in their shapes
    variables = [device_value_of(handle, devices) for handle in program.traced.handles]
    writes = [(variables[variable], index) for variable, index in program.writes]
    count("launches")
    program.body.last_program = None  # the replicas ran different ones
    on_host = {index: [share[index] for share in shares] for index in program.host_slots}

    def prepare() -> _UnevenExecution:
        # All parts are taken before the first launch: it may donate its part, and then the whole array counts as gone.
        states = [devices.parts(variable.array()) for variable in variables]
        inputs = []
        for replica, (share, (own, _)) in enumerate(zip(shares, parts, strict=True)):
            put = devices.alone(replica).put
            of_share = [value for index, value in enumerate(share) if index not in on_host]
            values = [*of_share, *(constants[index] for index in own.captured)]
            values = [put([value], each) for value, each in zip(values, own.axes, strict=False)]
            inputs.append([*values, *(state[replica] for state in states)])
        return _UnevenExecution(devices, [executable for _, executable in parts], inputs, writes, program.donates)

    launch = Launch(program, devices, on_host=on_host)
    results = launch(prepare)
    launch.wait_for([array for result in results for array in result[: program.returned]])
    columns: list[Column] = [
        [
            devices.alone(replica).fetch(result[index], 0, parts[replica][0].results[index][0])
            for replica, result in enumerate(results)
        ]
        for index in range(program.returned)
    ]
    for index in sorted(program.host_results):  # each replica's program has its own numbers for them
        columns.insert(index, launch.stored([own.host_results[index] for own, _ in parts]))
    return columns


class _Results:
    """The results of one replica's program; None until it is launched."""

    def __init__(self) -> None:
        self.on_devices: list[Array] | None = None
        self.stores = Stores([(self, ALL)])


class _UnevenExecution(Execution):
    """One launch of an executable for each replica; they do not wait for each other."""

    def __init__(
        self,
        devices: DeviceGroup,
        executables: list[Executable],
        inputs: list[list[Array]],
        writes: list[tuple[Any, int]],
        donates: bool,
    ):
        self.patience = 0.0
        self._devices = devices
        self._executables = executables
        self._inputs = inputs
        self._written = [index for _, index in writes]
        self._stores = Stores([(variable, number) for number, (variable, _) in enumerate(writes)])
        self._donates = donates
        self._launched = [_Results() for _ in executables]

    def wait_for_turn(self) -> None:
        for executable in self._executables:
            executable.wait_for_turn()

    def start(self) -> list[list[Array]]:
        try:
            return self._start()
        except RUNTIME_ERRORS:
            raise
        except BaseException:  # of a signal or a thread: the programs that are not launched yet are launched too
            if self._donates and any(each.on_devices for each in self._launched):
                self._start()
            raise

    def _start(self) -> list[list[Array]]:
        for launched, executable, given in zip(self._launched, self._executables, self._inputs, strict=True):
            if launched.on_devices is None:
                executable.launch(given, launched.stores)
        results: list[Any] = [each.on_devices for each in self._launched]
        if self._donates:
            self.commit(results)
        return results

    def wait(self, left: threading.Event | None = None) -> None:
        for executable in self._executables:
            executable.wait(left)

    def commit(self, results: list[list[Array]]) -> None:
        self._stores.store([self._devices.join([result[index] for result in results]) for index in self._written])
