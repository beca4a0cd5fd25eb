"""A model of the time of a training step by the number of hosts, fitted to the all-reduces of the group `hosts`.

    python -m benchmarks.hosts --json hosts.json
    python -m benchmarks.step_time hosts.json [--page docs/hosts/step_time.md]
    python -m benchmarks.step_time hosts.json --latency 30e-6 --bandwidth 1.2e9   # your network, measured by you

It prints the fitted numbers and a table, or writes them between the two marks of a page. Nothing is timed here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy import optimize

from benchmarks.hosts import OURS
from benchmarks.measure import Row
from benchmarks.page import END, between
from benchmarks.report import Report, aligned, described

BEGIN = "<!-- made by python -m benchmarks.step_time: begin -->"
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
OF_A_HOST = 8  # devices of a host

MEMORY = 10e9  # bytes a second that are added in a worker, if no row tells

MODELS = {"an MLP of 2.7 MB": (2.7e6, 0.05), "ResNet-50": (102e6, 0.4), "a transformer of 1 GB": (1e9, 4.0)}
"""Bytes of gradients, and seconds of a step without reductions; see the page."""

_ALL_REDUCE = re.compile(r"all-reduce, (\d+) workers(?: of (\d+))?$")


class Point(NamedTuple):
    """An all-reduce that was measured: of so many workers with so many replicas each, its bytes, its median time."""

    workers: int
    replicas: int
    size: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Network:
    """What an all-reduce costs."""

    latency: float  # seconds of one round of the ring
    bandwidth: float  # bytes a second that a worker sends
    memory: float = MEMORY  # bytes a second that are added inside a worker

    def all_reduce(self, size: float, hosts: int, devices: int = 1) -> float:
        """Seconds of an all-reduce of `size` bytes over hosts with so many devices each."""
        inside = devices * size / self.memory if devices > 1 else 0.0
        return inside + rounds(hosts) * self.latency + share(hosts) * size / self.bandwidth

    def step(self, compute: float, size: float, devices: int) -> float:
        """Seconds of a training step on so many devices, without overlap."""
        hosts = math.ceil(devices / OF_A_HOST)
        return compute + self.all_reduce(size, hosts, min(devices, OF_A_HOST))


def rounds(hosts: int) -> int:
    """Rounds of a ring: one to add and one to spread, for each other host."""
    return 2 * (hosts - 1)


def share(hosts: int) -> float:
    """What each host sends, as a multiple of the bytes to reduce."""
    return 2.0 * (hosts - 1) / hosts


def points(rows: Iterable[Row]) -> list[Point]:
    """The all-reduces of our strategy among the rows of the group."""
    found = []
    for row in rows:
        match = _ALL_REDUCE.match(row.name)
        if match and row.contender == OURS and row.at is not None:
            median = statistics.median_high(row.ours) / 1e3
            found.append(Point(int(match[1]), int(match[2] or 1), row.at, median))
    return found


def fitted(measured: Sequence[Point]) -> Network:
    """The network that comes closest to all-reduces, in relative error.

    Raises:
        ValueError: they are fewer than two with one replica a worker, or all of one size.
    """
    plain = [point for point in measured if point.replicas == 1]
    if len({point.size for point in plain}) < 2:
        raise ValueError("needs all-reduces of two sizes with one replica for each worker: python -m benchmarks.hosts")
    # By millions of bytes, so that both columns are of the same order. Neither is below 0: one may explain all.
    terms = [(rounds(p.workers) / p.seconds, share(p.workers) * p.size / 1e6 / p.seconds) for p in plain]
    (latency, per_million), _ = optimize.nnls(terms, [1.0] * len(terms))
    network = Network(float(latency), 1e6 / max(float(per_million), 1e-9))
    inside = [
        point.replicas * point.size / (point.seconds - network.all_reduce(point.size, point.workers))
        for point in measured
        if point.replicas > 1 and point.seconds > 1.05 * network.all_reduce(point.size, point.workers)
    ]
    return dataclasses.replace(network, memory=statistics.median_high(inside) if inside else MEMORY)


def text(network: Network, measured: Sequence[Point]) -> str:
    """The fitted numbers, how far the model is from what was measured, and the table."""
    fitted = (
        f"Latency of a round {network.latency * 1e3:.3g} ms, bandwidth {network.bandwidth / 1e6:,.0f} MB/s, sum inside "
        f"a worker {network.memory / 1e6:,.0f} MB/s."
    )
    rows = [["all-reduce", "measured, ms", "model, ms"]]
    for p in measured:
        model = network.all_reduce(p.size, p.workers, p.replicas)
        of = f"{p.workers} workers of {p.replicas}, {p.size:,.0f} bytes"
        rows.append([of, f"{p.seconds * 1e3:.3g}", f"{model * 1e3:.3g}"])
    told = "Seconds of a step, and which part of it is not waiting for sums:"
    table = [["devices", "hosts", *MODELS]]
    for devices in DEVICES:
        steps = [(compute, network.step(compute, size, devices)) for size, compute in MODELS.values()]
        cells = [f"{step:.3g} ({compute / step:.0%})" for compute, step in steps]
        table.append([f"{devices:,}", str(math.ceil(devices / OF_A_HOST)), *cells])
    return "\n\n".join([fitted, aligned(rows), told, aligned(table)])


def main() -> None:
    """Fits, and prints or writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", help="the figures of `python -m benchmarks.hosts --json`")
    parser.add_argument("--page", type=pathlib.Path, help="write between the marks of this page")
    parser.add_argument("--latency", type=float, help="seconds of a round, instead of the fitted ones")
    parser.add_argument("--bandwidth", type=float, help="bytes a second, instead of the fitted ones")
    flags = parser.parse_args()
    report = Report.read(pathlib.Path(flags.figures))
    measured = points(report.rows)
    given = {name: getattr(flags, name) for name in ("latency", "bandwidth") if getattr(flags, name) is not None}
    network = dataclasses.replace(fitted(measured), **given)
    made = f"Fitted to: {described(report.machine)}.\n\n{text(network, measured)}"
    if flags.page is None:
        print(made)
        return
    page = between(flags.page.read_text(encoding="utf-8"), made, BEGIN, END)
    flags.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
