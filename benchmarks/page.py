"""Makes the parts of docs/benchmarks.md and docs/benchmarks_all.md that show the figures."""

from __future__ import annotations

import importlib

from benchmarks import summary
from benchmarks.report import COLUMNS, Report, aligned, cells, described

BEGIN, END = "<!-- made by python -m benchmarks: begin -->", "<!-- end -->"


def with_summary(page: str, report: Report) -> str:
    """The page of the summary with the ten rows between its two comments.

    Raises:
        ValueError: the page does not have the two comments.
    """
    met, targets = report.targets
    told = f"Measured on: {described(report.machine)}. {met} of {targets} targets met."
    return _between(page, f"{summary.table(report)}\n\n{told}")


def with_table(page: str, report: Report) -> str:
    """The page of all rows with the report between its two comments.

    Raises:
        ValueError: the page does not have the two comments.
    """
    return _between(page, tables(report))


def tables(report: Report) -> str:
    """A line for the machine, and a section for each group."""
    met, targets = report.targets
    told = [f"Measured on: {described(report.machine)}.", f"{met} of {targets} targets met."]
    for group in report.groups:
        told.append(f"### {group}")
        told.append(_about(group))
        if group in report.failures:
            told.append(f"**Failed:** {report.failures[group]}")
        lines = [line[1:] for row in report.of(group) for line in cells(row)]
        if lines:
            told.append(aligned([list(COLUMNS[1:]), *lines]))
    return "\n\n".join(told)


def _between(page: str, text: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"The page does not have {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def _about(group: str) -> str:
    """The first line of the docstring of its module."""
    doc = importlib.import_module(f"benchmarks.{group}").__doc__ or ""
    return doc.partition("\n")[0]
