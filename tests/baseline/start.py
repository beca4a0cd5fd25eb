"""What programs begin with: strategies, and numbers that depend on the seed alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from soak.trainings import run
from soak.trainings.callbacks import Numbers
from soak.trainings.spec import COMPILED, THREADS

__all__ = ["COMPILED", "THREADS", "Numbers", "Start", "in_floats", "local", "make_shared_strategy"]

make_shared_strategy = run.make_shared_strategy
"""`make_shared_strategy(name, replicas)`: one strategy of a kind, since each has threads or devices of its own."""


class Start:
    """Random numbers of one program.

    Args:
        seed: the seed.
        nudge: None, or the seed of a change of each number by a unit in the last place, up or down. How far results
            move then says how far rounding alone moves them, on another processor for example.
    """

    def __init__(self, seed: int, nudge: int | None = None):
        self.nudge = nudge
        self._draw = np.random.default_rng(seed)
        self._nudges = np.random.default_rng(nudge or 0)

    def normal(self, *shape: int, dtype: Any = "float64") -> np.ndarray:
        """Normally distributed numbers."""
        value = np.asarray(self._draw.normal(size=shape)).astype(dtype)
        if self.nudge is None or not np.issubdtype(value.dtype, np.floating):
            return value
        direction = self._nudges.choice((-np.inf, np.inf), shape).astype(value.dtype)
        return np.nextafter(value, direction)

    def whole(self, high: int, *shape: int) -> np.ndarray:
        """Whole numbers below `high`."""
        return self._draw.integers(0, high, shape)


@contextlib.contextmanager
def in_floats(dtype: str) -> Iterator[None]:
    """Keras makes variables of this dtype, and has forgotten all names before."""
    keras.backend.clear_session()
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def local(strategy: Any, name: str, value: Any) -> Numbers:
    """What each replica has of a value, by name."""
    parts = strategy.experimental_local_results(value)
    return {f"{name} of replica {index}": np.asarray(part) for index, part in enumerate(parts)}
