"""Injects thousands of random faults in one process, and checks the state after each.

Injection k is drawn with the seed `seed + k`: strategy, number of replicas, form of `run`, point, kind of exception,
replicas, thread. After each injection:

- `run` has raised the same exception object, or the documented one in its place, and it names the replica;
- all variables have the values in the ledger (`model.Ledger`), bit by bit;
- the next run on the same strategy returns the right number and makes a whole step;
- there are no new threads.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import gc
import operator
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine import errors, logical_devices
from replica_engine.pjrt import executable
from soak import injection as points
from soak import model as places
from soak.exceptions import KINDS, NO_NOTES, NO_TEXT
from soak.injection import Injection
from soak.model import WIDTH, Ledger, Model
from soak.outcome import Outcome
from soak.programs.common import left_threads, running_threads

_DOCUMENTED = {
    places.SKIPS: errors.MergeCallMismatchError,
    places.STRUCTURE: errors.StructureMismatchError,
    places.LOWERING: errors.LoweringError,
}
"""The errors that come out in the place of what was raised, by point."""


Runner = Callable[[Any], Any]
"""Runs a body on all replicas, with an input for each."""


class Bench:
    """One strategy with its model, its ledger and its functions, used for many injections."""

    def __init__(self, strategy: str, size: int):
        self.compiled = strategy == points.COMPILED
        devices = replica_engine.logical_devices(size)
        if self.compiled:
            self.strategy = replica_engine.TPUStrategy(num_cores=size)
        else:
            self.strategy = replica_engine.MirroredStrategy(devices, concurrent=strategy == points.CONCURRENT)
        self.size = size
        self.model = Model(self.strategy, self.compiled)
        self.ledger = Ledger.new(size)
        self.warm: set[str] = set()  # forms that have run
        self._known: dict[str, Runner] = {}

    def runner(self, form: str, body: Callable[[Any], Any], new: bool) -> Runner:
        """A function that runs a body in a form: one that ran before, or one that was never traced."""
        known = f"{form} {body.__name__}"
        if not new and known in self._known:
            return self._known[known]

        mark = object()  # makes the function differ from those that were traced before

        def fresh(x: Any) -> Any:
            str(mark)
            return body(x)

        fn = body if form == points.EAGER and not self.compiled else fresh
        if form == points.FUNCTION_IN_RUN:
            fn = tf.function(fresh)

        def runner(x: Any) -> Any:
            return self.strategy.run(fn, args=(x,))

        if form == points.RUN_IN_FUNCTION:
            runner = tf.function(runner)
        if not new:
            self._known[known] = runner
        return runner

    def step(self, form: str, draw: random.Random, runner: Runner | None = None) -> list[str]:
        """Runs a step without a fault; returns the problems after it."""
        self.model.arm.set()
        self.model.hosted = self.compiled or form != points.EAGER
        x = numbers(draw, self.size)
        try:
            result = (runner or self.runner(form, self.model.step, new=False))(self.model.inputs(x))
        except BaseException as error:
            return [f"the next run raised {described(error)}", *self.ledger.differences(self.model)]
        self.ledger.whole_step(x)
        return self.wrong_results(result, x) + [
            f"after the next run {each}" for each in self.ledger.differences(self.model)
        ]

    def wrong_results(self, result: Any, x: np.ndarray) -> list[str]:
        """The problems in the results of the next run."""
        found, wanted = self.model.values(result), 2 * x.sum(axis=0)
        if len(found) == self.size and all(value.tobytes() == wanted.tobytes() for value in found):
            return []
        return [f"the next run returned {[value.tolist() for value in found]}, not {wanted.tolist()}"]


def numbers(draw: random.Random, size: int) -> np.ndarray:
    """Small integers, one row for each replica."""
    return np.array([[draw.randint(-8, 8) for _ in range(WIDTH)] for _ in range(size)], np.float32)


def described(error: BaseException | None) -> str:
    """A short text for an exception, even for one that cannot be printed."""
    if error is None:
        return "nothing"
    try:
        return f"{type(error).__name__}({str(error)[:300]})"
    except Exception:
        return type(error).__name__


class Injector:
    """Injects faults one after another, and checks the state after each."""

    def __init__(self) -> None:
        self._benches: dict[tuple[str, int], Bench] = {}

    def inject(self, injection: Injection) -> list[str]:
        """Injects one fault, and returns the problems after it; none if every check passed."""
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
        threads = len(running_threads())
        bench.model.hosted = bench.compiled or injection.form != points.EAGER
        inject = _inputs if injection.point == points.INPUTS else _body
        call = in_thread if injection.in_thread else operator.call
        problems = call(lambda: inject(bench, injection, draw))
        if tf.distribute.has_strategy() or not tf.executing_eagerly():
            return [*problems, "a scope stays entered, and nothing else works on this thread"]
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
    arm.set()
    problems = wrong_exception(injection, found, raised)
    if injection.form == points.EAGER and not bench.compiled and not creates:
        bench.ledger.part_of_step(x, injection.point, made)
    problems += bench.ledger.differences(model)
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

    def loop_step(context: Any, x: Any) -> None:
        model.step(x)

    def generate() -> Iterator[np.ndarray]:
        yield from batches
        raised.append(make())
        raise raised[-1]

    found: BaseException | None = None
    try:
        if bench.compiled:
            bench.strategy.run_steps(loop_step, map(model.inputs, generate()), iterations=5)
        else:
            spec = tf.TensorSpec([bench.size, WIDTH], tf.float32)
            dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
            for batch in bench.strategy.experimental_distribute_dataset(dataset):
                bench.strategy.run(lambda rows: model.step(rows[0]), args=(batch,))
    except BaseException as error:
        found = error
    for x in batches:
        bench.ledger.whole_step(x)
    problems = bench.ledger.differences(model)
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
    wanted = _DOCUMENTED.get(injection.point)
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
    with concurrent.futures.ThreadPoolExecutor(1, "user thread") as pool:
        return pool.submit(work).result()


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Injects faults, from the first seed on, and yields one outcome for each strategy and point."""
    logical_devices(64)
    injector = Injector()
    by_point: dict[tuple[str, str], Outcome] = {}
    began = time.monotonic()
    for count in range(1, flags.injections + 1):
        injection = Injection.drawn(flags.seed + count - 1)
        key = injection.strategy, injection.point
        outcome = by_point.setdefault(key, Outcome("faults", *key))
        start = time.monotonic()
        problems = _problems(injector, injection)
        outcome.add(time.monotonic() - start, [f"{injection}: {each}" for each in problems])
        for each in problems:
            print(f"FAILED {injection}: {each}", flush=True)
        if count % 500 == 0:
            print(f"  {count} injections, {time.monotonic() - began:.0f} s", flush=True)
        if time.monotonic() - began > flags.seconds:
            break
    yield from by_point.values()


def _problems(injector: Injector, injection: Injection) -> list[str]:
    """The problems after a fault, or the failure of the injector itself. Runs on the main thread while that works."""

    def work() -> list[str]:
        try:
            return injector.inject(injection)
        except Exception as error:
            return [f"the injector failed with {described(error)}"]

    return in_thread(work) if tf.distribute.has_strategy() else work()
