"""How to call a step: the parts of a batch, the weights of rows, and the variables that a user names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from replica_engine.errors import ParityArgumentError
from replica_engine.testing.parity.rebinding import python_function

_WEIGHTS = "weights"
_HOLDS_VARIABLES = (tf.Module, keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)


class StepCall:
    """How to call a step with a batch: `step(*batch)`, or `step(batch)` if it does not take that many arguments.

    An argument named `weights` that is not a part of the batch gets the weights of rows.

    Args:
        step: the step.
        count: the number of parts of a batch.
        is_given_variables: whether the first argument is the result of the function `variables`.

    Attributes:
        step: the step.
        name: the name of the step.
        takes_weights: whether the step gets the weights of rows.

    Raises:
        ParityArgumentError: the step can be called in neither way.
    """

    def __init__(self, step: Callable[..., Any], count: int, is_given_variables: bool):
        self.step = step
        self.name = getattr(step, "__name__", type(step).__name__)
        signature = inspect.signature(python_function(step))
        first = [None] * is_given_variables
        weights = {_WEIGHTS: None} if _WEIGHTS in signature.parameters else {}
        for self._is_whole, size in ((False, count), (True, 1)):
            parts = [*first, *[None] * size]
            for self.takes_weights, kwargs in ((True, weights), (False, {})):
                if (kwargs or not self.takes_weights) and _refusal(signature, parts, kwargs) is None:
                    return
        reason = _refusal(signature, [*first, *[None] * count], weights)
        raise ParityArgumentError.not_called_so(self.name, str(signature), count, reason or "")

    def arguments(self, batch: Any, weights: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments for a batch."""
        args: tuple[Any, ...] = (batch,) if self._is_whole or not isinstance(batch, tuple) else batch
        return args, {_WEIGHTS: weights} if self.takes_weights else {}


def _refusal(signature: inspect.Signature, args: list[Any], kwargs: dict[str, Any]) -> str | None:
    """Python's reason why a function cannot be called with these arguments; None if it can."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def is_factory(variables: Any) -> bool:
    """Whether this is a function that makes variables, and not an object that has variables."""
    return callable(variables) and not isinstance(variables, (tf.Variable, keras.Variable, *_HOLDS_VARIABLES))


def check_variables(variables: Any) -> None:
    """Checks that a structure holds only variables and objects that have variables.

    Raises:
        ParityArgumentError: it holds something else.
    """
    if isinstance(variables, (dict, list, tuple)):
        for inner in variables.values() if isinstance(variables, dict) else variables:
            check_variables(inner)
    elif variables is not None and not isinstance(variables, (tf.Variable, keras.Variable)):
        has_variables = isinstance(variables, _HOLDS_VARIABLES) or hasattr(variables, "variables")
        if not has_variables or isinstance(variables, type):
            raise ParityArgumentError.bad_variables(variables)


def parts_of(inputs: Any, steps: int) -> tuple[int, Any, bool]:
    """The number of parts of a batch, the source of batches, and whether the source holds batches or arrays.

    Args:
        inputs: the argument of `check_parity`.
        steps: the number of batches; at most this many are taken from an iterator.

    Raises:
        ParityArgumentError: an iterator has no batches.
    """
    if isinstance(inputs, tf.data.Dataset):
        return _count(inputs.element_spec), inputs, True
    if hasattr(inputs, "__next__"):
        inputs = list(itertools.islice(inputs, steps))
        if not inputs:
            raise ParityArgumentError.no_rows()
        return _count(inputs[0]), inputs, True
    if isinstance(inputs, list) and inputs and all(isinstance(each, (tuple, dict)) for each in inputs):
        return _count(inputs[0]), inputs, True
    if isinstance(inputs, (tuple, list)):
        return len(inputs), tuple(inputs), False
    return 1, inputs, False


def _count(batch: Any) -> int:
    return len(batch) if isinstance(batch, tuple) else 1
