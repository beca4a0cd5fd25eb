"""Reads and checks the arguments of `check_parity`, before any work."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Form(NamedTuple):
    """One of the forms of `check_parity`.

    Attributes:
        name: the call, as users write it.
        function: a function with the same parameters.
    """

    name: str
    function: Callable[..., Any]

    @property
    def parameters(self) -> list[str]:
        """The names of its arguments."""
        return list(inspect.signature(self.function).parameters)


def check_call(form: Form, other: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that a form of `check_parity` can be called with these arguments.

    Args:
        form: the form for this first argument.
        other: the other form, which may have the argument that this one lacks.
        args: all positional arguments.
        kwargs: all keyword arguments.

    Raises:
        ParityArgumentError: an argument is missing or unknown, or there are too many.
    """
    for name in kwargs:
        if name not in form.parameters:
            raise ParityArgumentError.bad_call(form.name, _unknown(name, form, other))
    try:
        inspect.signature(form.function).bind(*args, **kwargs)
    except TypeError as error:
        raise ParityArgumentError.bad_call(form.name, f"{error}.") from None


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


def _unknown(name: str, form: Form, other: Form) -> str:
    known = form.parameters[1:]  # without the model or step
    says = f"there is no argument {name!r}"
    if name in other.parameters[1:]:
        return f"{says}; {other.name} has it."
    alike = difflib.get_close_matches(name, known, 1)
    return f"{says}. Did you mean {alike[0]!r}?" if alike else f"{says}. The arguments are {', '.join(known)}."
