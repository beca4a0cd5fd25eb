"""Reads and checks the arguments of a parity check."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from replica_engine.errors import ParityArgumentError, positive_int
from replica_engine.testing.parity.candidates import candidates


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of a parity check, after they are read.

    Attributes:
        replicas: the number of replicas.
        steps: the number of training steps.
        batch_size: the number of rows of a batch, or None.
        rtol: the relative tolerance, or None for the default.
        atol: the absolute tolerance, or None.
        seed: the seed of the random numbers.
        strategies: the strategies to compare with one device, by name.
        left_out: strategies that cannot run here, with the reason.
    """

    replicas: int
    steps: int
    batch_size: int | None
    rtol: float | None
    atol: float | None
    seed: int
    strategies: Mapping[str, tf.distribute.Strategy]
    left_out: Mapping[str, str]


def settings(
    replicas: Any, steps: Any, batch_size: Any, strategies: Any, tolerance: Any, rtol: Any, atol: Any, seed: Any
) -> Settings:
    """Reads the arguments that both forms of `check_parity` share.

    Raises:
        ParityArgumentError: an argument is invalid.
    """
    count = _positive("replicas", replicas)
    given = None if batch_size is None else _positive("batch_size", batch_size)
    relative = _tolerance("tolerance", tolerance) if rtol is None else _tolerance("rtol", rtol)
    absolute = _tolerance("atol", atol)
    number = _positive("steps", steps)
    made, left_out = candidates(strategies, count)
    return Settings(count, number, given, relative, absolute, int(seed), made, left_out)


def _positive(name: str, value: Any) -> int:
    number = positive_int(value)
    if number is None:
        raise ParityArgumentError.bad_number(name, value)
    return number


def _tolerance(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
        raise ParityArgumentError.bad_tolerance(name, value)
    return float(value)
