"""`make test-network`: prints what was seen as a table, and writes it to docs/reliability.md; rows not run stay.

With NETWORK_SEED, which draws other faults than those of the page, nothing is written.
"""

import os
import pathlib

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- begin: make test-network -->", "<!-- end: make test-network -->"
STRATEGIES = {"mirrored": "MultiWorkerMirroredStrategy", "tpu": "TPUStrategy"}

_seen = {}


@pytest.fixture
def seen():
    """Notes what was seen: `seen(what, workers, strategy, text)`."""

    def note(what, workers, strategy, text):
        _seen.setdefault((what, workers), {})[strategy] = text

    return note


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and _seen and "NETWORK_SEED" not in os.environ:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        table, _, after = rest.partition(END)
        rows = {}
        for line in table.splitlines()[3:]:
            what, workers, *cells = (each.strip() for each in line.strip("|").split("|"))
            rows[what, int(workers)] = dict(zip(STRATEGIES, cells, strict=True))
        for key, cells in _seen.items():
            rows[key] = {**rows.get(key, {}), **cells}
        PAGE.write_text(f"{before}{BEGIN}\n{_table(rows)}\n{END}{after}")


def pytest_terminal_summary(terminalreporter):
    if _seen:
        terminalreporter.write_line(_table(_seen))


def _table(rows):
    head = f"| what happens | workers | {' | '.join(f'`{name}`' for name in STRATEGIES.values())} |"
    order = list(dict.fromkeys(what for what, _ in rows))
    lines = [
        f"| {what} | {workers} | {' | '.join(cells.get(strategy, '') for strategy in STRATEGIES)} |"
        for (what, workers), cells in sorted(rows.items(), key=lambda row: (order.index(row[0][0]), row[0][1]))
    ]
    return "\n".join([head, "| --- | ---: | --- | --- |", *lines])
