"""The results as a table and as JSON: the machine, the rows, and the groups that failed."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.measure import Comparison, Row
from replica_engine.watch import timeline

PACKAGES = ("replica-engine", "tensorflow", "jax", "jaxlib", "keras", "numpy")
"""The packages whose versions the report shows."""

COLUMNS = ("group", "what", "N", "contender", "median", "spread", "unit")
COLUMNS += ("peer", "its median", "its spread", "ratio", "target", "met", "checked")


def machine() -> dict[str, str]:
    """Describes this machine and the versions of packages."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    described = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    return described | {package: _version(package) for package in PACKAGES}


def described(machine: dict[str, str]) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of one or more groups."""

    machine: dict[str, str]  # the machine and versions that were measured
    rows: list[Row] = dataclasses.field(default_factory=list)  # the rows of all groups
    failures: dict[str, str] = dataclasses.field(default_factory=dict)  # by group, the reason why rows are missing

    def list_rows(self, group: str) -> list[Row]:
        """The rows of a group."""
        return [row for row in self.rows if row.group == group]

    @property
    def groups(self) -> list[str]:
        """The groups of the report, in order."""
        return list(dict.fromkeys([row.group for row in self.rows] + list(self.failures)))

    @property
    def targets(self) -> tuple[int, int]:
        """The number of targets that were met, and the number of targets."""
        met = [each.met for row in self.rows for each in row.comparisons if each.met is not None]
        return sum(met), len(met)

    def updated(self, newer: Report) -> Report:
        """This report, with its groups replaced by those of a newer report.

        Raises:
            ValueError: the reports have different machines or versions.
        """
        if self.machine != newer.machine:
            raise ValueError(f"Measured on {self.machine}, and now on {newer.machine}; write to another file.")
        return Report(
            self.machine,
            [row for row in self.rows if row.group not in newer.groups] + newer.rows,
            {group: why for group, why in self.failures.items() if group not in newer.groups} | newer.failures,
        )

    def succeeded(self) -> Report:
        """This report without the groups that failed."""
        return Report(self.machine, [row for row in self.rows if row.group not in self.failures], {})

    def sorted(self, order: Sequence[str]) -> Report:
        """This report with its groups in the given order."""
        return dataclasses.replace(self, rows=sorted(self.rows, key=lambda row: order.index(row.group)))

    def write(self, path: str | pathlib.Path) -> None:
        """Writes the report as JSON, one line for each row."""
        rows = ",\n".join("  " + json.dumps(row.to_json(), ensure_ascii=False) for row in self.rows)
        head = json.dumps({"machine": self.machine, "failures": self.failures}, indent=1, ensure_ascii=False)
        text = head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'
        pathlib.Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Report:
        """Reads a file that `write` wrote."""
        found: dict[str, Any] = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        return cls(found["machine"], [Row(**row) for row in found["rows"]], found["failures"])

    def table(self) -> str:
        """The report in Markdown: the machine, a line for each row and peer, and the failures."""
        lines = [line for row in self.rows for line in cells(row)]
        lines += [[group, "FAILED", *[""] * (len(COLUMNS) - 3), _cell(why)] for group, why in self.failures.items()]
        met, targets = self.targets
        return f"{described(self.machine)}\n\n{aligned([list(COLUMNS), *lines])}\n\n{met} of {targets} targets met."

    def _repr_html_(self) -> str:
        lines = [line for row in self.rows for line in cells(row)]
        return timeline.table(described(self.machine), COLUMNS, lines)


def cells(row: Row) -> list[list[str]]:
    """The lines of a row in the table: one for each peer, or one if the row has no peers."""
    told = "; ".join(filter(None, (row.check, row.note)))
    about = [row.group, row.title, "" if row.replicas is None else str(row.replicas), row.contender]
    mine = [*_figures(row.ours), row.unit]
    beside = [_beside(each, row.peers[each.peer]) for each in row.comparisons] or [[""] * 6]
    return [[*about, *mine, *peer, _cell(told)] for peer in beside]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[-1] = len(lines[0][-1])  # the last column needs no padding
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def digits(figure: float) -> str:
    """A number with three significant digits, or with all digits before the point."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:#.3g}"


def _figures(figures: Iterable[float]) -> list[str]:
    figures = list(figures)
    return [digits(statistics.median(figures)), f"{digits(min(figures))} to {digits(max(figures))}"]


def _beside(comparison: Comparison, figures: Iterable[float]) -> list[str]:
    target = "" if comparison.target is None else f"{comparison.target:.2f}"
    met = {None: "", True: "yes", False: "NO"}[comparison.met]
    return [comparison.peer, *_figures(figures), f"{comparison.ratio:.2f}", target, met]


def _cell(text: str) -> str:
    """A text for a cell: in one line, without characters that end a cell."""
    return " ".join(text.replace("|", "/").split())


def _processor() -> str:
    """The name of the processor, from the kernel."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not there"
