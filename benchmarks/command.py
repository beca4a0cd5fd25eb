"""The command line that all benchmarks have: `python -m benchmarks.<group>` measures one, and prints its rows.

python -m benchmarks.<group> [--repeats 7] [--quick] [--json out.json] [and its own options]
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
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def numbers(text: str) -> list[int]:
    """Such numbers with commas between them."""
    return [positive(part) for part in text.split(",")]


def writable(text: str) -> str:
    """A file in a folder that is there: it is written after an hour, maybe."""
    if not pathlib.Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(pathlib.Path(text).parent)!r}")
    return text


def counts(text: str) -> list[int]:
    """As `numbers`, or 0."""
    return [0 if part == "0" else positive(part) for part in text.split(",")]


def some_of(*known: str) -> Callable[[str], list[str]]:
    """Some of these words, with commas between them."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"there is no {word!r}; there are {', '.join(known)}")
        return words

    return parse


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a benchmark.

    Attributes:
        name: on the command line.
        full: what it is unless said.
        quick: what it is unless said, with `--quick`.
        about: its help.
        of: makes its value of the text.
    """

    name: str
    full: str
    quick: str
    about: str
    of: Callable[[str], Any] = positive


REPEATS = Option("repeats", "7", "2", "interleaved repeats")

Measure = Callable[[argparse.Namespace], Iterable[Row]]
"""Makes the rows, each as soon as it is measured."""


def main(doc: str | None, measure: Measure, *options: Option) -> None:
    """Measures, prints the rows, and writes them to a file after each, so that a crash loses none.

    Args:
        doc: of the module, for `--help`.
        measure: makes the rows; called before any framework is imported.
        options: of this benchmark, besides those that all have. One with the name of one of these replaces it.
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
    """The command line, with what was not said filled in."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {option.name: option for option in (REPEATS, *options)}
    for name, option in every.items():
        about = f"{option.about} (default {option.full}, quick {option.quick})"
        parser.add_argument("--" + name.replace("_", "-"), type=option.of, help=about)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--json", type=writable, help="write the rows to this file as well")
    flags = parser.parse_args(arguments)
    for name, option in every.items():
        if getattr(flags, name) is None:
            setattr(flags, name, option.of(option.quick if flags.quick else option.full))
    return flags
