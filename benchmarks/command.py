"""The command line of each benchmark: `python -m benchmarks.<group>` measures one group and prints its rows.

    python -m benchmarks.<group> [--repeats 5] [--quick] [--json out.json] [and its own options]

`--help` has the options of a group, with their defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.measure import Row
from benchmarks.report import COLUMNS, Report, cells, described, machine


def positive(text: str) -> int:
    """Reads a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def numbers(text: str) -> list[int]:
    """Reads positive integers, separated by commas."""
    return [positive(part) for part in text.split(",")]


def writable(text: str) -> str:
    """Reads the path of a file to write. The folder must exist: the file may be written an hour later."""
    if not pathlib.Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(pathlib.Path(text).parent)!r} does not exist")
    return text


def counts(text: str) -> list[int]:
    """Reads integers, 0 or larger, separated by commas."""
    return [0 if part == "0" else positive(part) for part in text.split(",")]


def switch(text: str) -> bool:
    """Reads 0 or 1."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor 1")
    return text == "1"


def choose_some(*known: str) -> Callable[[str], list[str]]:
    """Makes a reader of some of the known words, separated by commas."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"unknown {word!r}; choose from {', '.join(known)}")
        return words

    return parse


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a benchmark."""

    name: str  # the name on the command line
    full: str  # the default
    quick: str  # the default with `--quick`
    about: str  # the help text
    of: Callable[[str], Any] = positive  # converts the text to the value


REPEATS = Option("repeats", "5", "2", "number of interleaved repeats")
FEW_REPEATS = Option("repeats", "3", "2", "number of interleaved repeats")
"""For groups that take minutes: all of them together take less than two hours."""


def replicas(full: str, quick: str = "2") -> Option:
    """The numbers of replicas."""
    return Option("replicas", full, quick, "numbers of replicas", numbers)


def models(known: Iterable[str], quick: str, full: str = "") -> Option:
    """Which models, of those that are known; all of them without `full`."""
    return Option("models", full or ",".join(known), quick, "models", choose_some(*known))


def main(doc: str | None, measure: Callable[[argparse.Namespace], Iterable[Row]], *options: Option) -> None:
    """Measures and prints the rows. Rewrites the file after each row, so that a crash loses none.

    `measure` yields each row as soon as it is measured. An option with the name of a common option replaces it.
    """
    flags = parse(doc, options)
    report = Report(machine())
    print(described(report.machine))
    print(f"| {' | '.join(COLUMNS)} |\n| {' | '.join('---' for _ in COLUMNS)} |", flush=True)
    for row in measure(flags):
        report.rows.append(row)
        for line in cells(row):
            print(f"| {' | '.join(line)} |", flush=True)
        if flags.json:
            report.write(flags.json)


def parse(doc: str | None, options: Sequence[Option], arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, and fills in the defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {option.name: option for option in (REPEATS, *options)}
    for name, option in every.items():
        about = f"{option.about} (default {option.full}, quick {option.quick})"
        parser.add_argument("--" + name.replace("_", "-"), type=option.of, help=about)
    parser.add_argument("--quick", action="store_true", help="a quick trial with small sizes and few repeats")
    parser.add_argument("--json", type=writable, help="also write the rows to this file")
    flags = parser.parse_args(arguments)
    for name, option in every.items():
        if getattr(flags, name) is None:
            setattr(flags, name, option.of(option.quick if flags.quick else option.full))
    return flags
