"""Faults that need a new process each: signals, exits, forks, full disks, lack of memory, stuck replicas.

Each is a program in `soak/programs`. Its output, its exit status and its time are checked. Two run at a time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.measure import seconds
from soak.outcome import Outcome, tell

ROOT = pathlib.Path(__file__).parents[1]

TRAINS = {"threads": "MirroredStrategy", "compiled": "TPUStrategy"}
STRATEGIES = {**TRAINS, "concurrent": "MirroredStrategy(concurrent=True)"}

LONGEST = 120.0  # the longest time of a program, in seconds. Then it is killed and counts as failed.

ANSWER = 2.0
"""The longest time from a signal to the answer, in seconds: the line "interrupted", or the end of the process."""

AT_ONCE = 2  # the number of programs that run at a time


@dataclasses.dataclass
class Ended:
    """How a program ended."""

    code: int  # its return code; for a signal, minus its number
    output: str  # its stdout
    errors: str  # its stderr
    seconds: float = 0.0  # the seconds from the signal to the answer; 0.0 without a signal

    @property
    def last(self) -> str:
        """The line before "done", which has the results of a program."""
        lines = self.output.strip().split("\n")
        return lines[-2] if lines[-1] == "done" and len(lines) > 1 else ""

    def wrong(self, code: int = 0, said: str = "done") -> list[str]:
        """The problems with its end."""
        if self.code == code and said in self.output.split("\n"):
            return []
        return [f"ended with {self.code}, not {code}; printed {self.output!r}; {self.errors[-1500:]}"]


def program(name: str, *arguments: object, longest: float = LONGEST, **options: Any) -> Ended:
    """Runs a module of `soak.programs` to its end; the options are those of `python`."""
    return python("-m", f"soak.programs.{name}", *arguments, longest=longest, **options)


def python(
    *arguments: object,
    longest: float | None,
    send: int | None = None,
    after: float = 0.0,
    stop: int = signal.SIGKILL,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Runs Python to its end, or ends it by the signal `stop` after the longest time, in seconds; None for any.

    The signal `send` is sent to it so many seconds `after` its line "ready".
    """
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        # A process in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    first, sent, answered = "", 0.0, 0.0
    try:
        if send is not None:
            first = process.stdout.readline()
            time.sleep(after)
            sent = time.monotonic()
            process.send_signal(send)
            first += process.stdout.readline()  # "interrupted", or nothing more
            answered = time.monotonic()
        output, errors = process.communicate(timeout=longest)
    except subprocess.TimeoutExpired:
        process.send_signal(stop)
        output, errors = process.communicate()
        errors += f"\nended, since it was not over after {longest:.0f} s"
    return Ended(process.returncode, first + output, errors, answered - sent)


Scenario = tuple[str, str, Callable[[], tuple[list[str], str]]]
"""The place, the fault, and a function that causes it and returns the problems and the results."""


def stopped_in_training(strategy: str, number: int, after: float) -> tuple[list[str], str]:
    """Stops a training with a signal, resumes it from its last checkpoint, and compares with an undisturbed one."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as directory:
        ended = program("training", strategy, directory, "--steps", 4000, send=number, after=after)
        wrong = ended.wrong(-number, "ready")
        if ended.seconds > ANSWER:
            wrong.append(f"the answer came {ended.seconds:.1f} s after the signal")
        if number == signal.SIGINT and "KeyboardInterrupt" not in ended.errors:
            wrong.append(f"no KeyboardInterrupt: {ended.errors[-500:]}")
        latest = tf.train.latest_checkpoint(directory) or "none-0"
        steps = 5 * (int(latest.rpartition("-")[2]) // 5) + 10
        resumed = program("training", strategy, directory, "--steps", steps)
        with tempfile.TemporaryDirectory() as other:
            alone = program("training", strategy, other, "--steps", steps)
        wrong += resumed.wrong() + alone.wrong()
        if resumed.last.split(": ")[-1] != alone.last.split(": ")[-1]:
            wrong.append(f"resumed it came to {resumed.last}, undisturbed to {alone.last}")
        return wrong, f"answered after {ended.seconds:.2f} s, resumed {resumed.last.split(':')[0]}"


def full_disk(strategy: str) -> tuple[list[str], str]:
    """Makes saving fail in the middle of a training, which continues and has the same result."""
    ended = []
    for flags in ([], ["--full-disk"]):
        with tempfile.TemporaryDirectory() as directory:
            ended.append(program("training", strategy, directory, *flags))
    wrong = ended[0].wrong() + ended[1].wrong()
    if ended[0].last != ended[1].last:
        wrong.append(f"it came to {ended[1].last}, not to {ended[0].last}")
    return wrong, ended[1].output.split("\n")[1]


def one(name: str, *arguments: object, code: int = 0) -> tuple[list[str], str]:
    """Runs a program that does all checks itself."""
    ended = program(name, *arguments)
    return ended.wrong(code), ended.last


def not_left(strategy: str) -> tuple[list[str], str]:
    """Runs a merge function in an endless TensorFlow op on the main thread: Python cannot end the wait."""
    ended = program("stuck", strategy, "merge op", "--timeout", 0.5, longest=30.0)
    return [], "left" if not ended.wrong() else "not left, a known limit: killed after 30 s"


def _make_scenario(where: str, what: str, name: str, *arguments: object, code: int = 0) -> Scenario:
    return STRATEGIES[where], what, lambda: one(name, where, *arguments, code=code)


def scenarios(moments: int, seed: int, rounds: int = 200) -> Iterator[Scenario]:
    """All scenarios, with so many random moments for each signal, and rounds of each process that catches Ctrl-C."""
    draw = random.Random(f"moments {seed}")
    for name, where in TRAINS.items():
        for number, who in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGKILL, "kill -9")):
            for _ in range(moments):
                stopped = functools.partial(stopped_in_training, name, number, draw.uniform(0.0, 0.6))
                yield where, f"{who} ends a training, which goes on from its checkpoint", stopped
        yield where, "the disk is full while a checkpoint is saved", functools.partial(full_disk, name)
        for what, way, code in (
            ("a run in an atexit function", "atexit", 0),
            ("an exception on a replica ends the process", "error", 1),
            ("sys.exit(3) on a replica ends the process", "exit", 3),
            ("the process ends while daemon threads run", "daemon", 0),
            ("the main thread dies while another one runs", "main dies", 1),
            ("the process ends with replicas parked", "parked", 0),
            ("a strategy in a cycle is finalised at exit", "del", 0),
        ):
            for _ in range(moments if way == "daemon" else 1):
                yield _make_scenario(name, what, "exits", way, code=code)
        yield _make_scenario(name, "a fork before TensorFlow starts", "forks", "before")
        yield _make_scenario(name, "a fork after runs: the child's run is a ForkedError", "forks", "after")
        yield _make_scenario(name, "a replica asks for 4 TB", "memory", "huge")
        yield _make_scenario(name, "a replica meets the process' limit of memory", "memory", "limit")
    for name in STRATEGIES:
        for k in range(max(1, moments // 2)):
            for who, flags in (("Ctrl-C", ()), ("an exception of another thread", ("--of-a-thread",))):
                what = f"{who}, caught, {rounds} times in one process"
                yield _make_scenario(name, what, "interrupts", "--rounds", rounds, "--seed", seed + k, *flags)
    for name in ("threads", "concurrent"):
        for what, text in (
            ("op", "a replica stuck in a C++ op"),
            ("loop", "a replica stuck in a loop"),
            ("merge", "a merge function that sleeps"),
            ("other thread", "a replica stuck in a C++ op, of a run of another thread"),
        ):
            yield _make_scenario(name, f"{text}: timeout=", "stuck", what, "--timeout", 0.5)
            if what != "other thread":
                yield _make_scenario(name, f"{text}: Ctrl-C", "stuck", what, "--interrupt")
    yield STRATEGIES["threads"], "a merge function stuck in a C++ op: timeout=", lambda: not_left("threads")
    yield _make_scenario("compiled", "a host call that sleeps: timeout=", "stuck", "host", "--timeout", 0.5)
    yield _make_scenario("compiled", "a host call that sleeps: Ctrl-C", "stuck", "host", "--interrupt")


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Runs all scenarios, and yields an outcome for each strategy and kind."""
    found_of: dict[tuple[str, str], Outcome] = {}
    all_of_them = list(scenarios(flags.moments, flags.seed))
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        timed = pool.map(lambda scenario: seconds(scenario[2]), all_of_them)
        for (where, what, _), (taken, (wrong, found)) in zip(all_of_them, timed, strict=True):
            outcome = found_of.setdefault((where, what), Outcome("processes", where, what))
            outcome.add(taken, wrong)
            outcome.found = found or outcome.found
            tell(f"{where}: {what}", wrong, found)
    yield from found_of.values()
