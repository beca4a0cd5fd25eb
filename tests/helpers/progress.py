"""Prints how far the tests are and how long the rest will take, in place of a character for each test.

    30%   3,214 of 10,706 tests   0 failed   2 min 10 s so far, about 4 min 40 s left

A test of a slow folder counts for more than one of a quick folder, so that the estimate holds from the beginning.
"""

import time

import pytest

from helpers import tiers

WEIGHTS = {"workers": 1.3, "keras": 2.4, "checkpoints": 1.8, "clients": 3.0, "sharding": 3.0, "tpu": 0.9}
"""Seconds that a test of a folder takes, by and large; elsewhere `USUAL`."""

USUAL = 0.6

EVERY = 5
"""Percent between two lines."""

SLOWEST = 3
"""How many tests are named at the end, so that somebody sees that a new one is slow."""


class Progress:
    """The plugin of the process that prints.

    Args:
        config: pytest's configuration.
    """

    def __init__(self, config: pytest.Config):
        self._config = config
        self._weights: dict[str, float] = {}
        self._total, self._count = 0.0, 0
        self._done, self._printed = 0.0, 0
        self._started = self._began = time.monotonic()
        self._failed: set[str] = set()
        self._skipped = self._left_out = 0
        self._took: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        if tiers.tier(self._config) != tiers.ALL:
            self._write("Each process collects the tests first. A line for every 5 % follows.")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids) -> None:
        self._collected(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected([item.nodeid for item in session.items])

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._left_out += len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get(tiers.LEFT_OUT, 0))

    def _collected(self, ids: list[str]) -> None:
        if ids and not self._weights:
            self._weights = {each: _weight(each) for each in ids}
            self._total, self._began = sum(self._weights.values()), time.monotonic()
            self._count = len(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No character for a test that passed or failed."""
        if report.failed:
            return "failed" if report.when == "call" else "error", "", "FAILED"
        return ("passed", "", "") if report.passed and report.when == "call" else None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._skipped += report.skipped
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.add(report.nodeid)
            self._write(f"failed: {report.nodeid}")
        is_over = report.when not in ("setup", "call")  # "???" where the process of the test has died
        if is_over and report.nodeid in self._weights:
            self._done += self._weights.pop(report.nodeid)
            percent = int(100 * self._done / self._total)
            if percent >= self._printed + EVERY and self._weights:
                self._printed = percent
                self._write(self._line(percent))

    def _write(self, line: str) -> None:
        self._config.pluginmanager.getplugin("terminalreporter").write_line(line)

    def pytest_terminal_summary(self) -> None:
        if not self._total or self._weights or (tier := tiers.tier(self._config)) == tiers.ALL:
            return
        slowest = sorted(self._took, key=self._took.__getitem__)[-SLOWEST:]
        self._write("The slowest: " + ", ".join(f"{test} ({self._took[test]:.0f} s)" for test in reversed(slowest)))
        failed = f"{len(self._failed)} failed" if self._failed else "none failed" if self._skipped else "all passed"
        skipped = f", {self._skipped} skipped" if self._skipped else ""
        left = "`make test-full` runs" if tier == tiers.QUICK else "`make test` runs"
        again = " `python -m pytest --lf` runs what failed again." if self._failed else ""
        self._write(f"{self._count:,} tests, {failed}{skipped}. {left} {self._left_out:,} more.{again}")

    def _line(self, percent: int) -> str:
        now = time.monotonic()
        left = (now - self._began) * (self._total - self._done) / self._done
        finished = self._count - len(self._weights)
        return (
            f"{percent:3}%   {finished:,} of {self._count:,} tests   {len(self._failed)} failed   "
            f"{_minutes(now - self._started)} so far, about {_minutes(left)} left"
        )


def _weight(test: str) -> float:
    return WEIGHTS.get(test.split("/")[1], USUAL)


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
