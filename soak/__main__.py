"""`python -m soak`: faults of many kinds, load, values in parts, trainings; then writes docs/reliability.md."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from soak import report
from soak.outcome import Outcome

SUITES = {
    "faults": "soak.faults",
    "processes": "soak.processes",
    "restarts": "soak.restarts",
    "lost": "soak.lost_workers",
    "network": "soak.network",
    "checkpoints": "soak.checkpoints",
    "backups": "soak.backups",
    "load": "soak.load",
    "parts": "soak.parts",
    "trainings": "soak.trainings.suite",
}
"""The modules, whose `outcomes` takes the flags and yields an outcome for each kind of fault or load."""


def parsed() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--only", choices=SUITES, action="append", help="run only this suite")
    for name, default, about in (
        ("injections", 10_000, "number of random faults"),
        ("seed", 0, "seed of the first fault or training"),
        ("moments", 6, "number of random moments for each signal"),
        ("restarts", 25, "number of killed workers of each strategy"),
        ("lost", 3, "number of losses of each kind"),
        ("network", 20, "number of faults of each training in a network"),
        ("kills", 300, "number of killed saves, and fits"),
        ("runs", 100_000, "number of small runs in a row"),
        ("parts", 1_000, "most operations of divided values"),
        ("trainings", 500, "number of random trainings"),
        ("repeats", 3, "how often each training is trained"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default %(default)s)")
    about = "stop injecting faults, and training, after this many seconds"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=about)
    parser.add_argument("--training", metavar="JSON", help="trains this one, which a failure printed")
    parser.add_argument("--json", default="build/soak.json", help="file for the figures (default %(default)s)")
    parser.add_argument("--report", action="store_true", help="write docs/reliability.md from the figures")
    return parser.parse_args()


def main() -> int:
    """Runs the suites; returns 1 if a check failed, and 0 otherwise."""
    flags, began, outcomes = parsed(), time.time(), []
    for suite in flags.only or SUITES:
        print(f"{suite}:", flush=True)
        outcomes += importlib.import_module(SUITES[suite]).outcomes(flags)
    failed = [problem for outcome in outcomes for problem in outcome.problems]
    _save(pathlib.Path(flags.json), outcomes, time.time() - began)
    if flags.report:
        report.write(flags.json)
    count = sum(outcome.count for outcome in outcomes)
    print(f"{count:,} in {time.time() - began:.0f} s, {len(failed)} problems")
    for problem in failed[:20]:
        print(f"  {problem}")
    return 1 if failed else 0


def _save(path: pathlib.Path, outcomes: list[Outcome], seconds: float) -> None:
    """Writes the figures. Suites that were not run keep their earlier figures."""
    suites = {outcome.suite for outcome in outcomes}
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"seconds": {}, "outcomes": []}
    data["machine"] = report.machine()
    data["outcomes"] = [each for each in data["outcomes"] if each["suite"] not in suites]
    data["outcomes"] += map(dataclasses.asdict, outcomes)
    data["seconds"] |= {"+".join(sorted(suites)): seconds}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    sys.exit(main())
