"""Small exchanges between the workers of a job, each one program on the devices of all: the chief's value, a minimum.

All workers must make the same exchanges in the same order; they are compared as all programs are.

An exchange obeys limits: the seconds to wait for the other workers, or None; and the seconds until a warning that it
waits, or None for the setting of the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from replica_engine.errors import CoordinatorRow, ReplicaRow, ReplicaTimeoutError
from replica_engine.errors.threads import note_workers
from replica_engine.pjrt import abandoned
from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.group import Array, DeviceGroup, held_off
from replica_engine.pjrt.partitions import WHOLE, Axes, Layout, with_layout
from replica_engine.telemetry.watchdog import Watch, workers

Limits = tuple[float | None, float | None]

_SMALLEST = 256  # words; sizes are powers of two, so that few programs serve all
_LARGEST = 1 << 24  # words at a time: devices that share a large value may not have the memory for all of it

_PROGRAM = """module @replica_body {{
  func.func public @main(%x: {type}) -> {type} {{
{before}
    %result = "stablehlo.all_reduce"({operand}) ({{
      ^bb0(%a: tensor<{element}>, %b: tensor<{element}>):
        %both = stablehlo.{op} %a, %b : tensor<{element}>
        stablehlo.return %both : tensor<{element}>
    }}) {{replica_groups = dense<[{group}]> : tensor<1x{replicas}xi64>}} : ({type}) -> {type}
    return %result : {type}
  }}
}}
"""
_OF_FIRST = """    %id = stablehlo.replica_id : tensor<ui32>
    %zero = stablehlo.constant dense<0> : tensor<ui32>
    %is_first = stablehlo.compare EQ, %id, %zero : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %nothing = stablehlo.constant dense<0> : {type}
    %own = stablehlo.select %is_first, %x, %nothing : tensor<i1>, {type}"""


def from_chief(devices: DeviceGroup, value: np.ndarray, limits: Limits = (None, None)) -> np.ndarray:
    """The chief's value of an array, bit by bit, on every worker.

    Args:
        devices: the devices of all workers.
        value: this worker's value; of the same dtype and shape on all.
        limits: as above.

    Raises:
        ReplicaTimeoutError or WorkersMissingError: another worker did not come in time.
        WorkerLostError or another failure of the job.
    """
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    received = np.empty_like(data)
    for begin in range(0, max(1, data.size), 4 * _LARGEST):
        piece = data[begin : begin + 4 * _LARGEST]
        words = max(_SMALLEST, 1 << (-(-piece.size // 4) - 1).bit_length())
        sent = np.zeros(words, np.uint32)
        sent.view(np.uint8)[: piece.size] = piece
        chiefs = _run(devices, "ui32", "add", _OF_FIRST, sent, limits)
        received[begin : begin + piece.size] = chiefs.view(np.uint8)[: piece.size]
    return received.view(value.dtype).reshape(value.shape)


def least(devices: DeviceGroup, numbers: Sequence[int], limits: Limits = (None, None)) -> list[int]:
    """For each number, the smallest that any worker has.

    Args:
        devices: the devices of all workers.
        numbers: this worker's numbers, equally many on all workers.
        limits: as above.

    Raises:
        ReplicaTimeoutError, WorkersMissingError, WorkerLostError or another failure: as for `from_chief`.
    """
    return _run(devices, "i64", "minimum", "", np.array(numbers, np.int64), limits).tolist()


def _run(devices: DeviceGroup, element: str, op: str, before: str, value: np.ndarray, limits: Limits) -> np.ndarray:
    """Runs one exchange, within the limits.

    Ctrl-C ends each wait. It is held off between the moment when the program starts and that when its end is awaited.
    """
    devices = devices.flat
    timeout, warn_after = limits
    what = "the chief's value" if before else "a minimum over workers"
    member, began, left = devices.member, time.perf_counter(), threading.Event()
    assert member is not None, "there are several workers"

    def late() -> ReplicaTimeoutError:
        seconds = time.perf_counter() - began
        rows = [
            ReplicaRow(
                devices.first + index, devices.replicas, name, "running on the device", 0, "", points="host call"
            )
            for index, name in enumerate(devices.names)
        ]
        row = CoordinatorRow(threading.current_thread().name, f"waiting for {what}", seconds)
        error = ReplicaTimeoutError.after(timeout or 0.0, rows, row)
        note_workers(error, workers())
        return error

    order = devices.in_flight
    with member.watched(what, warn_after), order if timeout is None else order.within(timeout, late):
        executable = _program(devices, element, value.size, op, before, f"{what}, {value.size} numbers", limits)
        executable.wait_for_turn()
        try:
            with Watch(lambda _: None, timeout=timeout, expire=lambda _: left.set()):
                with held_off():
                    (result,) = executable.launch([devices.put([value])])
                    devices.running_name = what
                executable.wait(left)
            if devices.interrupted:  # the wait was left
                raise late()
        except BaseException:
            abandoned.add(devices)
            raise
        return np.array(devices.fetch(result, 0))


_MOVE = """module @replica_body attributes {{}} {{
  func.func public @main(%x: {type}) -> {type} {{
    return %x : {type}
  }}
}}
"""
_ELEMENTS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "ui"}


def whole(
    devices: DeviceGroup,
    array: Array,
    shape: tuple[int, ...],
    axes: Axes,
    what: str,
    limits: Limits = (None, None),
) -> Array:
    """A value that is divided over devices of several workers, whole on each device.

    The workers meet first. So parts of one state are joined, and never those of two.

    Args:
        devices: the devices of all workers.
        array: the value.
        shape: its shape.
        axes: how it is divided.
        what: the value and its state in words, equal on all workers: "the variable 'w' after 3 steps".
        limits: as above.

    Raises:
        ProgramDisagreementError: another worker reads something else, or in another state, or makes a step.
        WorkersMissingError, WorkerLostError or another failure of the job.
    """
    member = devices.member
    assert member is not None, "there are several workers"
    assert devices.mesh is not None, "the value is divided"
    with devices.in_flight:
        member.meet(f"reading {what}", *limits)
        key = devices, shape, str(array.dtype), axes
        if key not in _programs:
            kind = f"tensor<{''.join(f'{size}x' for size in shape)}{_element(array.dtype)}>"
            layout = Layout(devices.mesh, devices.replicas, devices.rows, (axes,), (WHOLE,))
            text = with_layout(_MOVE.format(type=kind), layout)
            results = [(shape, np.dtype(array.dtype))]
            name = f"a divided variable, {array.dtype}{list(shape)}", ""
            _programs[key] = Executable(text, devices, results, name=name, limits=limits, axes=[WHOLE])
        executable = _programs[key]
        executable.wait_for_turn()
        try:
            with held_off():
                (result,) = executable.launch([array])
                devices.running_name = what
            executable.wait()
        except BaseException:
            abandoned.add(devices)
            raise
        return result


def _element(dtype: np.dtype) -> str:
    """The name of a dtype in StableHLO."""
    name = str(dtype)
    if name == "bool":
        return "i1"
    if name.startswith("complex"):
        return f"complex<f{int(name[7:]) // 2}>"
    letters = name.rstrip("0123456789")
    return f"{_ELEMENTS[letters]}{name[len(letters) :]}" if letters in _ELEMENTS else name.replace("float", "f")


_programs: dict[tuple, Executable] = {}


def _program(
    devices: DeviceGroup, element: str, words: int, op: str, before: str, name: str, limits: Limits
) -> Executable:
    """The compiled program; the limits, which count for its first launch, are those of the call that compiles it."""
    key = devices, element, words, op
    if key in _programs:
        return _programs[key]
    of_type = f"tensor<{words}x{element}>"
    text = _PROGRAM.format(
        type=of_type,
        element=element,
        op=op,
        before=before.format(type=of_type) if before else "",
        group=list(range(devices.replicas)),
        replicas=devices.replicas,
        operand="%own" if before else "%x",
    )
    dtype = np.dtype(np.uint32 if element == "ui32" else np.int64)
    made = _programs[key] = Executable(text, devices, [((words,), dtype)], name=(name, ""), limits=limits)
    return made
