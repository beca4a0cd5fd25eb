"""Compares the checkout with another state of the library, or keeps values: `make baseline`, or by hand

export PYTHONPATH=.:tests
python -m tests.baseline --base FOLDER      runs all programs on FOLDER/replica_engine and on the checkout, and compares
python -m tests.baseline --base .           runs them twice on the checkout: nothing may differ
python -m tests.baseline --base FOLDER --only "loops 0"    the programs with this in their names
python -m tests.baseline --keep             writes kept.json; the head of the package says when
python -m tests.baseline --list             says what each program is

The status is 1 if a difference is not in `allowed.py`, or if all programs were run and nothing needs a line of it.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

from helpers import environment

from tests.baseline import kept, record
from tests.baseline.allowed import ALLOWED
from tests.baseline.compare import differences
from tests.baseline.record import RAISED

if TYPE_CHECKING:
    from tests.baseline.programs import Program

BUILD = record.CHECKOUT / "build" / "baseline"
NUDGES = (1, 2, 3)


def main() -> int:
    """Does what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.baseline", description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=pathlib.Path, help="the folder of another state of the library")
    parser.add_argument("--only", default="", help="the programs with this in their names")
    parser.add_argument("--keep", action="store_true", help="write the values that make test-full compares with")
    parser.add_argument("--list", action="store_true", help="say what each program is, and run nothing")
    for name in ("--record", "--share", "--done"):  # of the processes that `record` starts
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--nudge", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    environment.set_up()
    if given.only and not given.record and not any(given.only in program.name for program in _programs()):
        parser.error(f"no program has {given.only!r} in its name")
    if given.record:
        record.write(pathlib.Path(given.record), given.share, given.only, given.done, given.nudge)
    elif given.keep:
        _keep(given.only)
    elif given.list:
        _list(given.only)
    elif given.base is not None:
        return _compare(given.base.resolve(), given.only)
    else:
        parser.error("one of --base, --keep and --list is needed")
    return 0


def _compare(base: pathlib.Path, only: str) -> int:
    before = record.of_library(base, BUILD / "base", only)
    now = record.of_library(record.CHECKOUT, BUILD / "checkout", only)
    used, new = set(), []
    for difference in differences(before, now):
        lines = [line for line in ALLOWED if line.allows(difference)]
        used.update(lines)
        print(f"{difference}\n    {f'allowed: {lines[0].why}' if lines else 'NOT ALLOWED'}")
        new += [] if lines else [difference]
    needless = [] if only else [line for line in ALLOWED if not (line.by_chance or line in used)]
    for line in needless:
        print(f"Nothing needs this line of allowed.py: {line}")
    programs = sorted({difference.program for difference in new})
    print(f"{len(now)} programs; {len(new)} differences in {len(programs)} that are not allowed: {', '.join(programs)}")
    return bool(new or needless)


def _keep(only: str) -> None:
    plain = record.of_library(record.CHECKOUT, BUILD / "kept", only)
    nudged = [record.of_library(record.CHECKOUT, BUILD / f"nudge {nudge}", only, nudge) for nudge in NUDGES]
    raised = [f"{name}: {of[RAISED]}" for each in (plain, *nudged) for name, of in each.items() if RAISED in of]
    if raised:
        sys.exit("\n".join(["Nothing is kept, since programs raised:", *raised]))
    kept.write(plain, nudged, {program.name: program.check for program in _programs()})


def _list(only: str) -> None:
    for program in _programs():
        if only in program.name:
            print(f"{program.name}: {program.plan}")


def _programs() -> tuple[Program, ...]:
    from tests.baseline.programs import programs  # it starts TensorFlow

    return programs()


if __name__ == "__main__":
    sys.exit(main())
