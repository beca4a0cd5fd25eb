"""What a program needs on a device.

A `Plan` is what the compiler says of a program: how much memory and work it needs on each device. Nothing of it is
measured: the program did not run.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS, cost_of_module

# What only the text of a compiled program tells: its collectives, and the cycles that the compiler estimates.
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_OPERATION = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(-start)?\(", re.MULTILINE)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BITS = re.compile(r"\d+")
# What Pallas makes of a kernel, for TPUs and for GPUs, and cuDNN's attention.
_KERNEL = re.compile(
    r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|triton_kernel_call|__gpu\$xla\.gpu\.triton|__cudnn\$fmha\w*)"'
)


@dataclass(frozen=True)
class Collective:
    """A collective operation of a compiled program.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        bytes: the size of its result on each device. Several values may be reduced together.
    """

    kind: str
    bytes: int


def collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of a program, in the order of its text. One in a loop is there once."""
    return tuple(Collective(kind, _size(shape, kind, bool(start))) for shape, kind, start in _OPERATION.findall(text))


def cycles(text: str) -> int | None:
    """The sum of the cycles that the compiler estimates for operations; None if it estimates none."""
    found = _CYCLES.findall(text)
    return sum(map(int, found)) if found else None


def _size(shape: str, kind: str, starts: bool) -> int:
    """The bytes of a result; the start of an asynchronous operation has its operands before its results."""
    sizes = [_bytes(element, sizes) for element, sizes in _ARRAY.findall(shape)]
    if starts and kind != "all-reduce":
        sizes = sizes[1:2] if kind == "collective-permute" else sizes[len(sizes) // 2 :]
    return sum(sizes)


def _bytes(element: str, sizes: str) -> int:
    bits = 8 if element == "pred" else int((_BITS.search(element) or [8])[0])
    return math.ceil(math.prod(int(size) for size in sizes.split(",") if size) * bits / 8)


def exchanges_in_branches(text: str) -> bool:
    """Whether a program has a permutation of all devices in a branch or loop: XLA groups all other exchanges."""
    is_main = False
    for line in text.splitlines():
        # A computation begins at the margin, and its operations are indented.
        if not line.startswith((" ", "}")):
            is_main = line.startswith("ENTRY")
        elif not is_main and (" collective-permute(" in line or " collective-permute-start(" in line):
            return True
    return False


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Memory:
    """Bytes of memory on each device.

    Attributes:
        arguments: the arguments of the program: the variables that it uses, the inputs, and captured tensors.
        results: its results: new values of variables, and what the body returns.
        temporary: intermediate values, for which memory is used again as soon as it is free. None if the compiler does
            not tell.
        aliased: the part of the results that is written over arguments, such as new values over old ones.
        chip: the memory of the device itself. For CPU devices, the machine's memory divided by their number. None if
            the platform does not tell.
    """

    arguments: int
    results: int
    temporary: int | None
    aliased: int
    chip: int | None

    @property
    def peak(self) -> int | None:
        """The most that the program needs at once: arguments, results and temporary, without what is aliased.

        None if `temporary` is not known.
        """
        return None if self.temporary is None else self.arguments + self.results + self.temporary - self.aliased


@dataclass(frozen=True)
class Cost:
    """The work of a program on each device, as the compiler estimates it. What is in a loop counts once.

    Attributes:
        flops: arithmetic operations of floating-point numbers. None if the compiler does not tell.
        bytes: bytes that its operations read and write. None if the compiler does not tell.
        cycles: cycles of the chip. Only the compiler of TPUs estimates them; otherwise None.
        collectives: the cross-replica operations, each with its kind and its bytes.
        kernels: the number of kernels, such as those of Pallas. No compiler counts what is inside one.
    """

    flops: float | None
    bytes: float | None
    cycles: int | None
    collectives: tuple[Collective, ...] = ()
    kernels: int = 0


@dataclass(frozen=True)
class Plan:
    """What a program needs on each device: memory and work, as the compiler says. A table when printed.

    Attributes:
        name: the name of the function.
        replicas: the number of replicas.
        devices: the devices: "v5e:2x4", a slice that need not be there, or "CPU", those that are.
        memory: bytes of memory on each device.
        cost: flops, bytes, cycles and collectives of each device.
        fits: whether the memory of a device is enough. None if its size is not known.
        seconds: how long compiling took.
        parts: the number of devices of each replica.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine import xla
        >>> compiled = xla.lower(lambda x: xla.all_reduce(x, "SUM"), [[tf.ones([256, 256])]] * 2).compile()
        >>> plan = compiled.plan()
        >>> plan.fits, plan.memory.arguments, [(each.kind, each.bytes) for each in plan.cost.collectives]
        (True, 262144, [('all-reduce', 262144)])
    """

    name: str
    replicas: int
    devices: str
    memory: Memory
    cost: Cost
    fits: bool | None
    seconds: float
    parts: int = 1
    _text: str = field(default="", repr=False)

    def as_text(self) -> str:
        """The program as the compiler left it, in XLA's notation (HLO). "" if the compiler gave up for want of memory.

        `Lowered.as_text` has the program before the compiler.
        """
        return self._text

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self._rows())
        lines = [f"  {name:<{width}}  {value}" for name, value in self._rows()]
        return "\n".join([self._title(), *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        rows = "".join(
            f'<tr><td style="text-align:left">{html.escape(name.strip())}</td>'
            f'<td style="text-align:left">{html.escape(value)}</td></tr>'
            for name, value in self._rows()
        )
        caption = f"<caption>{html.escape(self._title())}</caption>"
        return f'<table style="font-family: monospace">{caption}<tbody>{rows}</tbody></table>'

    def _title(self) -> str:
        count = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        each = "" if self.parts == 1 else f" of {self.parts} devices"
        return f"{self.name}: {count}{each} on {self.devices}, each device:"

    def _rows(self) -> list[tuple[str, str]]:
        memory, cost = self.memory, self.cost
        chip = "" if memory.chip is None else f" of {size(memory.chip)}"
        verdict = {True: "fits", False: "DOES NOT FIT", None: "not known whether it fits"}[self.fits]
        rows = [
            ("memory", f"{size(memory.peak)}{chip}: {verdict}"),
            ("  arguments", size(memory.arguments)),
            ("  results", f"{size(memory.results)}, {size(memory.aliased)} of them over arguments"),
            ("  temporary", size(memory.temporary)),
            ("flops", _number(cost.flops)),
            ("bytes read and written", size(cost.bytes)),
        ]
        if cost.cycles is not None:
            rows.append(("estimated cycles", _number(cost.cycles)))
        if cost.kernels:
            rows.append(("kernels", f"{cost.kernels}, not counted"))
        for kind in dict.fromkeys(each.kind for each in cost.collectives):
            each = [one.bytes for one in cost.collectives if one.kind == kind]
            rows.append((kind, f"{len(each)} of {size(sum(each))} in all"))
        return rows


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a strategy's devices. A table when printed.

    Attributes:
        variables: for each device, the bytes of the strategy's variables. A variable counts from when it is made; it
            is sent to the devices by the first step that uses it.
        program: the memory of the program that ran last, `Memory`. None before the first.
        devices: the names of the devices.
    """

    variables: list[int]
    program: Memory | None
    devices: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{name}: variables {size(each)}" for name, each in zip(self.devices, self.variables, strict=True)]
        if self.program is not None:
            lines.append(f"the last program, on each device: {size(self.program.peak)}, arguments included")
        return "\n".join(lines)


def make_plan(
    executable: Any, name: str, replicas: int, devices: str, chip: int | None, seconds: float, parts: int = 1
) -> Plan:
    """The plan of a compiled program.

    Args:
        executable: jaxlib's executable.
        name: the name of the function.
        replicas: the number of replicas.
        devices: the devices, for the title.
        chip: bytes of memory of each device, or None.
        seconds: how long compiling took.
        parts: the number of devices of each replica.
    """
    sizes, costs = read_memory(executable, chip), _costs(executable)
    text = hlo_text(executable)
    if _CUDNN in text:  # XLA counts nothing for a convolution there
        costs = None
    kernels = len(_KERNEL.findall(text))
    cost = Cost(_known(costs, "flops"), _known(costs, "bytes accessed"), cycles(text), collectives(text), kernels)
    fits = None if chip is None or sizes.peak is None else sizes.peak <= chip
    return Plan(name, replicas, devices, sizes, cost, fits, seconds, parts, text)


_CUDNN = 'custom_call_target="__cudnn$'


def read_memory(executable: Any, chip: int | None) -> Memory:
    """What a compiled program needs on each device, which has so many bytes of memory, or None if that is not known."""
    memory = executable.get_compiled_memory_stats()
    return Memory(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        chip,
    )


def _costs(executable: Any) -> Mapping[str, float] | None:
    """The cost analysis of a compiled program, by its platform, or by XLA from its modules."""
    try:
        return executable.cost_analysis()
    except RUNTIME_ERRORS:  # the CUDA plugin has none
        return cost_of_module(executable.hlo_modules()[0])


def hlo_text(executable: Any) -> str:
    """The text of a compiled program."""
    return "\n".join(module.to_string() for module in executable.hlo_modules())


def size(number: float | None) -> str:
    """A number of bytes as text, with a binary unit: "8 GiB"."""
    if number is None:
        return "not known"
    units = list(_UNITS)
    while number >= 1024 and len(units) > 1:
        number /= 1024
        del units[0]
    return f"{number:.4g} {units[0]}"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.0f}"


def _known(costs: Mapping[str, float] | None, name: str) -> float | None:
    value = (costs or {}).get(name)
    return None if value is None or value < 0 else value
