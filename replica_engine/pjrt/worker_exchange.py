"""Small exchanges between the workers of a job, each one program on the devices of all: the chief's value, a minimum.

All workers must make the same exchanges in the same order; they are compared as all programs are.

An exchange obeys limits: the seconds to wait for the other workers, or None; and the seconds until a warning that it
waits, or None for the setting of the process.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from replica_engine.errors import CoordinatorRow, ReplicaRow, ReplicaTimeoutError, run_errors
from replica_engine.pjrt import device_group
from replica_engine.pjrt.device_group import Array, DeviceGroup, Limits
from replica_engine.pjrt.executable import Executable, Starter, agreed
from replica_engine.pjrt.partitioned_group import PartitionedGroup
from replica_engine.pjrt.stablehlo.partition_local import Axes
from replica_engine.process.interrupts import around
from replica_engine.watch.watchdog import Wait, workers
from replica_engine.workers import Program
from replica_engine.workers.member import Leave, NobodyWaits

T = TypeVar("T")

_SMALLEST = 256  # words; sizes are powers of two, so that few programs serve all
_LARGEST = 1 << 24  # words at a time: devices that share a large value may not have the memory for all of it


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
        if devices.is_chiefs:  # the others' zeros are the least numbers, so the largest are the chief's
            sent.view(np.uint8)[: piece.size] = piece
        chiefs = _take_from_chief(devices, sent, limits)
        received[begin : begin + piece.size] = chiefs.view(np.uint8)[: piece.size]
    return received.view(value.dtype).reshape(value.shape)


def least(devices: DeviceGroup, number: int, limits: Limits = (None, None)) -> int:
    """The smallest number that any worker has: 0 where one has no next batch, for example.

    Args:
        devices: the devices of all workers.
        number: this worker's number, of 32 bits, since TPUs refuse 64 here.
        limits: as above.

    Raises:
        ReplicaTimeoutError, WorkersMissingError, WorkerLostError or another failure: as for `from_chief`.
    """
    agreement = devices.agreement
    assert agreement is not None, "there are several workers"

    def meet(left: Leave) -> int:
        assert devices.member is not None, "there are several workers"
        return devices.member.telling_left(lambda: agreement.least(_LEAST, number, limits, left), left)

    def ready() -> Callable[[Leave], int]:
        devices.wait_for_interrupted()
        return meet

    return _together(devices, _LEAST.body, limits, ready)


# Only its digest is compared: the agreement's own program carries the numbers.
_LEAST = Program(
    hashlib.sha256(b"a minimum over workers").hexdigest()[:16], "the question whether all workers have a next batch"
)


def _take_from_chief(devices: DeviceGroup, value: np.ndarray, limits: Limits) -> np.ndarray:
    """The chief's value of an array of words."""
    what, flat = "the chief's value", devices.flat

    def exchange(executable: Executable, left: Leave) -> np.ndarray:
        (result,) = Starter(executable, flat, what).start([flat.put([value])], left=left)
        executable.wait(left)
        if flat.interrupted:
            raise NobodyWaits
        return np.array(flat.fetch(result, 0))

    def ready() -> Callable[[Leave], np.ndarray]:
        executable = _largest(flat, value, f"{what}, {value.size} numbers", limits)
        _wait_for_turn(executable, devices)
        return functools.partial(exchange, executable)

    return _together(devices, what, limits, ready)


def _together(devices: DeviceGroup, what: str, limits: Limits, ready: Callable[[], Callable[[Leave], T]]) -> T:
    """Makes one exchange within the limits.

    Ctrl-C ends each wait. It is held off between the moment when the program starts and that when its end is awaited.

    Args:
        devices: the devices of all workers.
        what: the exchange, as text.
        limits: as above.
        ready: waits for the turn, and returns what makes the exchange, which is given an event that ends its waits.
    """
    timeout, warn_after = limits
    member, began, left = devices.member, time.perf_counter(), Leave()
    assert member is not None, "there are several workers"

    def late() -> ReplicaTimeoutError:
        seconds, flat = time.perf_counter() - began, devices.flat
        rows = [
            ReplicaRow(flat.first + index, flat.replicas, name, "running on the device", 0, "", points="host call")
            for index, name in enumerate(flat.names)
        ]
        row = CoordinatorRow(threading.current_thread().name, f"waiting for {what}", seconds)
        error = ReplicaTimeoutError.after(timeout or 0.0, rows, row)
        run_errors.note_workers(error, workers())
        return error

    order = devices.in_flight
    with member.watched(what, warn_after), order if timeout is None else order.within(timeout, late):
        exchange = ready()
        wait = Wait(None, timeout=timeout, late=TimeoutError, breaker=left.set)
        try:
            return around(wait, lambda: exchange(left))
        except NobodyWaits:
            raise late() from None
        finally:
            _leave(devices)


def _wait_for_turn(executable: Executable, devices: DeviceGroup) -> None:
    """Waits until a program for the `flat` of devices may start; one that was left may still run on the devices."""
    devices.wait_for_interrupted()
    executable.wait_for_turn()


def _leave(devices: DeviceGroup) -> None:
    """Leaves the program that was launched last on the `flat` of devices: their own next program waits for its end.

    After a program that has ended, this changes nothing.
    """
    flat = devices.flat
    if devices.agreement is not None:
        devices.agreement.leave_to(flat)
    if flat.interrupted and not flat.ends_within(0.0):
        devices.running, devices.running_name, devices.interrupted = flat.running, flat.running_name, True
    device_group.add(devices)


_ELEMENTS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "ui"}


def whole(
    devices: PartitionedGroup, array: Array, axes: Axes, what: str, into: np.ndarray, limits: Limits = (None, None)
) -> None:
    """Puts a value that is divided over devices of several workers together on the host of each.

    The workers meet first. So parts of one state are joined, and never those of two. Each part is gathered piece by
    piece: the devices may not have the memory for the whole value.

    Args:
        devices: the devices of all workers.
        array: the value.
        axes: how it is divided.
        what: the value and its state as text, equal on all workers: "the variable 'w' after 3 steps".
        into: gets the value; has its shape and dtype.
        limits: as above.

    Raises:
        ProgramDisagreementError: another worker reads something else, or in another state, or makes a step.
        WorkersMissingError, WorkerLostError or another failure of the job.
    """
    member, flat = devices.member, devices.flat
    assert member is not None, "there are several workers"
    parts, begins = devices.on_each_device(array), devices.begins(into.shape, axes)
    part = parts.shape[int(devices.rows) :]
    along = part.index(max(part))
    size = part[along]
    width = max(1, min(size, 4 * _LARGEST * size // (parts.nbytes * len(begins))))
    with devices.in_flight:
        member.meet(f"reading {what}", *limits)
        executable = _gather(devices, part, np.dtype(array.dtype), along, width, limits)
        starter = Starter(executable, flat, what)
        _wait_for_turn(executable, devices)
        try:
            # All pieces have one size, so that one program reads them: the last one begins earlier.
            for begin in (min(each, size - width) for each in range(0, size, width)):
                (result,) = starter.start([parts, flat.put([np.array(begin, np.int32)])])
                executable.wait()
                for place, piece in zip(begins, flat.fetch(result, 0), strict=True):
                    at = [first + begin * (axis == along) for axis, first in enumerate(place)]
                    there = into[tuple(map(slice, at, map(int.__add__, at, piece.shape)))]
                    there[...] = piece[tuple(map(slice, there.shape))]
        finally:
            _leave(devices)


def _gather(
    devices: PartitionedGroup, part: tuple[int, ...], dtype: np.dtype, along: int, width: int, limits: Limits
) -> Executable:
    """The program that gives each device, from all devices of its replica, a piece of what each has."""
    key = devices, part, str(dtype), width
    if key not in _programs:
        size, element = devices.devices_each, element_name(dtype)
        sizes = [*part[:along], width, *part[along + 1 :]]
        shapes = [*[1] * devices.rows, *part], part, sizes, [1, *sizes], [size, *sizes]
        stored, plain, piece, row, gathered = (tensor_type(each, element) for each in shapes)
        begins = ", ".join("%begin" if axis == along else "%zero" for axis in range(len(part)))
        numbers = ", ".join(["tensor<i32>"] * len(part))
        groups = np.arange(devices.replicas * size).reshape(-1, size).tolist()
        text = f"""module @replica_body attributes {{}} {{
          func.func public @main(%x: {stored}, %begin: tensor<i32>) -> {gathered} {{
            %part = stablehlo.reshape %x : ({stored}) -> {plain}
            %zero = stablehlo.constant dense<0> : tensor<i32>
            %piece = stablehlo.dynamic_slice %part, {begins}, sizes = {sizes} : ({plain}, {numbers}) -> {piece}
            %row = stablehlo.reshape %piece : ({piece}) -> {row}
            %result = "stablehlo.all_gather"(%row) {{
              all_gather_dim = 0 : i64, replica_groups = dense<{groups}> : tensor<{devices.replicas}x{size}xi64>
            }} : ({row}) -> {gathered}
            return %result : {gathered}
          }}
        }}
        """
        name = f"reading a divided variable, {dtype}{list(part)} on each device", ""
        _programs[key] = _compiled(text, devices.flat, ((size, *sizes), dtype), name, limits)
    return _programs[key]


def tensor_type(sizes: Sequence[int], element: str) -> str:
    """The type of a tensor in StableHLO."""
    return f"tensor<{''.join(f'{size}x' for size in sizes)}{element}>"


def element_name(dtype: np.dtype) -> str:
    """The name of a dtype in StableHLO."""
    name = str(dtype)
    if name == "bool":
        return "i1"
    if name.startswith("complex"):
        return f"complex<f{int(name[7:]) // 2}>"
    letters = name.rstrip("0123456789")
    if letters in _ELEMENTS:
        return f"{_ELEMENTS[letters]}{name[len(letters) :]}"
    return f"f{name.removeprefix('float').replace('_', '').upper()}"  # float8_e4m3fn is f8E4M3FN


_programs: dict[tuple, Executable] = {}


def _compiled(
    text: str, devices: DeviceGroup, result: tuple[tuple[int, ...], np.dtype], name: tuple[str, str], limits: Limits
) -> Executable:
    return Executable(text, devices, [result], compared=agreed(text, devices, name, limits), limits=limits)


def _largest(devices: DeviceGroup, value: np.ndarray, name: str, limits: Limits) -> Executable:
    """The compiled program; the limits, which count for its first launch, are those of the call that compiles it."""
    key = devices, value.size
    if key not in _programs:
        element = element_name(value.dtype)
        kind, one, replicas = f"tensor<{value.size}x{element}>", f"tensor<{element}>", devices.replicas
        text = f"""module @replica_body {{
          func.func public @main(%x: {kind}) -> {kind} {{
            %result = "stablehlo.all_reduce"(%x) ({{
              ^bb0(%a: {one}, %b: {one}):
                %both = stablehlo.maximum %a, %b : {one}
                stablehlo.return %both : {one}
            }}) {{replica_groups = dense<[{list(range(replicas))}]> : tensor<1x{replicas}xi64>}} : ({kind}) -> {kind}
            return %result : {kind}
          }}
        }}
        """
        _programs[key] = _compiled(text, devices, (value.shape, value.dtype), (name, ""), limits)
    return _programs[key]
