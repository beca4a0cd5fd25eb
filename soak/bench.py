"""One strategy with a model, in every form of `run`, and a ledger of the values that its variables must have."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replica_engine
from soak import injection as points
from soak.model import WIDTH, Ledger, Model

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

        if form == points.EAGER:
            runner = functools.partial(self._run, fresh if self.compiled else body)
        elif form == points.FUNCTION_IN_RUN:
            runner = functools.partial(self._run, tf.function(fresh))
        else:
            run = self.strategy.run

            def step(x: Any) -> Any:
                return run(fresh, args=(x,))

            runner = tf.function(step)
        if not new:
            self._known[known] = runner
        return runner

    def _run(self, fn: Callable[[Any], Any], x: Any) -> Any:
        return self.strategy.run(fn, args=(x,))

    @functools.cached_property
    def loop_step(self) -> Callable[[Any, Any], None]:
        """Runs the model's step in a device loop."""

        def step(context: Any, x: Any) -> None:
            self.model.step(x)

        return step

    def step(self, form: str, draw: random.Random, runner: Runner | None = None) -> list[str]:
        """Runs a step without a fault; returns the problems after it."""
        self.model.arm.disarm()
        self.model.hosted = self.compiled or form != points.EAGER
        x = numbers(draw, self.size)
        try:
            result = (runner or self.runner(form, self.model.step, new=False))(self.model.inputs(x))
        except BaseException as error:
            return [f"the next run raised {described(error)}", *self.ledger.differences(self.model)]
        self.ledger.whole_step(x)
        return self.wrong_results(result, x) + [f"after the next run {each}" for each in self.differences()]

    def differences(self) -> list[str]:
        """The differences between the variables and the ledger."""
        return self.ledger.differences(self.model)

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
