"""Puts small faults into the library, one at a time, and says which tests find them.

    python -m tests.mutants [--count 50] [--seed 0] [--only NAME] [--json build/mutants.json]

The faults are drawn over all folders by size. Those that change nothing a user or a test could see are named in
`EQUIVALENT`, with the reason, and others are drawn in their place. For each the quick tests that ran the changed
function are run until one fails; if none does, those of the full tier. Which tests ran a function is measured first,
once, by a run of all tests with coverage (`build/reach`), which takes three times as long as `make test`. What runs in
processes of its own is not seen there, so the folders of `ALSO` are run besides.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import coverage

from tests.mutants.faults import Fault, faults

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "replica_engine"
REACH = ROOT / "build" / "reach"

LEFT_OUT = ("demo", "errors/pages", "testing")
"""Where no faults are put: programs to copy, pages, and what only tests use."""

EQUIVALENT: dict[str, str] = {}
"""Faults that nobody could see, and why."""

ALSO = {
    "hosts": ["tests/hosts", "tests/faults"],
    "process": ["tests/faults", "tests/test_startup.py"],
    "checkpoints": ["tests/checkpoints", "tests/keras/test_backup.py"],
    "__main__": ["tests/test_command.py", "tests/test_plan_command.py"],
}
"""By folder, the tests of what runs in processes of its own."""

AT_MOST = 400
"""How many tests are run for a fault; those that ran the fewest functions know most about each."""


def main() -> int:
    """Runs the command; returns 1 if a fault was found by no test."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="number of faults (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default %(default)s)")
    parser.add_argument("--only", help="the fault of this name, or the faults of names that begin so")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--json", default="build/mutants.json", help="file for the outcomes (default %(default)s)")
    flags = parser.parse_args()
    chosen = [fault for fault in every() if fault.name.startswith(flags.only)] if flags.only else drawn(flags)
    if flags.list:
        print(*(f"{fault.name}   {fault.change}" for fault in chosen), sep="\n")
        return 0
    measure_reach()
    found: dict[str, str] = {}
    for fault in chosen:
        found[fault.name] = tier_that_finds(fault)
        print(f"{found[fault.name]:6} {fault.name}   {fault.change}", flush=True)
        pathlib.Path(flags.json).write_text(json.dumps(found, indent=1))
    counts = {tier: list(found.values()).count(tier) for tier in ("quick", "rest", "none")}
    print(f"{len(found)} faults: make test finds {counts['quick']}, make test-full {counts['rest']} more")
    return 1 if counts["none"] else 0


def every() -> Iterator[Fault]:
    """All faults that the library can have."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not str(path.relative_to(PACKAGE)).startswith(LEFT_OUT):
            yield from (fault for fault in faults(PACKAGE, path) if fault.name not in EQUIVALENT)


def drawn(flags: argparse.Namespace) -> list[Fault]:
    """As many as asked for: each folder has its share of the library's faults, and each kind the same chance in it."""
    chance = random.Random(flags.seed)
    by_kind: dict[tuple[str, str], list[Fault]] = {}
    folders: list[str] = []
    for fault in every():
        folder = fault.path.partition("/")[0]
        folders.append(folder)
        by_kind.setdefault((folder, fault.name.split(":")[1]), []).append(fault)
    chosen: dict[str, Fault] = {}
    while len(chosen) < flags.count:
        folder = chance.choice(folders)
        fault = chance.choice(by_kind[chance.choice(sorted(key for key in by_kind if key[0] == folder))])
        chosen.setdefault(fault.name, fault)
    return list(chosen.values())


def measure_reach() -> None:
    """Runs all tests with coverage, unless that has been done."""
    if not REACH.exists():
        REACH.parent.mkdir(exist_ok=True)
        command = ["--tier", "all", "--cov=replica_engine", "--cov-context=test", "--cov-report=", "-q"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *command], cwd=ROOT, env={**os.environ, "COVERAGE_FILE": str(REACH)}
        )


def tests_of(fault: Fault) -> list[str]:
    """The tests that ran the function of a fault, the most particular ones first."""
    data = coverage.CoverageData(str(REACH))
    data.read()
    first, last = fault.lines
    by_line = data.contexts_by_lineno(str(PACKAGE / fault.path))
    reached = {
        context.partition("|")[0] for line, contexts in by_line.items() if first < line <= last for context in contexts
    }
    chosen = sorted(reached - {""}, key=lambda test: (fault.path.partition("/")[0] not in test, test))
    random.Random(0).shuffle(chosen)
    return chosen[:AT_MOST]


def tier_that_finds(fault: Fault) -> str:
    """The tier that has a test which fails with the fault: "quick" or "rest", or "none"."""
    tests, also = tests_of(fault), ALSO.get(fault.path.partition("/")[0].removesuffix(".py"), [])
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for each in ROOT.iterdir():
            if each.name not in ("replica_engine", "build", ".git") and not each.name.startswith(".venv"):
                (copy / each.name).symlink_to(each)
        shutil.copytree(PACKAGE, copy / "replica_engine", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "replica_engine" / fault.path).write_text(fault.text, encoding="utf-8")
        for tier in ("quick", "rest"):
            for asked in filter(None, (tests, also)):
                command = [sys.executable, "-m", "pytest", "-x", "-q", "--tier", tier, "-p", "no:cacheprovider", *asked]
                env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
                done = subprocess.run(command, cwd=copy, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                if done.returncode not in (0, 5):  # 5: none of them belongs to the tier
                    return tier
    return "none"


if __name__ == "__main__":
    sys.exit(main())
