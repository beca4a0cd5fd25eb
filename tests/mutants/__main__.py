"""Puts small faults into the library, one at a time, and says which tests find them.

    python -m tests.mutants [--count 50] [--seed 0] [--only NAME] [--jobs 2]

Each folder of the library has its share of the faults, by size. Those that nobody could see are in `EQUIVALENT`, with
the reason, and others are drawn in their place. For each fault the quick tests that run the changed function begin,
until one fails; if none does, those of the full tier. Which tests run a function is found once, by a run of all tests
in a copy of the library whose functions say that they were called; it takes as long as `make test-full`, and its answer
stays in build/reach until that folder is removed. Where very many tests run a function, a part of them is taken;
`--thorough` takes all.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tests.mutants import reach
from tests.mutants.faults import Fault, faults

ROOT = pathlib.Path(__file__).parents[2]
REACH = ROOT / "build" / "reach"
LEFT_OUT = ("testing",)  # what only tests use
PARTICULAR, OTHERS = 60, 120  # of how many test functions: those that run the fewest functions, and some of the rest

EQUIVALENT = {
    "pjrt.exchange.whole:wait:0": "the result is fetched next, which waits for the same program with the same errors",
    "xla.state.device_value.DeviceValue._restore_shape:copy:0": "a TensorShape serves as a shape too",
}
"""Faults that nobody could see, and why."""


def main() -> int:
    """Runs the command; returns 1 if a fault was found by no test."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="number of faults (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default %(default)s)")
    parser.add_argument("--only", help="the faults whose names begin so")
    parser.add_argument("--thorough", action="store_true", help="take all tests that run a function")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time (default %(default)s)")
    flags = parser.parse_args()
    chosen = [each for each in _all() if each.name.startswith(flags.only)] if flags.only else _drawn(flags)
    if flags.list:
        print(*(f"{fault.name}   {fault.change}" for fault in chosen), sep="\n")
        return 0
    _reached()
    with tempfile.TemporaryDirectory() as folder:
        if _pytest(_copy(folder), "tests/engine")[0]:
            sys.exit("the tests fail without a fault")
    tiers: collections.Counter[str] = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        tested = {pool.submit(_tier, fault, flags.thorough): fault for fault in chosen}
        for done in concurrent.futures.as_completed(tested):
            (tier, test), fault = done.result(), tested[done]
            tiers[tier] += 1
            print(f"{tier:6} {fault.name}   {fault.change}   {test}", flush=True)
    print(f"make test finds {tiers['quick']} of {len(chosen)}, make test-full {tiers['rest']} more")
    return 1 if tiers["none"] else 0


def _sources() -> Iterator[pathlib.Path]:
    package = ROOT / "replica_engine"
    return (path for path in sorted(package.rglob("*.py")) if not str(path.relative_to(package)).startswith(LEFT_OUT))


def _all() -> Iterator[Fault]:
    each = (fault for path in _sources() for fault in faults(ROOT / "replica_engine", path))
    return (fault for fault in each if fault.name not in EQUIVALENT)


def _drawn(flags: argparse.Namespace) -> list[Fault]:
    """As many as asked for: a folder by its share of the library's faults, then a kind, then a fault."""
    chance, kinds, folders = random.Random(flags.seed), collections.defaultdict(list), []
    for fault in _all():
        folders.append(fault.path.partition("/")[0])
        kinds[folders[-1], fault.name.split(":")[1]].append(fault)
    chosen: dict[str, Fault] = {}
    while len(chosen) < flags.count:
        folder = chance.choice(folders)
        fault = chance.choice(kinds[chance.choice([key for key in kinds if key[0] == folder])])
        chosen.setdefault(fault.name, fault)
    return list(chosen.values())


def _pytest(copy: pathlib.Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """How the tests end in a copy of the checkout, and which one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.reach", *arguments]
    env = {**os.environ, "PYTHONPATH": str(copy), **environment}
    done = subprocess.run(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, (failed[0].split(" ")[1] if failed else "")


def _copy(folder: str) -> pathlib.Path:
    left_out = shutil.ignore_patterns(".*", "build", "site", "dist")
    return pathlib.Path(shutil.copytree(ROOT, pathlib.Path(folder) / "copy", ignore=left_out, symlinks=True))


@functools.cache
def _reached() -> dict[str, set[str]]:
    if not REACH.exists():
        print("finding out which tests run which functions", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            copy, answers = _copy(folder), pathlib.Path(folder) / "reach"
            answers.mkdir()
            reach.instrument(copy / "replica_engine")
            _pytest(copy, "--tier", "all", REACH=str(answers))
            shutil.copytree(answers, REACH)
    return reach.of_tests(REACH)


def _tests(fault: Fault, thorough: bool) -> list[str]:
    """The tests that may find a fault: those that run the fewest functions first."""
    function, reached = fault.name.split(":")[0], _reached()
    cases = collections.defaultdict(list)
    for test in sorted((test for test in reached if function in reached[test]), key=lambda test: len(reached[test])):
        cases[test.partition("[")[0]].append(test)
    chosen, others = [*cases][:PARTICULAR], [*cases][PARTICULAR:]
    chosen += others if thorough else random.Random(0).sample(others, min(OTHERS, len(others)))
    return [test for function in chosen for test in cases[function]]


def _tier(fault: Fault, thorough: bool) -> tuple[str, str]:
    """The tier that has a test which fails with the fault, "quick" or "rest", and the test; or "none"."""
    tests = _tests(fault, thorough)
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(folder)
        (copy / "replica_engine" / fault.path).write_text(fault.text, encoding="utf-8")
        chosen = pathlib.Path(folder) / "chosen"
        chosen.write_text("\n".join(tests), encoding="utf-8")
        files = sorted({test.partition("::")[0] for test in tests})
        for tier in ("quick", "rest") if tests else ():
            ended, test = _pytest(copy, "-x", "-n", "0", "--timeout", "300", "--tier", tier, *files, CHOSEN=str(chosen))
            if ended not in (0, 5):  # 5: none of them belongs to the tier
                return tier, test
    return "none", ""


if __name__ == "__main__":
    sys.exit(main())
