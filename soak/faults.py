"""Injects thousands of random faults in one process, and checks the state after each.

    python -m soak --only faults [--injections 10000] [--seed 0]

Injection k is drawn with the seed `seed + k`: strategy, number of replicas, form of `run`, point, kind of exception,
replicas, thread. After each injection:

- `run` has raised the same exception object, or the documented one in its place, and it names the replica;
- all variables have the values in the ledger (`model.Ledger`), bit by bit;
- the next run on the same strategy returns the right number and makes a whole step;
- there are no new threads.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from replica_engine import errors
from replica_engine.pjrt import executable
from soak import injection as points
from soak import model as places
from soak.bench import Bench, described, numbers
from soak.exceptions import KINDS, NO_NOTES, NO_TEXT
from soak.injection import Injection
from soak.model import WIDTH
from soak.outcome import Outcome

GRACE = 5.0
"""Seconds in which threads must end."""


class _ThreadLost(Exception):
    """After a fault, nothing works on this thread any more. The arguments are the problems."""


class Injector:
    """Injects faults one after another, and checks the state after each."""

    def __init__(self) -> None:
        self._benches: dict[tuple[str, int], Bench] = {}

    def inject(self, injection: Injection) -> list[str]:
        """Injects one fault.

        Returns:
            The problems after it; empty if every check passed.
        """
        key = injection.strategy, injection.size
        if key not in self._benches:
            self._benches[key] = Bench(*key)
        bench, draw = self._benches[key], random.Random(f"numbers {injection.seed}")
        if injection.form not in bench.warm:
            problems = bench.step(injection.form, draw)  # makes the threads, traces and compiles, before the fault
            if problems:
                return [f"before the fault {each}" for each in problems]
            bench.warm.add(injection.form)
        if not bench.compiled:
            bench.strategy.run(lambda: None)  # makes the threads, as any run does
        threads = count_threads()
        bench.model.hosted = bench.compiled or injection.form != points.EAGER
        inject = _inputs if injection.point == points.INPUTS else _body
        if injection.in_thread:
            problems = in_thread(lambda: inject(bench, injection, draw))
        else:
            problems = inject(bench, injection, draw)
        if tf.distribute.has_strategy() or not tf.executing_eagerly():
            problems.append("a scope stays entered, and nothing else works on this thread")
            raise _ThreadLost(problems)
        problems += bench.step(injection.form, draw)
        problems += left_threads(threads)
        if problems:  # a new bench: one fault must not count many times
            del self._benches[key], bench
            gc.collect()
        return problems


def _body(bench: Bench, injection: Injection, draw: random.Random) -> list[str]:
    """Makes a body fail; returns the problems after it."""
    model, arm = bench.model, bench.model.arm
    creates = injection.point in points.CREATIONS
    model.held = []
    runner = bench.runner(injection.form, model.creating if creates else model.step, new=injection.traces)
    x = numbers(draw, bench.size)
    inputs = model.inputs(x)
    arm.set(injection.point, injection.who, KINDS[injection.error])
    found: BaseException | None = None
    try:
        with _outside(injection, arm):
            runner(inputs)
    except BaseException as error:
        found = error
        if isinstance(error, KeyboardInterrupt) and not arm.raised:
            raise  # the user's
    raised, made = arm.raised, arm.made
    arm.disarm()
    problems = wrong_exception(injection, found, raised)
    if injection.form == points.EAGER and not bench.compiled and not creates:
        bench.ledger.part_of_step(x, injection.point, made)
    problems += bench.differences()
    if creates:
        if injection.form != points.EAGER:  # a tf.function creates variables in its first call or never
            runner = bench.runner(injection.form, model.creating, new=True)
        try:
            problems += bench.wrong_results(runner(inputs), x)
        except BaseException as error:
            problems.append(f"the second try raised {described(error)}")
    elif injection.again and injection.point != places.LOWERING:  # which is in the graph for good
        problems += bench.step(injection.form, draw, runner)
    return problems


def _outside(injection: Injection, arm: places.Arm) -> contextlib.ExitStack:
    """A context manager with a fault outside the user's code: in the compiler, or on the devices."""
    place = executable.Executable

    def fail(*_: Any, **__: Any) -> Any:
        raise arm.new()

    def fail_at_end(*arguments: Any) -> Any:
        wait(*arguments)
        raise arm.new()

    wait = place.wait
    patches = contextlib.ExitStack()  # not a generator, which would change an exception that passes
    if injection.point == points.COMPILE:
        patches.enter_context(mock.patch.object(executable, "expand_markers", fail))
    elif injection.point == points.LAUNCH:
        patches.enter_context(mock.patch.object(place, "launch", fail))
    elif injection.point == points.DEVICE:
        patches.enter_context(mock.patch.object(place, "wait", fail_at_end))
    return patches


def _inputs(bench: Bench, injection: Injection, draw: random.Random) -> list[str]:
    """Makes the input pipeline of a loop fail; returns the problems after it."""
    batches = [numbers(draw, bench.size) for _ in range(draw.randint(0, 3))]
    make, raised = KINDS[injection.error], []
    model = bench.model

    def generate() -> Iterator[np.ndarray]:
        yield from batches
        raised.append(make())
        raise raised[-1]

    found: BaseException | None = None
    try:
        if bench.compiled:
            bench.strategy.run_steps(bench.loop_step, map(model.inputs, generate()), iterations=5)
        else:
            spec = tf.TensorSpec([bench.size, WIDTH], tf.float32)
            dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
            for batch in bench.strategy.experimental_distribute_dataset(dataset):
                bench.strategy.run(lambda rows: model.step(rows[0]), args=(batch,))
    except BaseException as error:
        found = error
    for x in batches:
        bench.ledger.whole_step(x)
    problems = bench.differences()
    if bench.compiled:
        # A generator may not raise StopIteration: Python makes it a RuntimeError.
        wanted = RuntimeError if injection.error == "StopIteration" else type(raised[0])
        if type(found) is not wanted:
            problems.append(f"{described(found)} came out, not {wanted.__name__}")
    elif not isinstance(found, tf.errors.OpError):
        problems.append(f"{described(found)} came out, not an error of TensorFlow")
    return problems


def wrong_exception(injection: Injection, found: BaseException | None, raised: list[BaseException]) -> list[str]:
    """The problems with the exception that `run` raised."""
    mismatch = {places.SKIPS: errors.MergeCallMismatchError, places.STRUCTURE: errors.StructureMismatchError}
    wanted = mismatch.get(injection.point)
    if injection.point == places.LOWERING:
        wanted = errors.LoweringError
    if wanted is not None:
        return [] if isinstance(found, wanted) else [f"{described(found)} came out, not a {wanted.__name__}"]
    if not raised:
        return [f"nothing was raised, and {described(found)} came out"]
    if injection.point in points.HOSTS and injection.form != points.EAGER:
        # TensorFlow raises an error of its own with this exception's text.
        if not isinstance(found, tf.errors.OpError):
            return [f"{described(found)} came out, not an error of TensorFlow"]
        if injection.is_compiled and injection.error not in NO_NOTES + NO_TEXT:
            return wrong_text(injection, str(found), type(raised[0]).__name__)
        return []
    if not any(found is each for each in raised):
        if injection.traces and type(found) is type(out_of_function(KINDS[injection.error])):
            return []  # as from any tf.function: AutoGraph fails on it, or what failed is not the user's code
        return [f"{described(found)} came out, where {' and '.join(map(described, raised))} was raised"]
    if injection.error in NO_NOTES:
        return []
    return wrong_text(injection, "\n".join(getattr(found, "__notes__", [])))


def out_of_function(make: Callable[[], BaseException]) -> BaseException:
    """The exception that a plain tf.function raises when this one is raised inside."""

    def fail() -> None:
        raise make()

    try:
        tf.function(fail)()
    except BaseException as error:
        return error
    raise AssertionError("it was raised")


def wrong_text(injection: Injection, text: str, name: str = "") -> list[str]:
    """The texts that an exception should have and lacks: its class, and the replica that raised it."""
    parts = [name]
    of = f" of {injection.size}, CPU:"
    if injection.point in points.OF_MERGES and not injection.is_compiled:
        parts.append("raised in merge function")
    elif not injection.runs_once:
        who = range(injection.size) if injection.point == places.UNWINDING else injection.who
        if not any(f"replica {replica}{of}{replica}" in text for replica in who):
            parts.append(f"replica {injection.who[0]}{of}{injection.who[0]}")
    return [f"it does not say {part!r}: {text}" for part in parts if part not in text]


def in_thread(work: Callable[[], list[str]]) -> list[str]:
    """Calls a function on another thread."""
    results: list[list[str]] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="user thread")
    thread.start()
    thread.join()
    return results[0] if results else ["the thread that called run ended"]


def count_threads() -> int:
    """The number of threads, without those that Python knows only from calls from C++."""
    return sum("Dummy" not in thread.name for thread in threading.enumerate())


def left_threads(before: int) -> list[str]:
    """The new threads; waits for threads that are about to end."""
    deadline = time.monotonic() + GRACE
    while count_threads() > before:
        if time.monotonic() > deadline:
            names = sorted(thread.name for thread in threading.enumerate())
            return [f"there are {count_threads()} threads where there were {before}: {names}"]
        time.sleep(0.001)
    return []


def run(injections: int, seed: int, seconds: float | None = None, only_quick: bool = False) -> Iterator[Outcome]:
    """Injects faults, and yields one outcome for each strategy and point.

    Args:
        injections: the number of faults.
        seed: the seed of the first fault; each further fault takes the next integer.
        seconds: the longest time, in seconds.
        only_quick: whether to leave out faults that need tracing or compiling.
    """
    injector = Injector()
    outcomes: dict[tuple[str, str], Outcome] = {}
    began = time.monotonic()
    for number in range(seed, seed + injections):
        injection = Injection.drawn(number, only_quick)
        key = injection.strategy, injection.point
        outcome = outcomes.setdefault(key, Outcome("faults", *key))
        start = time.monotonic()
        problems = _problems(injector, injection)
        outcome.add(time.monotonic() - start, [f"{injection}: {each}" for each in problems])
        for each in problems:
            print(f"FAILED {injection}: {each}", flush=True)
        if (number - seed + 1) % 500 == 0:
            print(f"  {number - seed + 1} injections, {time.monotonic() - began:.0f} s", flush=True)
        if seconds is not None and time.monotonic() - began > seconds:
            break
    yield from outcomes.values()


def _problems(injector: Injector, injection: Injection) -> list[str]:
    """The problems after a fault, or the failure of the injector itself. Runs on the main thread while that works."""

    def work() -> list[str]:
        try:
            return injector.inject(injection)
        except _ThreadLost as error:
            return list(error.args[0])
        except Exception as error:
            return [f"the injector failed with {described(error)}"]

    return in_thread(work) if tf.distribute.has_strategy() else work()
