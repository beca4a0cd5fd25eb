"""Runs all benchmarks, each in a separate process, and prints one table.

    python -m benchmarks                      all groups; writes figures, pictures and the page into docs/
    python -m benchmarks --only eager_run     one group; replaces its part in docs/
    python -m benchmarks --quick              a quick trial of all groups; does not write into docs/
    python -m benchmarks --docs               draws the pictures and writes the page from the figures in docs/

If a group fails, the table names it with the reason, the other groups still run, and the exit status is 1. A missed
target is not a failure; the table shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks import command, page, picture
from benchmarks.report import Report, machine

GROUPS = ("eager_run", "launch", "models", "train_step", "accumulation", "start_up", "first_step", "keras_fit")
GROUPS += ("device_loop", "host_call", "concurrency", "memory", "sharding", "checkpoints", "hosts", "control_flow")
GROUPS += ("growth", "cpu_rewrites", "aot")
"""The groups in the order of the table. Each is a module that calls `command.main`."""

PATIENCE = 6 * 3600  # the longest time for a group, in seconds

QUICK = "--quick: a trial that the benchmarks run. Sizes and repeats are too small: its figures mean nothing."

ROOT = pathlib.Path(__file__).parents[1]
SO_FAR = ROOT / "build" / "benchmarks.json"

DOCS = ROOT / "docs"
FIGURES, SUMMARY, RATIOS, GROWTH = (
    DOCS / name for name in ("benchmarks.json", "benchmarks.svg", "benchmarks_all.svg", "growth.svg")
)
SUMMARY_PAGE, PAGE = DOCS / "benchmarks.md", DOCS / "benchmarks_all.md"
PAGES = sorted((DOCS / "benchmarks").glob("*.md"))  # those of groups


def run_group(group: str, options: list[str], on: dict[str, str], libtpu: str | None) -> Report:
    """The rows of a group, measured in a separate process, and the reason if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        figures, log = pathlib.Path(folder, "rows.json"), pathlib.Path(folder, "log")
        arguments = [sys.executable, "-m", f"benchmarks.{group}", "--json", str(figures), *options]
        with log.open("w") as errors:
            folders = [libtpu if group == "aot" else None, os.environ.get("PYTHONPATH")]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
            # A session of its own: the processes that the group started end with it.
            process = subprocess.Popen(
                arguments, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            try:
                status = process.wait(PATIENCE)
                printed = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
                why = "" if status == 0 else f"exit status {status}: {printed[-1]}"
            except subprocess.TimeoutExpired:
                why = f"not done in {PATIENCE} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows = Report.read(figures).rows if figures.exists() else []
        if not rows:
            why = why or "it has no rows"
        if why:
            print(log.read_text(errors="replace"), file=sys.stderr)
    return Report(on, rows, {group: why} if why else {})


def measure(groups: list[str], options: list[str], libtpu: str | None) -> Report:
    """Measures the groups in turn, reports progress on stderr, and leaves the figures so far in build/."""
    report = Report(machine())
    SO_FAR.parent.mkdir(exist_ok=True)
    for group in groups:
        begin = time.perf_counter()
        part = run_group(group, options, report.machine, libtpu)
        report = report.updated(part)
        report.write(SO_FAR)
        told = part.failures.get(group, "done")
        print(f"{group}: {len(part.rows)} rows in {time.perf_counter() - begin:.0f} s, {told}", file=sys.stderr)
    return report


def kept(groups: list[str]) -> Report:
    """The report in docs/, without the given groups.

    Raises:
        ValueError: it was measured on another machine, or with other versions.
    """
    new = Report(machine())
    if set(groups) == set(GROUPS) or not FIGURES.exists():
        return new
    return Report.read(FIGURES).updated(new)


def publish(report: Report) -> None:
    """Writes the figures, the pictures and the pages into docs/."""
    report = report.sorted(GROUPS)
    report.write(FIGURES)
    picture.draw_summary(report, SUMMARY)
    picture.draw_ratios(report, RATIOS)
    picture.draw_growth(report, GROWTH)
    SUMMARY_PAGE.write_text(page.with_summary(SUMMARY_PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
    PAGE.write_text(page.with_machine(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
    for each in PAGES:
        each.write_text(page.with_rows(each.read_text(encoding="utf-8"), report), encoding="utf-8")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(GROUPS), help="groups to measure (default %(default)s)")
    parser.add_argument("--repeats", type=command.positive, help="number of interleaved repeats (default 7)")
    parser.add_argument("--quick", action="store_true", help="a quick trial with small sizes and few repeats")
    parser.add_argument("--json", type=command.writable, help="write the figures to this file instead of docs/")
    parser.add_argument("--picture", type=command.writable, help="draw the ratios into this file instead of docs/")
    about = "measure nothing; draw the pictures and write the page from the figures in docs/"
    parser.add_argument("--docs", action="store_true", help=about)
    about = "a folder with libtpu, for the group aot alone: jax looks for TPUs wherever it finds that"
    parser.add_argument("--libtpu", help=about)
    flags = parser.parse_args()
    flags.only = flags.only.split(",")
    if unknown := set(flags.only) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; the groups are {', '.join(GROUPS)}")
    return flags


def main() -> int:
    """Measures, prints the table and writes the files; returns 1 if a group failed, and 0 otherwise."""
    flags = parse()
    if flags.docs:
        publish(Report.read(FIGURES))
        return 0
    into_docs = not (flags.quick or flags.json or flags.picture)
    before = kept(flags.only) if into_docs else None  # before measuring: it may fail
    options = ["--quick"] * flags.quick + ([] if flags.repeats is None else ["--repeats", str(flags.repeats)])
    if flags.quick:
        print(QUICK, file=sys.stderr)
    report = measure(flags.only, options, flags.libtpu)
    print(report.table())
    if flags.quick:
        print(f"\n{QUICK}")
    if flags.json:
        report.write(flags.json)
    if flags.picture:
        picture.draw_ratios(report, flags.picture)
    if before:
        publish(before.updated(report.succeeded()))
        print(f"Written: {FIGURES}, {SUMMARY_PAGE}, {PAGE}, its pages and their pictures.", file=sys.stderr)
        for group in report.failures:
            print(f"{group} failed: the files keep its earlier figures.", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
