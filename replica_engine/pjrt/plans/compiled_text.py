"""Reads what only the text of a compiled program tells: its collectives, and the cycles that the compiler estimates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

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
        if not line.startswith((" ", "}")):
            is_main = line.startswith("ENTRY")
        elif not is_main and (" collective-permute(" in line or " collective-permute-start(" in line):
            return True
    return False
