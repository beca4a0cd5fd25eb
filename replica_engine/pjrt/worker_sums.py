"""Sums and gathers of arrays over the workers of a job, over jaxlib's Gloo: one program for each signature.

Each program begins with a gather of what the workers launch: the digest of the call, its number, and the shapes. Its
sums are in a branch that runs only where all are equal. So launches that are swapped between workers give no number.
Gloo ends a process whose sum meets one of another size: those never meet either. What fits beside the digest travels
with it, in one round, and is added up on each host in the order of the workers.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from replica_engine.errors import ProgramError
from replica_engine.pjrt import agreement, device_group, jaxlib
from replica_engine.pjrt.executable import Executable, Starter
from replica_engine.pjrt.worker_exchange import element_name, from_chief, tensor_type
from replica_engine.process import sums_are_ordered
from replica_engine.workers import Program

PACKED = 1 << 20
"""Bytes from which an array travels by itself; smaller ones are one flat array, since each costs a round of its own."""

_HEAD, _WORDS = 5, 261  # of 32 bits: the digest of a call, of its shapes, and its number; then what travels with them
_MOST = 4 * (_WORDS - _HEAD)  # bytes that travel with them
_SIZES = 16  # bytes of the two sizes in a gather
_SMALLEST = 2048  # bytes of a gather; sizes are powers of two, so that few programs serve all


class WorkersCall(NamedTuple):
    """A call that all workers make together.

    Attributes:
        program: what it is, as the workers compare it.
        number: how often it was made before.
    """

    program: Program
    number: int


class WorkerSums:
    """The sums and gathers of a job.

    Args:
        devices: one device of each worker.

    Attributes:
        failed: why a launch failed here alone; None if none did.
    """

    failed: ProgramError | None = None
    _is_missing = False  # whether the others are told of a launch that was not made, or failed

    def __init__(self, devices: device_group.DeviceGroup):
        assert devices.member is not None, "there are several workers"
        self._devices, self._member = devices, devices.member
        self._programs: dict[tuple[object, ...], Executable] = {}
        from_chief(devices, np.zeros(1, np.uint8))  # connects while all are here: Gloo waits for that for 30 s only

    @property
    def workers(self) -> int:
        """How many workers add up."""
        return self._devices.replicas

    @property
    def is_running(self) -> bool:
        """Whether a launch has not ended, or was not made, for which the other workers may come."""
        return self._is_missing or (self._devices.interrupted and not self._devices.ends_within(0.0))

    def sums(self, arrays: Sequence[np.ndarray], call: WorkersCall) -> list[np.ndarray]:
        """The sums over the workers of arrays, which are all of one dtype."""
        if sum(each.nbytes for each in arrays) > _MOST:
            return self._run("all_reduce", arrays, call)
        shapes = tuple((each.shape, each.dtype.str) for each in arrays)
        rows = self._small(("sum", *shapes), b"".join(each.tobytes() for each in arrays), call)
        totals, begin = list[np.ndarray](), 0
        for each in arrays:
            first, *others = (np.frombuffer(row, each.dtype, each.size, begin).reshape(each.shape) for row in rows)
            total = first.copy()
            with np.errstate(all="ignore"):  # as in a program
                for other in others:
                    total += other
            totals.append(total)
            begin += each.nbytes
        return totals

    def gather(self, array: np.ndarray, axis: int, call: WorkersCall) -> np.ndarray:
        """The arrays of all workers, joined along an axis, along which their sizes may differ. Any dtype travels."""
        parts = self._parts(np.moveaxis(array, axis, 0), call)
        return np.ascontiguousarray(np.moveaxis(np.concatenate(parts), 0, axis))

    def gather_equal(self, arrays: Sequence[np.ndarray], call: WorkersCall) -> list[np.ndarray]:
        """Arrays of one dtype, each joined along its first dimension with those of all workers, of its shape."""
        shapes = tuple((each.shape, each.dtype.str) for each in arrays)
        if sum(each.nbytes for each in arrays) <= _MOST:
            small = self._small(("equal", *shapes), b"".join(each.tobytes() for each in arrays), call)
            begins = np.cumsum([0, *(each.nbytes for each in arrays)])
            return [
                np.concatenate(
                    [np.frombuffer(row, each.dtype, each.size, int(begin)).reshape(each.shape) for row in small]
                )
                for each, begin in zip(arrays, begins, strict=False)
            ]
        packed = [index for index, each in enumerate(arrays) if each.nbytes < PACKED]
        alone = [index for index, each in enumerate(arrays) if each.nbytes >= PACKED]
        flat = [np.concatenate([arrays[index].reshape(-1) for index in packed])] if packed else []
        gathered = self._run("all_gather", [*(arrays[index] for index in alone), *flat], call, *shapes)
        if packed:
            gathered += np.split(gathered.pop(), np.cumsum([arrays[index].size for index in packed])[:-1], axis=1)
        found = dict(zip([*alone, *packed], gathered, strict=True))
        return [found[index].reshape(self.workers * len(each), *each.shape[1:]) for index, each in enumerate(arrays)]

    def broadcast_from_chief(self, array: np.ndarray, call: WorkersCall) -> np.ndarray:
        """The chief's array, bit by bit, on every worker."""
        if array.dtype == object:
            return self._parts(array.reshape(-1), call)[0].reshape(array.shape)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size <= _MOST:
            (chiefs, *_) = self._small(("chief", array.shape, array.dtype.str), data.tobytes(), call)
            return np.frombuffer(chiefs, array.dtype, array.size).reshape(array.shape)
        words = np.zeros(_power(data.size) // 4, np.uint32)
        if self._devices.is_chiefs:  # the others' are zeros
            words.view(np.uint8)[: data.size] = data
        (total,) = self._run("all_reduce", [words], call, array.shape, array.dtype.str)
        return total.view(np.uint8)[: data.size].view(array.dtype).reshape(array.shape)

    def _parts(self, array: np.ndarray, call: WorkersCall) -> list[np.ndarray]:
        """The array of each worker; the arrays may differ in the size of their first dimension."""
        if array.dtype == object:  # strings
            texts = array.reshape(-1).tolist()
            lengths = self._parts(np.array([len(each) for each in texts], np.int64).reshape(array.shape), call)
            joined = self._parts(np.frombuffer(b"".join(texts), np.uint8), call)
            return [_texts(*each) for each in zip(lengths, joined, strict=True)]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        said = np.array([len(array), data.size], np.int64).tobytes()
        key = "sizes", array.shape[1:], array.dtype.str
        small = self._small(key, said + data.tobytes() if data.size <= _MOST - _SIZES else said, call)
        sizes = [np.frombuffer(row, np.int64, 2) for row in small]
        rows: Sequence[bytes] = [row[_SIZES:] for row in small]
        if (largest := max(size for _, size in sizes)) > _MOST - _SIZES:
            padded = np.zeros(_power(int(largest)), np.uint8)
            padded[: data.size] = data
            (gathered,) = self._run("all_gather", [padded.view(np.uint32)], call)
            rows = [row.tobytes() for row in gathered]
        return [
            np.frombuffer(row[:size], array.dtype).reshape(length, *array.shape[1:])
            for row, (length, size) in zip(rows, sizes, strict=True)
        ]

    def _small(self, key: tuple[object, ...], data: bytes, call: WorkersCall) -> list[bytes]:
        """What each worker brings: as many bytes as travel with the digest, beginning with its data."""
        _, by_all = self._launch(
            ("small",), lambda: agreement.gather_program(self._devices, _WORDS), [], data, call, key
        )
        return [row[_HEAD:].tobytes() for row in by_all]

    def _run(self, operation: str, arrays: Sequence[np.ndarray], call: WorkersCall, *more: object) -> list[np.ndarray]:
        key = operation, *((each.shape, each.dtype.str) for each in arrays)
        compiled = functools.partial(_compiled, self._devices, operation, arrays)
        return self._launch(key, compiled, arrays, b"", call, (*key, *more))[0]

    def _launch(
        self,
        program: tuple[object, ...],
        compiled: Callable[[], Executable],
        arrays: Sequence[np.ndarray],
        data: bytes,
        call: WorkersCall,
        key: tuple[object, ...],
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Launches a program and waits for its end, which a failure of the job ends too.

        Args:
            program: the key of the program.
            compiled: compiles it, if it is new.
            arrays: its arguments.
            data: what travels with the digest.
            call: what all workers do.
            key: what must be equal on all workers, besides.

        Returns:
            The results, and what each worker has said.

        Raises:
            ProgramError: it cannot be compiled or has failed, in which the others have no share; `is_running` is set.
            WorkerLostError or another failure of the job.
        """
        devices = self._devices
        # A sum in order is another exchange: it must never meet one in any order.
        order = ("in order",) * sums_are_ordered()
        program, key = (*program, *order), (*key, *order)
        shapes = hashlib.sha256(repr(key).encode()).digest()[:8]
        # Shapes too, since logs of launches do not have them: Gloo ends a process that adds values of other sizes.
        head = bytes.fromhex(call.program.digest[:16]) + shapes + call.number.to_bytes(4, "little")
        said = np.frombuffer((head + data).ljust(4 * _WORDS, b"\0"), np.int32).reshape(1, _WORDS)
        with devices.in_flight:
            self._is_missing = True
            try:
                executable = self._programs.get(program)
                if executable is None:
                    executable = self._programs[program] = compiled()
                put = [devices.put([each]) for each in (*arrays, said)]
                *results, by_all = Starter(executable, devices, call.program.body).start(put)
                self._is_missing = False
                executable.wait()
            except jaxlib.RUNTIME_ERRORS as error:
                self._is_missing = True
                name = f"{call.program.words}, call {call.number + 1}"
                self.failed = ProgramError.over_workers(name, self._member.worker, str(error))
                raise self.failed from error
            finally:
                if devices.interrupted:
                    device_group.add(devices)
            theirs = devices.fetch(by_all, 0)
            self._compare(theirs[:, :_HEAD], said[:, :_HEAD], call, key)
            return [devices.fetch(each, 0) for each in results], theirs

    def _compare(self, theirs: np.ndarray, ours: np.ndarray, call: WorkersCall, key: tuple[object, ...]) -> None:
        """Raises the failure of the job if the workers have launched different calls.

        Mostly their logs tell it already. Shapes are in no log.
        """
        if (theirs == ours).all():
            return
        if (theirs[:, :2] == ours[:, :2]).all() and (theirs[:, 4] == ours[:, 4]).all():
            patience = 0.0
        else:  # another call: the logs differ. Or another number: a worker has left a step, which the job ends
            patience = self._member.heartbeat + 1.0
        self._member.failed.wait(patience)
        self._member.check()
        operation, *sizes = key
        what = f"{call.program.body}, call {call.number + 1}: {operation} of {sizes}"
        self._member.compile(Program(hashlib.sha256(what.encode()).hexdigest()[:16], what, call.program.where))
        self._member.failed.wait()
        self._member.check()


def _texts(lengths: np.ndarray, joined: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths.reshape(-1))
    data = joined.tobytes()
    texts = np.empty(len(ends), object)
    texts[:] = [data[end - length : end] for end, length in zip(ends, lengths.reshape(-1), strict=True)]
    return texts.reshape(lengths.shape)


def _power(size: int) -> int:
    """The smallest power of two that is not smaller, nor too small."""
    return max(_SMALLEST, 1 << max(0, size - 1).bit_length())


def _compiled(devices: device_group.DeviceGroup, operation: str, arrays: Sequence[np.ndarray]) -> Executable:
    """The program that sums or gathers arrays of these shapes, where all workers launch the same."""
    dtype, shapes = arrays[0].dtype, [each.shape for each in arrays]
    element, workers = element_name(dtype), devices.replicas
    body = _sums if operation == "all_reduce" else _gathers
    lines, outputs = body(shapes, dtype, element, workers)
    given = ", ".join(f"%x{index}: {tensor_type(shape, element)}" for index, shape in enumerate(shapes))
    kinds = [tensor_type(shape, element) for shape in outputs]
    zero = "false" if element == "i1" else "(0.0, 0.0)" if dtype.kind == "c" else "0" if dtype.kind in "iu" else "0.0"
    zeros = "\n".join(f"%z{index} = stablehlo.constant dense<{zero}> : {kind}" for index, kind in enumerate(kinds))
    names = {letter: ", ".join(f"%{letter}{index}" for index in range(len(kinds))) for letter in "rz"}
    head, heads, equal = (
        f"tensor<{size}x{_HEAD}x{of}>" for size, of in ((1, "i32"), (workers, "i32"), (workers, "i1"))
    )
    of = ", ".join(kinds)
    branch = f"""%own = stablehlo.slice %said [0:1, 0:{_HEAD}] : (tensor<1x{_WORDS}xi32>) -> {head}
        %ours = stablehlo.broadcast_in_dim %own, dims = [0, 1] : ({head}) -> {heads}
        %theirs = stablehlo.slice %all [0:{workers}, 0:{_HEAD}] : (tensor<{workers}x{_WORDS}xi32>) -> {heads}
        %equal = stablehlo.compare EQ, %theirs, %ours : ({heads}, {heads}) -> {equal}
        %true = stablehlo.constant dense<true> : tensor<i1>
        %agreed = stablehlo.reduce(%equal init: %true) applies stablehlo.and across dimensions = [0, 1]
          : ({equal}, tensor<i1>) -> tensor<i1>
        %y:{len(kinds)} = "stablehlo.if"(%agreed) ({{
          {lines}
          stablehlo.return {names["r"]} : {of}
        }}, {{
          {zeros}
          stablehlo.return {names["z"]} : {of}
        }}) : (tensor<i1>) -> ({of})"""
    return agreement.gather_program(devices, _WORDS, given, branch, kinds, [(shape, dtype) for shape in outputs])


def _sums(
    shapes: list[tuple[int, ...]], dtype: np.dtype, element: str, workers: int
) -> tuple[str, list[tuple[int, ...]]]:
    """One sum for all small arrays together, as a flat one, and one for each large one."""
    sizes, lines, one = [math.prod(shape) for shape in shapes], list[str](), f"tensor<{element}>"

    def reduce(name: str, value: str, kind: str) -> None:
        lines.append(
            f'{name} = "stablehlo.all_reduce"({value}) ({{ ^bb0(%p: {one}, %q: {one}): '
            f"%s = stablehlo.add %p, %q : {one} stablehlo.return %s : {one} }}) "
            f"{{{agreement.groups(workers)}}} : ({kind}) -> {kind}"
        )

    small = [index for index, size in enumerate(sizes) if size * dtype.itemsize < PACKED and len(shapes) > 1]
    if small:
        flat = f"tensor<{sum(sizes[index] for index in small)}x{element}>"
        flats = [f"tensor<{sizes[index]}x{element}>" for index in small]
        for index, kind in zip(small, flats, strict=True):
            lines.append(f"%f{index} = stablehlo.reshape %x{index} : ({tensor_type(shapes[index], element)}) -> {kind}")
        values = ", ".join(f"%f{index}" for index in small)
        lines.append(f"%flat = stablehlo.concatenate {values}, dim = 0 : ({', '.join(flats)}) -> {flat}")
        reduce("%sum", "%flat", flat)
        begin = 0
        for index, kind in zip(small, flats, strict=True):
            end = begin + sizes[index]
            lines.append(f"%c{index} = stablehlo.slice %sum [{begin}:{end}] : ({flat}) -> {kind}")
            lines.append(f"%r{index} = stablehlo.reshape %c{index} : ({kind}) -> {tensor_type(shapes[index], element)}")
            begin = end
    for index in range(len(shapes)):
        if index not in small:
            reduce(f"%r{index}", f"%x{index}", tensor_type(shapes[index], element))
    return "\n".join(lines), shapes


def _gathers(
    shapes: list[tuple[int, ...]], dtype: np.dtype, element: str, workers: int
) -> tuple[str, list[tuple[int, ...]]]:
    """A gather of each array, in a new first dimension."""
    lines = []
    for index, shape in enumerate(shapes):
        own, row, rows = (tensor_type(each, element) for each in (shape, (1, *shape), (workers, *shape)))
        lines.append(
            f"%row{index} = stablehlo.reshape %x{index} : ({own}) -> {row}\n"
            f'%r{index} = "stablehlo.all_gather"(%row{index}) '
            f"{{all_gather_dim = 0 : i64, {agreement.groups(workers)}}} : ({row}) -> {rows}"
        )
    return "\n".join(lines), [(workers, *shape) for shape in shapes]
