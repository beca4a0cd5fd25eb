"""What a program needs on a device, and the chips for which that can be asked.

A `Plan` is what the compiler says of a program: how much memory and work it needs on each device. Nothing of it is
measured: the program did not run.

The chips are slices of TPUs, and GPUs, by name: "v5e:2x4" are eight chips. The names of slices are those of Google's
cloud: a kind of chip, and how many chips the slice has along each axis. Some chips are two devices, each with half of
the chip's memory. This module compiles nothing, so a wrong name is an error at once, also where no compiler is
installed.
"""

from __future__ import annotations

import difflib
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replica_engine.errors import DeviceError
from replica_engine.errors.base import shown
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS, cost_of_module

_GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """A kind of chip.

    Attributes:
        name: its name, as in the name of a slice.
        platform: "tpu" or "gpu".
        memory: bytes of memory of each device, as data sheets have it.
        axes: the number of axes of its slices; 1 for GPUs, which are counted.
        devices: the number of devices of a chip.
        kind: what PJRT calls its devices.
        options: what libtpu must be told besides the name.
    """

    name: str
    platform: str
    memory: int
    axes: int
    devices: int
    kind: str
    options: tuple[tuple[str, str], ...] = ()


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "tpu", 8 * _GIB, 2, 2, "TPU v2"),
        Chip("v3", "tpu", 16 * _GIB, 2, 2, "TPU v3"),
        # Without this option, libtpu takes the two cores of a chip for two devices; jax on a real v4 has one.
        Chip("v4", "tpu", 32 * _GIB, 3, 1, "TPU v4", (("chip_config_name", "megacore"),)),
        Chip("v5e", "tpu", 16 * _GIB, 2, 1, "TPU v5 lite"),
        Chip("v5p", "tpu", 95 * _GIB, 3, 1, "TPU v5"),  # PJRT does not write the p
        Chip("v6e", "tpu", 32 * _GIB, 2, 1, "TPU v6 lite"),
        Chip("7x", "tpu", 96 * _GIB, 3, 2, "TPU7x"),
        Chip("h100", "gpu", 84_978_892_800, 1, 1, "NVIDIA H100 80GB HBM3"),
    )
}
"""The chips that programs can be compiled for without having one."""

_OTHER_NAMES = {"tpu7x": "7x", "v7x": "7x", "v5lite": "v5e", "v6lite": "v6e", "v5": "v5p"}
_MOST_GPUS = 8  # of one machine

_SHOWN = {2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"), 3: ("1x1x1", "2x2x1", "2x2x2", "2x2x4")}
_MORE = {2: "", 3: ", 2x4x4, 4x4x4 and larger"}

_WHOLE_ONLY = {"v5e": 16}  # of larger slices of this kind, libtpu serves all chips or one


@dataclass(frozen=True)
class Slice:
    """Some chips of one kind, connected with each other.

    Attributes:
        name: its name, for messages.
        chip: the kind of its chips.
        shape: the number of chips along each axis.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of its devices."""
        return math.prod(self.shape) * self.chip.devices

    def check(self, count: int) -> None:
        """Checks that a program may be compiled for the first `count` devices.

        Raises:
            DeviceError: there are fewer, or the compiler fails for so many.
        """
        if count > self.size:
            raise DeviceError(
                f"{count} replicas need {count} devices, but the slice {self.name} has {self.size}. Plan for a larger "
                "slice, or for fewer replicas."
            )
        check_count(self.chip.name, self.shape, count)


def slice_named(name: object) -> Slice:
    """The slice of a name.

    Raises:
        DeviceError: no slice has this name; the message lists the right names.
    """
    found = re.fullmatch(r"([a-z]*\d+[a-z]*):(\d+(?:x\d+)*)", name.strip().lower()) if isinstance(name, str) else None
    if found is None:
        raise _unknown(name)
    chip = CHIPS.get(_OTHER_NAMES.get(found[1], found[1]))
    shape = tuple(map(int, found[2].split("x")))
    if chip is None or len(shape) != chip.axes or not _exists(chip, shape):
        raise _unknown(name)
    return Slice(f"{chip.name}:{found[2]}", chip, shape)


def check_devices(devices: Sequence[Any], count: int) -> None:
    """Checks that a program for the first `count` of these real TPUs does not end the process.

    Raises:
        DeviceError: it does.
    """
    chip = next((each for each in CHIPS.values() if each.kind == devices[0].device_kind), None)
    if chip is not None and all(hasattr(each, "coords") for each in devices):
        shape = [1 + max(each.coords[axis] for each in devices) for axis in range(chip.axes)]
        check_count(chip.name, tuple(shape), count)


def check_count(chip: str, shape: tuple[int, ...], count: int) -> None:
    """Raises DeviceError if the compiler fails for the first `count` devices of a slice of this shape."""
    size = math.prod(shape)
    if chip not in ("v5e", "v6e") or count in (1, size):
        return
    # Found by trying: libtpu ends the process at the first of these, and refuses the program at the others.
    if (shape, count) == ((2, 4), 6) or (shape[0], count) == (4, 4) or size > _WHOLE_ONLY.get(chip, size):
        raise DeviceError(
            f"{count} of the {size} chips of a slice {chip}:{'x'.join(map(str, shape))} cannot run one program: "
            f"libtpu, their compiler, fails at all-reduces over this part of the slice. Take all {size}, or "
            "another number."
        )


def _exists(chip: Chip, shape: tuple[int, ...]) -> bool:
    if chip.platform == "gpu":
        return 1 <= shape[0] <= _MOST_GPUS
    hosts_are_whole = all(size and size % 2 == 0 for size in shape[:2])  # a host has 2x2 chips
    return all(shape) and (hosts_are_whole or math.prod(shape) == 1)


def _unknown(name: object) -> DeviceError:
    kinds = {axes: [each.name for each in CHIPS.values() if each.axes == axes] for axes in (2, 3)}
    rows = [
        f"  {', '.join(kinds[axes])}: with {', '.join(_SHOWN[axes])}{_MORE[axes]} chips, as in {example}"
        for axes, example in ((2, "v5e:2x4"), (3, "v5p:2x2x2"))
    ]
    rows.append(f"  h100: with 1 to {_MOST_GPUS} GPUs, as in h100:8")
    near = _meant(str(name).lower())
    meant = f" Did you mean {near}?" if near else ""
    listed = "\n".join(rows)
    return DeviceError(f"No such topology: {shown(name)}.{meant} A topology is a kind of chip and a size:\n{listed}")


def _all_shown() -> list[str]:
    named = [f"{chip.name}:{size}" for chip in CHIPS.values() for size in _SHOWN.get(chip.axes, ())]
    return [*named, *(f"h100:{count}" for count in range(1, _MOST_GPUS + 1))]


def _meant(name: str) -> str | None:
    """The topology that a wrong name is like, of a kind of chip like that in the name; all of a kind without a size.

    If the name says how many chips, it is one of that many; of a shape that no slice has, one of about as many.
    """
    # v5e-8 is how the cloud writes a slice of 8 chips.
    kind, _, size = name.replace("-", ":", 1).partition(":")
    kind = _OTHER_NAMES.get(kind, kind)
    kinds = [kind] if kind in CHIPS else difflib.get_close_matches(kind, CHIPS, n=len(CHIPS))
    shown = [each for each in _all_shown() if each.partition(":")[0] in kinds]
    if kind in CHIPS and not size:
        return f"{', '.join(shown[:-1])} or {shown[-1]}"
    if kind in CHIPS and size.isdecimal():
        return next((each for each in shown if _count_chips(each) == int(size)), None)
    if kind in CHIPS and re.fullmatch(r"\d+(x\d+)+", size):
        return min(shown, key=lambda each: abs(_count_chips(each) - _count_chips(f"{kind}:{size}")))
    near = difflib.get_close_matches(name, shown, n=1)
    return near[0] if near else None


def _count_chips(name: str) -> int:
    return math.prod(map(int, name.partition(":")[2].split("x")))


# What only the text of a compiled program tells: its collectives, and the cycles that the compiler estimates.
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_OPERATION = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(-start)?\(", re.MULTILINE)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BITS = re.compile(r"\d+")


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
    """

    flops: float | None
    bytes: float | None
    cycles: int | None
    collectives: tuple[Collective, ...] = ()


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
    cost = Cost(_known(costs, "flops"), _known(costs, "bytes accessed"), cycles(text), collectives(text))
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
