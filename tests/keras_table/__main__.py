"""Runs the programs and says what they compute beside one device and beside before; the head of the package has more.

export PYTHONPATH=.:tests
python -m tests.keras_table
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

from helpers import environment

from tests.baseline import record
from tests.baseline.record import Recorded
from tests.keras_table import table

if TYPE_CHECKING:
    from tests.keras_table.programs import Program

PACKAGE = "tests.keras_table"
BUILD = record.CHECKOUT / "build" / "keras_table"


def main() -> int:
    """Does what the arguments say."""
    parser = argparse.ArgumentParser(prog=f"python -m {PACKAGE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="the programs with this in their names")
    parser.add_argument("--values", action="store_true", help="print each array that differs too")
    parser.add_argument("--base", type=pathlib.Path, help="compare with the library in this folder, and not with kept")
    parser.add_argument("--keep", action="store_true", help="run twice, and write kept.json")
    for name in ("--record", "--share", "--done"):  # of the processes that `record` starts
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    environment.set_up()
    if given.record:
        record.write(pathlib.Path(given.record), given.share, given.only, given.done, package=PACKAGE)
        return 0
    if not any(given.only in program.name for program in _programs()):
        parser.error(f"no program has {given.only!r} in its name")
    if given.keep:
        _keep(given.only)
        return 0
    return _compare(given.base, given.only, given.values)


def _keep(only: str) -> None:
    from tests.keras_table import kept  # it starts TensorFlow

    run, again = (_run(record.CHECKOUT, name, only) for name in ("kept", "kept again"))
    kept.write(run, again, [program.name for program in _programs()])


def _compare(base: pathlib.Path | None, only: str, values: bool) -> int:
    from tests.keras_table import kept
    from tests.keras_table.programs import ONE_DEVICE

    before, repeats, computed_with = kept.read()
    if base is not None:
        before |= _run(base.resolve(), "base", only)
    elif computed_with != kept.computed_with():
        print(f"Kept with {computed_with}; this is {kept.computed_with()}. Bits may differ: --base compares those.")
    now = before | _run(record.CHECKOUT, "checkout", only)
    lines = [_line(program, before, now, repeats) for program in _programs() if only in program.name]
    # What one device computes is no program of the table, unless it is not what it was: then no line says much.
    lines = [line for line in lines if not (line.name.endswith(ONE_DEVICE) and line.change.alike)]
    print(table.printed(lines, values))
    return any(not line.change.alike for line in lines)


def _line(program: Program, before: Recorded, now: Recorded, repeats: dict[str, bool]) -> table.Line:
    name, device = program.name, program.device
    return table.Line(
        name,
        table.beside_one_device(before.get(device, {}), before.get(name, {})),
        table.beside_one_device(now[device], now[name]),
        table.beside_before(before.get(name, {}), now[name], repeats.get(name, True)),
    )


def _run(library: pathlib.Path, folder: str, only: str) -> Recorded:
    return record.of_library(library, BUILD / folder, only, package=PACKAGE)


def _programs() -> tuple[Program, ...]:
    from tests.keras_table.programs import programs

    return programs()


if __name__ == "__main__":
    sys.exit(main())
