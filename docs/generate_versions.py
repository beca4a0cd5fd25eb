"""Puts the results of `make matrix` into docs/versions.md. Standard library only."""

import json
import pathlib
import re
from typing import Any

FOLDER = pathlib.Path(__file__).parent
PAGE, RESULTS = FOLDER / "versions.md", FOLDER / "versions.json"
BEGIN, END = "<!-- Made by docs/generate_versions.py of docs/versions.json. -->\n", "<!-- end -->"
COLUMNS = ("keras", "numpy", "jax")


def page(text: str, results: dict[str, dict[str, Any]]) -> str:
    """The text of the page, with the table of these results."""
    made = f"{BEGIN}\n{table(results)}\n\n{failures(results)}{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: made, text, flags=re.DOTALL)


def table(results: dict[str, dict[str, Any]]) -> str:
    """One row for each cell."""
    rows = ["| cell | Python | TensorFlow | Keras | NumPy | jax | passed | skipped | failed | minutes | date |"]
    rows.append("| " + "--- | " * 11)
    for name, cell in results.items():
        package = next(each for each in cell if each.startswith(("tensorflow", "tf-")))
        versions = [cell.get(column, cell.get(f"{column}-nightly", "none")) for column in COLUMNS]
        counts = [cell["passed"], cell["skipped"], len(cell["failed"]), f"{cell['seconds'] / 60:.1f}", cell["date"]]
        row = [name, cell["python"], f"`{package}` {cell[package]}", *versions, *counts]
        rows.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(row.rstrip() for row in rows)


def failures(results: dict[str, dict[str, Any]]) -> str:
    """The tests that failed, by cell; nothing if all passed."""
    lists = []
    for name, cell in results.items():
        if cell["failed"]:
            lists.append(f"What failed in `{name}`:\n\n" + "\n".join(f"- `{test}`" for test in cell["failed"]) + "\n\n")
    return "".join(lists)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))
