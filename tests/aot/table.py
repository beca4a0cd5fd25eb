"""The table in docs/accelerators.md: what compiled for which chip. `UPDATE_DOCS=1 make test-aot` writes it."""

import collections
import json
import os
import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "accelerators.md"
_BETWEEN = re.compile(r"(<!-- table -->\n).*?(<!-- end of the table -->)", re.DOTALL)
_NOTES = "AOT_NOTES"
"""The environment variable with the file that the processes of a test run write notes into."""


def note(chip, group, name, words):
    """Notes whether a body compiled; the words of its refusal, or ""."""
    if file := os.environ.get(_NOTES):
        with open(file, "a") as notes:
            notes.write(json.dumps([chip, group, name, words]) + "\n")


def begin(file):
    """Begins to take notes."""
    os.environ[_NOTES] = str(file)


def update(file):
    """Writes the table into the page."""
    rows = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]
    PAGE.write_text(_BETWEEN.sub(lambda found: found[1] + _table(rows) + found[2], PAGE.read_text()))


def _table(rows):
    chips = sorted({row[0] for row in rows}, key=lambda chip: (chip != "v5e:2x4", chip.startswith("h"), chip))
    groups = list(dict.fromkeys(row[1] for row in sorted(rows, key=lambda row: row[1])))
    counts = collections.Counter((row[1], row[0], not row[3]) for row in rows)
    lines = [f"| | {' | '.join(chips)} |", "| --- " * (len(chips) + 1) + "|"]
    for group in groups:
        cells = []
        for chip in chips:
            good, bad = counts[group, chip, True], counts[group, chip, False]
            cells.append(f"{good} of {good + bad}" if good + bad else "")
        lines.append(f"| {group} | {' | '.join(cells)} |")
    refused = collections.Counter((row[2], row[0]) for row in rows if row[3])
    said_of = {(row[2], row[0]): _brief(row[3]) for row in sorted(rows, reverse=True) if row[3]}
    words = [
        f'- {name}, for {chip} ({count}): "{said_of[name, chip]}"' for (name, chip), count in sorted(refused.items())
    ]
    said = ["", "Refused, in the compiler's words:", "", *words] if words else ["", "None of them was refused."]
    return "\n".join([*lines, *said]) + "\n"


def _brief(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Our own line, which names the program, comes before the compiler's.
    line = next((line for line in lines if re.match(r"[A-Z_]+: |[EF]\d{4} ", line)), lines[0])
    line = re.sub(r"^([EF]\d{4}) [\d:.]+ +\d+ ", r"\1 ", line)  # the time and the process
    return line.replace('"', "'").partition(", original computation")[0][:160]
