"""Small exchanges between the workers of a job, each one program on the devices of all: the chief's value, a minimum.

All workers must make the same exchanges in the same order; they are compared as all programs are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.group import DeviceGroup

_SMALLEST = 256  # words; sizes are powers of two, so that few programs serve all

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


def from_chief(devices: DeviceGroup, value: np.ndarray) -> np.ndarray:
    """The chief's value of an array, bit by bit, on every worker.

    Args:
        devices: the devices of all workers.
        value: this worker's value; of the same dtype and shape on all.
    """
    data = np.ascontiguousarray(value).tobytes()
    words = max(_SMALLEST, 1 << (-(-len(data) // 4) - 1).bit_length())
    sent = np.frombuffer(data.ljust(4 * words, b"\0"), np.uint32)
    received = _run(devices, _program(devices, "ui32", words, "add", _OF_FIRST), sent)
    return np.frombuffer(received.tobytes()[: len(data)], value.dtype).reshape(value.shape)


def least(devices: DeviceGroup, numbers: Sequence[int]) -> list[int]:
    """For each number, the smallest that any worker has.

    Args:
        devices: the devices of all workers.
        numbers: this worker's numbers, equally many on all workers.
    """
    return _run(devices, _program(devices, "i64", len(numbers), "minimum", ""), np.array(numbers, np.int64)).tolist()


def _run(devices: DeviceGroup, executable: Executable, value: np.ndarray) -> np.ndarray:
    with devices.in_flight:
        executable.tell_workers()
        (result,) = executable.launch([devices.put([value])])
        executable.wait()
        return np.array(devices.fetch(result, 0))


@functools.cache
def _program(devices: DeviceGroup, element: str, words: int, op: str, before: str) -> Executable:
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
    what = "the chief's value" if before else "a minimum over workers"
    return Executable(text, devices, [((words,), dtype)], name=(f"{what}, {words} numbers", ""))
