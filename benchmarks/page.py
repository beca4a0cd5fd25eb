"""Makes the parts of docs/benchmarks.md, docs/benchmarks_all.md and docs/benchmarks/ that show the figures."""

from __future__ import annotations

import ast
import pathlib
import re

from benchmarks import summary
from benchmarks.report import COLUMNS, Report, aligned, cells, described

BEGIN, END = "<!-- made by python -m benchmarks: begin -->", "<!-- end -->"
ROWS = re.compile(
    r"(<!-- made by python -m benchmarks, rows of (\w+)(?:, ([^:]+))?: begin -->\n).*?(?=<!-- end -->)", re.DOTALL
)
"""The place of the rows of a group; its parts are the comment, the group, and how the names of its rows begin."""


def with_summary(page: str, report: Report) -> str:
    """The page of the summary with the ten rows between its two comments."""
    return between(page, f"{summary.table(report)}\n\nMeasured on: {described(report.machine)}.")


def with_machine(page: str, report: Report) -> str:
    """The index of all rows with the machine and the number of targets between its two comments."""
    met, targets = report.targets
    return between(page, f"Measured on: {described(report.machine)}. {met} of {targets} targets met.")


def with_rows(page: str, report: Report) -> str:
    """A page of groups with the rows of each between its comments; a group without figures keeps what stands there."""

    def rows(place: re.Match[str]) -> str:
        made, group, beginning = place.groups()
        return f"{made}\n{_group(report, group, beginning or '')}\n\n" if group in report.groups else place[0]

    return ROWS.sub(rows, page)


def _group(report: Report, group: str, beginning: str) -> str:
    """What a group measures, and its rows whose names begin so, as a table."""
    module = pathlib.Path(__file__).with_name(f"{group}.py").read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(module)) or ""  # of which importing it takes seconds
    told = [about.partition("\n")[0]]
    if group in report.failures:
        told.append(f"**Failed:** {report.failures[group]}")
    lines = [line[1:] for row in report.list_rows(group) if row.name.startswith(beginning) for line in cells(row)]
    if lines:
        told.append(aligned([list(COLUMNS[1:]), *lines]))
    return "\n\n".join(told)


def between(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with another text between two comments.

    Raises:
        ValueError: the page does not have the two comments.
    """
    before, has_begin, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"The page does not have {begin} followed by {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
