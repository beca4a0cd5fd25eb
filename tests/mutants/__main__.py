"""Puts small faults into the library, one at a time, and says which tests find them.

    python -m tests.mutants [--count 50] [--seed 0] [--only NAME] [--list]

Each folder of the library has its share of the faults, by size. Those that nobody could see are in equivalent.txt, with
the reason, and others are drawn in their place. For each fault the quick tests that run the changed function begin,
until one fails; if none does, those of the full tier. It counts only if the same test passes without the fault.

Which tests run a function is found by a run of a tier's tests in a copy of the library whose functions say that they
were called: ten minutes for the quick ones, and longer than `make test-full` for the others, which run only if a fault
is left for them. The answers are in build/reach, until the library or a test changes.
"""

import argparse
import collections
import concurrent.futures
import hashlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

from tests.mutants.faults import Fault, faults, instrument

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "replica_engine"
EQUIVALENT = pathlib.Path(__file__).with_name("equivalent.txt")
LEFT_OUT = shutil.ignore_patterns(".*", "build", "site", "dist")  # of copies of the checkout


def main() -> int:
    """Runs the command; returns 1 if no test finds some fault, or the quick tests find less than 94 %."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="number of faults (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default %(default)s)")
    parser.add_argument("--only", help="the faults whose names begin so")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    flags = parser.parse_args()
    chosen = [each for each in _all() if each.name.startswith(flags.only)] if flags.only else _drawn(flags)
    if not chosen:
        parser.error(f"the name of no fault begins with {flags.only!r}; see --list")
    if flags.list:
        print(*(f"{fault.name}   {fault.change}" for fault in chosen), sep="\n")
        return 0
    found = dict.fromkeys(("quick", "rest"), 0)
    left = chosen
    for tier in found:
        missed = _missed(tier, left)
        found[tier], left = len(left) - len(missed), missed
    for fault in left:
        print(f"none   {fault.name}   {fault.change}")
    print(f"make test finds {found['quick']} of {len(chosen)}, make test-full {found['rest']} more")
    return int(bool(left) or found["quick"] < 0.94 * len(chosen))


def _missed(tier: str, chosen: list[Fault]) -> list[Fault]:
    """The faults that no test of a tier finds; the others are printed as they are found."""
    missed = []
    if chosen:
        reached = _reached(tier)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            trials = {pool.submit(_finder, fault, tier, _tests(fault, reached)): fault for fault in chosen}
            for trial in concurrent.futures.as_completed(trials):
                fault = trials[trial]
                if (test := trial.result()) is None:
                    missed.append(fault)
                print(f"{'no ' * (test is None)}{tier:6} {fault.name}   {fault.change}   {test or ''}", flush=True)
    return missed


def _all() -> list[Fault]:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = {f"{fault.name}   {fault.change}": fault for path in paths for fault in faults(PACKAGE, path)}
    equivalent = {line for line in EQUIVALENT.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
    if wrong := equivalent - found.keys():
        sys.exit(f"{EQUIVALENT} names what is no fault: {wrong}")
    return [fault for line, fault in found.items() if line not in equivalent]


def _drawn(flags: argparse.Namespace) -> list[Fault]:
    """As many as asked for: a folder by its share of the library's faults, then a kind, then a fault."""
    chance, every, kinds, chosen = random.Random(flags.seed), _all(), collections.defaultdict(list), {}
    for fault in every:
        kinds[fault.path.partition("/")[0], fault.name.split(":")[1]].append(fault)
    while len(chosen) < flags.count:
        folder = chance.choice(every).path.partition("/")[0]
        fault = chance.choice(kinds[chance.choice([key for key in kinds if key[0] == folder])])
        chosen[fault.name] = fault
    return list(chosen.values())


def _reached(tier: str) -> dict[str, set[str]]:
    """By test of a tier, the functions that it runs."""
    paths = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    sources = repr([(str(path), path.read_bytes()) for path in paths])
    answers = ROOT / "build" / "reach" / hashlib.sha256(sources.encode()).hexdigest()[:16] / tier
    if not answers.exists():
        print(f"finding out which functions the {tier} tests run", flush=True)
        answers.parent.mkdir(parents=True, exist_ok=True)
        beside = pathlib.Path(tempfile.mkdtemp(dir=answers.parent))
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(shutil.copytree(ROOT, f"{folder}/copy", ignore=LEFT_OUT, symlinks=True))
            instrument(copy / "replica_engine")
            if (ended := _ended(copy, [], "--tier", tier, REACH=str(beside))[0]) not in (0, 1):  # 1: some failed
                sys.exit(f"pytest ended with {ended} before all tests had run")
        beside.rename(answers)
    reached = collections.defaultdict(set)
    for path in answers.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            test, _, function = line.rpartition("\t")
            reached[test].add(function)
    return reached


def _tests(fault: Fault, reached: dict[str, set[str]]) -> list[str]:
    """The tests that may find a fault: those that run few functions come first, the others in any order."""
    function, cases = fault.name.partition(":")[0], collections.defaultdict(list)
    for test in sorted((test for test in reached if function in reached[test]), key=lambda test: len(reached[test])):
        cases[test.partition("[")[0]].append(test)
    first, others = [*cases][:60], [*cases][60:]
    random.Random(0).shuffle(others)
    return [test for function in first + others for test in cases[function]]


def _finder(fault: Fault, tier: str, tests: list[str]) -> str | None:
    """The first of the tests, of a tier, that fails with the fault and passes without it, or None."""
    options = ("-x", "-n", "0", "--timeout", "300", "--tier", tier)
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(shutil.copytree(ROOT, f"{folder}/copy", ignore=LEFT_OUT, symlinks=True))
        file = copy / "replica_engine" / fault.path
        whole, left = file.read_text(encoding="utf-8"), tests
        while left:
            file.write_text(fault.text, encoding="utf-8")
            ended, test = _ended(copy, left, *options)
            if ended in (0, 5):  # 5: none of them belongs to the tier
                break
            file.write_text(whole, encoding="utf-8")
            again, begun = _ended(copy, [test] if test else left[:20], *options)
            if again in (0, 5) or (begun and not test):
                return test or "before a test began"
            left = left[left.index(test) + 1 :] if test else []
    return None


def _ended(copy: pathlib.Path, tests: list[str], *options: str, **environment: str) -> tuple[int, str]:
    """How pytest ends in a copy of the checkout, with these tests or all, and which of them began last."""
    chosen, begun = copy.with_name("chosen"), copy.with_name("begun")
    chosen.write_text("\n".join(tests), encoding="utf-8")
    begun.write_text("", encoding="utf-8")
    files = sorted({test.partition("::")[0] for test in tests})
    env = {**os.environ, "PYTHONPATH": str(copy), "CHOSEN": str(chosen), "BEGUN": str(begun), **environment}
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.reach", *options, *files]
    done = subprocess.run(command, cwd=copy, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return done.returncode, begun.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
