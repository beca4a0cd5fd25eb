"""Makes the parts of docs/benchmarks.md, docs/benchmarks_all.md and docs/benchmarks/ that show the figures."""

from __future__ import annotations

import importlib
import re

from benchmarks import summary
from benchmarks.report import COLUMNS, Report, aligned, cells, described

BEGIN, END = "<!-- made by python -m benchmarks: begin -->", "<!-- end -->"
ROWS = re.compile(
    r"(<!-- made by python -m benchmarks, rows of (\w+)(?:, ([^:]+))?: begin -->\n).*?(?=<!-- end -->)", re.DOTALL
)
"""The place of the rows of a group; its parts are the comment, the group, and how the names of its rows begin."""


def with_summary(page: str, report: Report) -> str:
    """The page of the summary with the ten rows between its two comments.

    Raises:
        ValueError: the page does not have the two comments.
    """
    return _between(page, f"{summary.table(report)}\n\n{_measured(report)}")


def with_machine(page: str, report: Report) -> str:
    """The index of all rows with the machine and the number of targets between its two comments.

    Raises:
        ValueError: the page does not have the two comments.
    """
    met, targets = report.targets
    return _between(page, f"{_measured(report)} {met} of {targets} targets met.")


def with_rows(page: str, report: Report) -> str:
    """A page of groups with the rows of each between its comments; a group without figures keeps what stands there."""

    def rows(place: re.Match[str]) -> str:
        made, group, beginning = place.groups()
        return f"{made}\n{_group(report, group, beginning or '')}\n\n" if group in report.groups else place[0]

    return ROWS.sub(rows, page)


def _measured(report: Report) -> str:
    return f"Measured on: {described(report.machine)}."


def _group(report: Report, group: str, beginning: str) -> str:
    """What a group measures, and its rows whose names begin so, as a table."""
    told = [_about(group)]
    if group in report.failures:
        told.append(f"**Failed:** {report.failures[group]}")
    lines = [line[1:] for row in report.list_rows(group) if row.name.startswith(beginning) for line in cells(row)]
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
