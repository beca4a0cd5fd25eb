"""Methods that TensorFlow's distributed values get. Checked on TensorFlow 2.21.0.

A class of this library becomes the last base of TensorFlow's class. So what TensorFlow's class has, or gets, stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.hook import FIRST, Hook

_VALUES = "tensorflow.python.distribute.values"
NUMBERS = Hook(
    f"{_VALUES}.DistributedVariable",
    "__bases__",
    why="`float(variable)`, `int`, `complex`, `np.asarray(variable)` of a scalar that replicas add up",
    since=FIRST,
    until="one more base at the end, for `__float__`, `__int__`, `__complex__` and `__array__`",
)
SEVERAL = Hook(
    f"{_VALUES}.PerReplica",
    "__bases__",
    why="`float(result)`, `result + 1`, `result[0]`, `for each in result`, `result.numpy()`, `if result:` of the "
    "result of `run`: an error that says what to write",
    since=FIRST,
    until="one more base at the end; the truth of values is True as before, but for those of dtype bool",
)
_BEFORE_TENSORFLOWS = 90  # TensorFlow's own conversion of the class has priority 100


class _Numbers:
    """Lets float(), int() and NumPy take distributed variables, as in float(model.optimizer.learning_rate).

    NumPy finds `__array__` of the tensor behind an `ON_READ` variable otherwise, which gives no array for a scalar.
    """

    numpy: Callable[[], Any]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not tf.executing_eagerly():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")  # as TensorFlow
        return np.array(self.numpy(), dtype)  # a copy, whatever `copy` is


def install_numbers() -> None:
    """Gives distributed variables the methods of `_Numbers`; only once per process."""
    NUMBERS.put(lambda bases: bases if _Numbers in bases else (*bases, _Numbers))


def note_writes(variable: tf.Variable, note: Callable[[tf.Variable], None]) -> tf.Variable:
    """Lets a function know of a distributed variable, and of its copies, before one is assigned or added to.

    The attributes are those of the variable: its class is TensorFlow's own, which programs compare and pickle.

    Returns:
        The variable.
    """
    if isinstance(variable, distribute.DistributedVariable):
        kind, this = type(variable), weakref.ref(variable)  # a cycle would keep the memory of the components

        def _update(*args: object, **kwargs: object) -> object:
            note(this())
            return kind._update(this(), *args, **kwargs)

        def __deepcopy__(memo: dict[int, object]) -> tf.Variable:
            return note_writes(kind.__deepcopy__(this(), memo), note)

        vars(variable).update(_update=_update, __deepcopy__=__deepcopy__)
    return variable


def refuse_several(methods: Mapping[str, Callable[..., Any]], as_tensor: Callable[..., Any]) -> None:
    """Adds methods that raise to the class of values of several replicas; only once per process.

    Args:
        methods: the methods by their names; those that the class has already, from another base than `object`, stay.
        as_tensor: raises where TensorFlow asks for a tensor, or returns NotImplemented and leaves it to TensorFlow.
    """

    def with_methods(bases: tuple[type, ...]) -> tuple[type, ...]:
        if any(base.__module__ == __name__ for base in bases):
            return bases
        tf.register_tensor_conversion_function(distribute.PerReplica, as_tensor, priority=_BEFORE_TENSORFLOWS)
        return (*bases, type("OneOfSeveral", (), {**methods, "__module__": __name__}))

    SEVERAL.put(with_methods)
