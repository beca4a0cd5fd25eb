"""Operations of divided values, in many layouts and sizes: values and gradients must be those of one device.

Each batch of operations (`soak/part_operations.py`) is a program for each layout, and all of these are in a process of
their own (`soak/programs/parts.py`). A batch whose process ends, or whose program fails, is halved until the operation
is known. A case is one operation in one layout and size, with one dtype of indices: its value, or its gradients.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from soak.outcome import Outcome
from soak.processes import program

BATCH = 40
"""The number of operations of a program."""

LONGEST = 120.0
"""Seconds for the program of one layout, at most; it takes some."""

Axes = tuple[str | None, ...]


class Layout(NamedTuple):
    """How values are divided over the devices of a replica."""

    mesh: tuple[int, int]  # the sizes of its axes, "batch" and "model"
    # the axes of the numbers (batch, length, channels). Images have those of the length for their height.
    values: Axes = ("batch", None, None)
    weights: Axes = (None, None)  # the axes of the table and of the kernel
    results: Axes = (None, None)  # the axes of the last two dimensions of each result
    replicas: int = 1  # the number of replicas


LAYOUTS = {
    "4 x 1, length": Layout((4, 1), (None, "batch", None)),
    "4 x 1, batch and weights": Layout((4, 1), weights=("batch", None)),
    "1 x 4, length and weights": Layout((1, 4), (None, "model", None), ("model", None)),
    "1 x 4, channels and weights": Layout((1, 4), (None, None, "model"), (None, "model")),
    "2 x 2, batch": Layout((2, 2)),
    "2 x 2, length": Layout((2, 2), (None, "model", None)),
    "2 x 2, batch and length": Layout((2, 2), ("batch", "model", None)),
    "2 x 2, length and channels": Layout((2, 2), (None, "batch", "model"), (None, "model")),
    "2 x 2, batch and weights on both axes": Layout((2, 2), weights=("model", "batch")),
    "2 x 2, results and weights": Layout((2, 2), weights=("model", None), results=("batch", "model")),
    "2 replicas of 2 x 2, batch, length and weights": Layout(
        (2, 2), ("batch", "model", None), ("model", None), replicas=2
    ),
    "2 replicas of 2 x 2, channels and weights": Layout(
        (2, 2), ("batch", None, "model"), ("batch", "model"), replicas=2
    ),
    "2 replicas of 2 x 2, length and channels": Layout((2, 2), (None, "batch", "model"), (None, "model"), replicas=2),
}


class Size(NamedTuple):
    """The sizes of the values."""

    batch: int
    length: int
    channels: int
    rows: int


SIZES = {"odd": Size(5, 7, 6, 11), "tiny": Size(1, 3, 2, 3), "even": Size(8, 8, 8, 16)}


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Sweeps over the operations, and yields an outcome for each layout.

    Each dtype of indices counts as an operation. No other batch begins after `--seconds`.
    """
    from soak.part_operations import OPERATIONS

    names = [*OPERATIONS][:: -(-len(OPERATIONS) // flags.parts)]
    by_layout = {name: Outcome("parts", name, f"{len(names)} operations of values in parts") for name in LAYOUTS}
    began = time.monotonic()
    for size in SIZES:
        for first in range(0, len(names), BATCH):
            if time.monotonic() - began > flags.seconds:
                break
            batch, start = names[first : first + BATCH], time.monotonic()
            print(f"  {size}, {batch[0]} ... {batch[-1]}", flush=True)
            for found in swept(size, list(LAYOUTS), batch):
                problems = [f"{found['layout']}, {size}, {each}" for each in found["wrong"]]
                by_layout[found["layout"]].add(0.0, problems, found["count"])
                for each in problems:
                    print(f"    {each}", flush=True)
            for outcome in by_layout.values():
                outcome.seconds += (time.monotonic() - start) / len(by_layout)
    for outcome in by_layout.values():
        ended = sum("the process ended" in each for each in outcome.problems)
        outcome.found = f"{len(outcome.problems)} wrong, {ended} processes ended; in {outcome.seconds:.0f} s"
        yield outcome


def swept(size: str, layouts: Sequence[str], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What came of some operations in each of some layouts: "layout", "count" and what is "wrong"."""
    if not layouts:
        return
    ended = program("parts", json.dumps([size, layouts, names]), longest=LONGEST * len(layouts))
    answers = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    yield from answers
    if len(answers) == len(layouts):
        return
    ending, *others = layouts[len(answers) :]
    if len(names) == 1:
        words = f"{names[0]}: the process ended with {ended.code}: {ended.errors.strip()[-300:]}"
        yield {"layout": ending, "count": 1, "wrong": [words]}
    else:
        middle = len(names) // 2
        for half in (names[:middle], names[middle:]):
            yield from swept(size, [ending], half)
    yield from swept(size, others, names)
