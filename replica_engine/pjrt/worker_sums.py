"""Sums and gathers of arrays over the workers of a job, over jaxlib's Gloo: one program for each signature.

Each program begins with a gather of what the workers launch: the digest of the call, its number, and the shapes. Its
sums are in a branch that runs only where all are equal. So launches that are swapped between workers give no number.
Gloo ends a process whose sum meets one of another size: those never meet either.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from replica_engine.hosts import Program
from replica_engine.pjrt import abandoned
from replica_engine.pjrt.exchange import element_of, least
from replica_engine.pjrt.executable import Executable, Flight
from replica_engine.pjrt.group import DeviceGroup

PACKED = 1 << 20
"""Bytes from which an array travels by itself; smaller ones are one flat array, since each costs a round of its own."""

_WORDS = 5  # of the digest of a call, of its shapes, and its number
_SMALLEST = 64  # bytes of a gather; sizes are powers of two, so that few programs serve all


class Call(NamedTuple):
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
    """

    def __init__(self, devices: DeviceGroup):
        assert devices.member is not None, "there are several workers"
        self._devices, self._member = devices, devices.member
        self._programs: dict[tuple[object, ...], Executable] = {}
        least(devices, [1])  # makes the connections while all workers are here: Gloo waits for them for 30 s only

    @property
    def is_running(self) -> bool:
        """Whether a launch has not ended, for which the other workers may not have come."""
        return self._devices.interrupted and not self._devices.ends_within(0.0)

    def sums(self, arrays: Sequence[np.ndarray], call: Call) -> list[np.ndarray]:
        """The sums over the workers of arrays, which are all of one dtype."""
        return self._run("all_reduce", arrays, call)

    def gather(self, array: np.ndarray, axis: int, call: Call) -> np.ndarray:
        """The arrays of all workers, joined along an axis, along which their sizes may differ. Any dtype travels."""
        parts = self._parts(np.moveaxis(array, axis, 0), call)
        return np.ascontiguousarray(np.moveaxis(np.concatenate(parts), 0, axis))

    def of_chief(self, array: np.ndarray, call: Call) -> np.ndarray:
        """The chief's array, bit by bit, on every worker."""
        if array.dtype == object:
            return self._parts(array.reshape(-1), call)[0].reshape(array.shape)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        words = np.zeros(_power(data.size) // 4, np.uint32)
        if self._devices.is_chiefs:  # the others' are zeros
            words.view(np.uint8)[: data.size] = data
        (total,) = self._run("all_reduce", [words], call)
        return total.view(np.uint8)[: data.size].view(array.dtype).reshape(array.shape)

    def _parts(self, array: np.ndarray, call: Call) -> list[np.ndarray]:
        """The array of each worker; the arrays may differ in the size of their first dimension."""
        if array.dtype == object:  # strings
            texts = array.reshape(-1).tolist()
            lengths = self._parts(np.array([len(each) for each in texts], np.int64).reshape(array.shape), call)
            joined = self._parts(np.frombuffer(b"".join(texts), np.uint8), call)
            return [_texts(*each) for each in zip(lengths, joined, strict=True)]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        (sizes,) = self._run("all_gather", [np.array([len(array), data.size], np.int64)], call)
        padded = np.zeros(_power(int(sizes[:, 1].max())), np.uint8)
        padded[: data.size] = data
        (rows,) = self._run("all_gather", [padded.view(np.uint32)], call)
        return [
            row.view(np.uint8)[:size].view(array.dtype).reshape(length, *array.shape[1:])
            for row, (length, size) in zip(rows, sizes, strict=True)
        ]

    def _run(self, operation: str, arrays: Sequence[np.ndarray], call: Call) -> list[np.ndarray]:
        """Launches a program and waits for its end, which a failure of the job ends too."""
        devices, name = self._devices, call.program.body
        key = operation, *((each.shape, each.dtype.str) for each in arrays)
        shapes = hashlib.sha256(repr(key).encode()).digest()[:8]
        said = bytes.fromhex(call.program.digest[:16]) + shapes + call.number.to_bytes(4, "little")
        code = np.frombuffer(said, np.int32).reshape(1, _WORDS)
        with devices.in_flight:
            executable = self._programs.get(key)
            if executable is None:
                executable = self._programs[key] = _compiled(devices, operation, arrays)
            try:
                put = [devices.put([each]) for each in (*arrays, code)]
                *results, said_by_all = Flight(executable, devices, name).start(put)
                executable.wait()
            except BaseException:
                abandoned.add(devices)
                raise
            self._compare(devices.fetch(said_by_all, 0), code, call, key)
            return [devices.fetch(each, 0) for each in results]

    def _compare(self, theirs: np.ndarray, ours: np.ndarray, call: Call, key: tuple[object, ...]) -> None:
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


def _kind(shape: Sequence[int], element: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def _compiled(devices: DeviceGroup, operation: str, arrays: Sequence[np.ndarray]) -> Executable:
    """The program that sums or gathers arrays of these shapes, where all workers launch the same."""
    dtype, shapes = arrays[0].dtype, [each.shape for each in arrays]
    element, workers = element_of(dtype), devices.replicas
    groups = f"replica_groups = dense<[{list(range(workers))}]> : tensor<1x{workers}xi64>"
    body = _sums if operation == "all_reduce" else _gathers
    lines, outputs = body(shapes, dtype, element, workers, groups)
    given = ", ".join(f"%x{index}: {_kind(shape, element)}" for index, shape in enumerate(shapes))
    kinds = [_kind(shape, element) for shape in outputs]
    zero = "false" if element == "i1" else "(0.0, 0.0)" if dtype.kind == "c" else "0" if dtype.kind in "iu" else "0.0"
    zeros = "\n".join(f"%z{index} = stablehlo.constant dense<{zero}> : {kind}" for index, kind in enumerate(kinds))
    names = {letter: ", ".join(f"%{letter}{index}" for index in range(len(kinds))) for letter in "rz"}
    results = ", ".join(f"%y#{index}" for index in range(len(kinds)))
    said, by_all, equal = f"tensor<1x{_WORDS}xi32>", f"tensor<{workers}x{_WORDS}xi32>", f"tensor<{workers}x{_WORDS}xi1>"
    of = ", ".join(kinds)
    text = f"""module @replica_body {{
      func.func public @main({given}, %said: {said}) -> ({of}, {by_all}) {{
        %all = "stablehlo.all_gather"(%said) {{all_gather_dim = 0 : i64, {groups}}} : ({said}) -> {by_all}
        %own = stablehlo.broadcast_in_dim %said, dims = [0, 1] : ({said}) -> {by_all}
        %equal = stablehlo.compare EQ, %all, %own : ({by_all}, {by_all}) -> {equal}
        %true = stablehlo.constant dense<true> : tensor<i1>
        %agreed = stablehlo.reduce(%equal init: %true) applies stablehlo.and across dimensions = [0, 1]
          : ({equal}, tensor<i1>) -> tensor<i1>
        %y:{len(kinds)} = "stablehlo.if"(%agreed) ({{
          {lines}
          stablehlo.return {names["r"]} : {of}
        }}, {{
          {zeros}
          stablehlo.return {names["z"]} : {of}
        }}) : (tensor<i1>) -> ({of})
        return {results}, %all : {of}, {by_all}
      }}
    }}
    """
    declared = [*((shape, dtype) for shape in outputs), ((workers, _WORDS), np.dtype(np.int32))]
    name = f"{operation} over workers of {len(arrays)} arrays", ""
    return Executable(text, devices, declared, compared=False, name=name)


def _sums(
    shapes: list[tuple[int, ...]], dtype: np.dtype, element: str, workers: int, groups: str
) -> tuple[str, list[tuple[int, ...]]]:
    """One sum for all small arrays together, as a flat one, and one for each large one."""
    sizes, lines, one = [math.prod(shape) for shape in shapes], list[str](), f"tensor<{element}>"

    def reduce(name: str, value: str, kind: str) -> None:
        lines.append(
            f'{name} = "stablehlo.all_reduce"({value}) ({{ ^bb0(%p: {one}, %q: {one}): '
            f"%s = stablehlo.add %p, %q : {one} stablehlo.return %s : {one} }}) {{{groups}}} : ({kind}) -> {kind}"
        )

    small = [index for index, size in enumerate(sizes) if size * dtype.itemsize < PACKED and len(shapes) > 1]
    if small:
        flat = f"tensor<{sum(sizes[index] for index in small)}x{element}>"
        flats = [f"tensor<{sizes[index]}x{element}>" for index in small]
        for index, kind in zip(small, flats, strict=True):
            lines.append(f"%f{index} = stablehlo.reshape %x{index} : ({_kind(shapes[index], element)}) -> {kind}")
        values = ", ".join(f"%f{index}" for index in small)
        lines.append(f"%flat = stablehlo.concatenate {values}, dim = 0 : ({', '.join(flats)}) -> {flat}")
        reduce("%sum", "%flat", flat)
        begin = 0
        for index, kind in zip(small, flats, strict=True):
            end = begin + sizes[index]
            lines.append(f"%c{index} = stablehlo.slice %sum [{begin}:{end}] : ({flat}) -> {kind}")
            lines.append(f"%r{index} = stablehlo.reshape %c{index} : ({kind}) -> {_kind(shapes[index], element)}")
            begin = end
    for index in range(len(shapes)):
        if index not in small:
            reduce(f"%r{index}", f"%x{index}", _kind(shapes[index], element))
    return "\n".join(lines), shapes


def _gathers(
    shapes: list[tuple[int, ...]], dtype: np.dtype, element: str, workers: int, groups: str
) -> tuple[str, list[tuple[int, ...]]]:
    """One gather of one array, in a new first dimension."""
    (shape,) = shapes
    own, row, rows = (_kind(each, element) for each in (shape, (1, *shape), (workers, *shape)))
    lines = f"""%row = stablehlo.reshape %x0 : ({own}) -> {row}
    %r0 = "stablehlo.all_gather"(%row) {{all_gather_dim = 0 : i64, {groups}}} : ({row}) -> {rows}"""
    return lines, [(workers, *shape)]
