"""Replicas whose shares of a batch differ in shape: the last batch of a data set, when nothing is summed.

One program has one shape, so replicas with different shapes cannot run the same one. Where the body has no
cross-replica operation they need not: each replica's program is compiled for its own share and runs on its own
device. That serves evaluation and prediction, where each sample counts. With cross-replica operations, as in
training, replicas of different shapes are refused before anything runs.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from replica_engine.errors import ReplicaMismatchError
from replica_engine.errors.base import at
from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.group import Array
from replica_engine.xla.counts import count
from replica_engine.xla.launch import Launch
from replica_engine.xla.lower import Lowered
from replica_engine.xla.resident import resident_of

if TYPE_CHECKING:
    from replica_engine.xla.program import TracedProgram

_COLLECTIVE = re.compile(r"stablehlo\.(all_reduce|collective_permute)\b|@replica_engine\.(?!host_call)")
_REPLICA_ID = re.compile(r"stablehlo\.replica_id : tensor<ui32>")


def ready_uneven(
    program: TracedProgram, slots: Sequence[Sequence[np.ndarray]], captured: Sequence[np.ndarray] | None
) -> Callable[[], list[list[np.ndarray]]]:
    """Compiles a body for shares of different shapes.

    Args:
        program: the body.
        slots: of each slot one value for all replicas, or one for each.
        captured: as of `Compiled.run`.

    Returns:
        What runs it, and returns for each result the values of the replicas.

    Raises:
        ReplicaMismatchError: the body has cross-replica operations.
    """
    tensors = program.traced.tensors
    constants = [tensor.numpy() for tensor in tensors] if captured is None else list(captured)
    shares = [[values[replica % len(values)] for values in slots] for replica in range(program.devices.size)]
    steps = [_compile(program, replica, share, slots, captured) for replica, share in enumerate(shares)]
    return functools.partial(_run, program, shares, constants, steps)


def _run(
    program: TracedProgram,
    shares: list[list[np.ndarray]],
    constants: list[np.ndarray],
    steps: list[tuple[Lowered, Executable]],
) -> list[list[np.ndarray]]:
    devices, traced = program.devices, program.traced
    variables = [resident_of(handle, devices) for handle in traced.handles]
    count("launches")
    writes = [(variables[variable], index) for variable, index in steps[0][0].writes]

    def adopt(results: list[list[Array]]) -> None:
        for variable, index in writes:
            variable.set_array(devices.join([result[index] for result in results]))

    def lose() -> None:
        for variable, _ in writes:
            variable.lose()

    def wait(left: threading.Event | None) -> None:
        for _, executable in steps:
            executable.wait(left)

    left = {index: [share[index] for share in shares] for index in traced.host_slots}
    with Launch(traced, devices, on_host=left) as launch:
        # All parts before the first launch: it may donate its own, and then the whole counts as gone.
        states = [devices.parts(variable.array()) for variable in variables]
        inputs = []
        for replica, (share, (lowered, _)) in enumerate(zip(shares, steps, strict=True)):
            put = devices.alone(replica).put
            of_share = [value for index, value in enumerate(share) if index not in left]
            values = [put([value]) for value in (*of_share, *(constants[index] for index in lowered.captured))]
            inputs.append([*values, *(state[replica] for state in states)])
        # They do not wait for each other, so all may be in flight.
        results = launch.carry_out(
            lambda: [executable.launch(given) for (_, executable), given in zip(steps, inputs, strict=True)],
            adopt,
            wait,
            lose,
        )
        for variable, _ in writes:
            variable.launched()
    on_host = [lowered.host_results for lowered, _ in steps]  # a program each, and other numbers
    returned = len(traced.outputs) - len(on_host[0])
    columns = [[devices.fetch(result[index], 0) for result in results] for index in range(returned)]
    for index in sorted(on_host[0]):
        columns.insert(index, launch.stored([numbers[index] for numbers in on_host]))
    return columns


def _compile(
    program: TracedProgram, replica: int, share: list[np.ndarray], slots: Any, captured: Any
) -> tuple[Lowered, Executable]:
    lowered = program.lowered([value.shape for value in share], captured and [value.shape for value in captured])
    text = lowered.as_text()
    if _COLLECTIVE.search(text):
        name, shapes = next(
            (name, [value.shape for value in values])
            for name, values in zip(program.traced.slot_names, slots, strict=True)
            if len({value.shape for value in values}) > 1
        )
        other = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
        met = next((f"{each.kind}{at(each.where)}" for each in program.traced.collectives), "")
        raise ReplicaMismatchError.shapes(name, other, str(shapes[0]), str(shapes[other]), met)
    text = _REPLICA_ID.sub(f"stablehlo.constant dense<{replica}> : tensor<ui32>", text)
    return lowered, program.executable(text, lowered, program.devices.alone(replica))
