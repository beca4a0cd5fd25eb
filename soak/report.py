"""Writes the table of docs/reliability.md from the figures of a soak."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

from benchmarks import report
from benchmarks.page import between

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- begin: make soak -->", "<!-- end: make soak -->"


def machine() -> dict[str, str]:
    """Describes the day, the machine and the versions."""
    return {"date": datetime.date.today().isoformat()} | report.machine()


def write(figures: str, page: pathlib.Path = PAGE) -> None:
    """Writes the table between its two marks on the page; the text around it stays."""
    data = json.loads(pathlib.Path(figures).read_text())
    page.write_text(between(page.read_text(encoding="utf-8"), _table(data), BEGIN, END), encoding="utf-8")


def _table(data: dict[str, Any]) -> str:
    """The whole table in Markdown."""
    outcomes = data["outcomes"]
    of = {suite: [each for each in outcomes if each["suite"] == suite] for suite in ("faults", *_TITLES)}
    lines = [f"Measured on: {report.described(data['machine'])}.", "", _summary(of)]
    columns = sorted({each["where"] for each in of["faults"]})
    lines += ["", "### Random faults in one process", "", f"| where it goes wrong | {' | '.join(columns)} | lost |"]
    lines.append(f"| --- |{' ---: |' * (len(columns) + 1)}")
    for what in dict.fromkeys(sorted(each["what"] for each in of["faults"])):
        rows = {each["where"]: each for each in of["faults"] if each["what"] == what}
        counts = [f"{rows[column]['count']:,}" if column in rows else "" for column in columns]
        lines.append(f"| {what} | {' | '.join(counts)} | {_lost(rows.values())} |")
    for suite, title in _TITLES.items():
        if not of[suite]:
            continue
        lines += ["", f"### {title}", "", "| what | strategy | times | lost | found |"]
        lines.append("| --- | --- | ---: | ---: | --- |")
        for each in of[suite]:
            cells = [each["what"], each["where"], f"{each['count']:,}", str(_lost([each])), each["found"]]
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


_TITLES = {
    "processes": "Processes",
    "restarts": "Jobs of two workers that start again",
    "lost": "How soon a lost worker is known",
    "network": "Trainings in a network that faults disturb",
    "checkpoints": "Killed while checkpoints are saved",
    "backups": "Killed while fit makes backups",
    "load": "Load",
    "parts": "Operations of values in parts",
    "trainings": "Random trainings",
}


def _summary(of: dict[str, list[dict[str, Any]]]) -> str:
    count = {suite: sum(each["count"] for each in rows) for suite, rows in of.items()}
    lost = sum(len(each["problems"]) for rows in of.values() for each in rows)
    seconds = sum(each["seconds"] for each in of["faults"])
    return (
        f"**{count['faults']:,} random faults** in {seconds / 60:.0f} minutes, {count['processes']:,} scenarios in "
        f"processes of their own, {count['restarts']:,} jobs with a killed worker, {count['lost']:,} with a lost one, "
        f"{count['network']:,} faults in a network, {count['checkpoints']:,} killed while saving, {count['backups']:,} "
        f"in a fit with backups, {count['load']:,} runs under load, {count['parts']:,} cases of operations in parts, "
        f"{count['trainings']:,} random trainings. **{lost} lost.**"
    )


def _lost(rows: Any) -> int:
    """The number of faults after which a check failed."""
    return sum(len({problem.split(":")[0] for problem in each["problems"]}) for each in rows)
