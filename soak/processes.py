"""Faults that need a new process each: signals, exits, forks, full disks, lack of memory, stuck replicas.

    python -m soak --only processes [--moments 6] [--seed 0]

Each is a program in `soak/programs`. Its output, its exit status and its time are checked. Two run at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from soak.outcome import Outcome

STRATEGIES = {
    "threads": "MirroredStrategy",
    "concurrent": "MirroredStrategy(concurrent=True)",
    "compiled": "TPUStrategy",
}
TRAINS = {name: STRATEGIES[name] for name in ("threads", "compiled")}

LONGEST = 120.0
"""The longest time of a program, in seconds. Then it is killed and counts as failed."""

ANSWER = 2.0
"""The longest time from a signal to the answer, in seconds: the line "interrupted", or the end of the process."""

AT_ONCE = 2
"""The number of programs that run at a time."""


@dataclasses.dataclass
class Ended:
    """How a program ended.

    Attributes:
        code: its return code; for a signal, minus its number.
        output: its stdout.
        errors: its stderr.
        seconds: the seconds from the signal to the answer; 0.0 without a signal.
    """

    code: int
    output: str
    errors: str
    seconds: float = 0.0

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


def program(
    name: str, *arguments: object, send: int | None = None, after: float = 0.0, longest: float = LONGEST
) -> Ended:
    """Runs a program to its end.

    Args:
        name: its module in `soak.programs`.
        arguments: its arguments.
        send: the signal to send to it.
        after: the seconds from its line "ready" to the signal.
        longest: the longest time in seconds.
    """
    command = [sys.executable, "-m", f"soak.programs.{name}", *map(str, arguments)]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, preexec_fn=_hear_interrupts
    )
    first, sent, answered = "", 0.0, 0.0
    try:
        if send is not None:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(after)
            sent = time.monotonic()
            process.send_signal(send)
            first += process.stdout.readline()  # "interrupted", or nothing more
            answered = time.monotonic()
        output, errors = process.communicate(timeout=longest)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        errors += f"\nkilled, since it had not ended after {longest:.0f} s"
    return Ended(process.returncode, first + output, errors, answered - sent)


def _hear_interrupts() -> None:
    """Restores Ctrl-C: a process in the background of a shell ignores it, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


Scenario = tuple[str, str, Callable[[], tuple[list[str], str]]]
"""The place, the fault, and a function that causes it and returns the problems and the results."""


def stopped_in_training(strategy: str, number: int, after: float) -> tuple[list[str], str]:
    """Stops a training with a signal, resumes it from its last checkpoint, and compares with an undisturbed one."""
    with tempfile.TemporaryDirectory() as directory:
        ended = program("training", strategy, directory, "--steps", 4000, send=number, after=after)
        wrong = ended.wrong(-number, "ready")
        if ended.seconds > ANSWER:
            wrong.append(f"the answer came {ended.seconds:.1f} s after the signal")
        if number == signal.SIGINT and "KeyboardInterrupt" not in ended.errors:
            wrong.append(f"no KeyboardInterrupt: {ended.errors[-500:]}")
        steps = 5 * (_last_step(directory) // 5) + 10
        resumed = program("training", strategy, directory, "--steps", steps)
        with tempfile.TemporaryDirectory() as other:
            alone = program("training", strategy, other, "--steps", steps)
        wrong += resumed.wrong() + alone.wrong()
        if resumed.last.split(": ")[-1] != alone.last.split(": ")[-1]:
            wrong.append(f"resumed it came to {resumed.last}, undisturbed to {alone.last}")
        return wrong, f"answered after {ended.seconds:.2f} s, resumed {resumed.last.split(':')[0]}"


def _last_step(directory: str) -> int:
    import tensorflow as tf

    latest = tf.train.latest_checkpoint(directory)
    return 0 if latest is None else int(latest.rpartition("-")[2])


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


def one(name: str, *arguments: object, code: int = 0, longest: float = 60.0) -> tuple[list[str], str]:
    """Runs a program that does all checks itself."""
    ended = program(name, *arguments, longest=longest)
    return ended.wrong(code), ended.last


def not_left(strategy: str) -> tuple[list[str], str]:
    """Runs a merge function in an endless TensorFlow op on the main thread: Python cannot end the wait."""
    ended = program("stuck", strategy, "merge op", "--timeout", 0.5, longest=30.0)
    return [], "left" if not ended.wrong() else "not left, a known limit: killed after 30 s"


def _make_scenario(
    where: str, what: str, name: str, *arguments: object, code: int = 0, longest: float = LONGEST
) -> Scenario:
    return STRATEGIES[where], what, lambda: one(name, where, *arguments, code=code, longest=longest)


def scenarios(moments: int, seed: int, rounds: int = 200) -> Iterator[Scenario]:
    """All scenarios.

    Args:
        moments: the number of random moments for each signal and strategy.
        seed: the seed of the moments.
        rounds: how often each process that catches Ctrl-C is interrupted.
    """
    draw = random.Random(f"moments {seed}")
    for name, where in TRAINS.items():
        for number, what in (
            (signal.SIGINT, "Ctrl-C ends a training, which goes on from its checkpoint"),
            (signal.SIGTERM, "SIGTERM ends a training, which goes on from its checkpoint"),
            (signal.SIGKILL, "kill -9 ends a training, which goes on from its checkpoint"),
        ):
            for _ in range(moments):
                after = draw.uniform(0.0, 0.6)
                yield where, what, functools.partial(stopped_in_training, name, number, after)
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
                yield _make_scenario(
                    name, what, "interrupts", "--rounds", rounds, "--seed", seed + k, *flags, longest=LONGEST
                )
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


def run(all_of_them: Sequence[Scenario]) -> Iterator[Outcome]:
    """Runs scenarios, and yields an outcome for each strategy and kind."""
    outcomes: dict[tuple[str, str], Outcome] = {}

    def timed(scenario: Scenario) -> tuple[float, tuple[list[str], str]]:
        began = time.monotonic()
        result = scenario[2]()
        return time.monotonic() - began, result

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for (where, what, _), (seconds, (wrong, found)) in zip(all_of_them, pool.map(timed, all_of_them), strict=True):
            outcome = outcomes.setdefault((where, what), Outcome("processes", where, what))
            outcome.add(seconds, wrong)
            outcome.found = found or outcome.found
            print(f"  {where}: {what}: {'FAILED ' + str(wrong) if wrong else 'ok, ' + found}", flush=True)
    yield from outcomes.values()
