"""Says what to write where a program uses the value of several replicas as if it were one tensor.

The result of a run is TensorFlow's `PerReplica`. It has no arithmetic, no length and no attributes of a tensor, so
`float(result)` and `result.numpy()` fail in the words of Python, which name no cure. A subclass with words of its own
would not last: TensorFlow makes a plain `PerReplica` of each that leaves or enters a `tf.function`. So the methods that
raise are added to TensorFlow's class, each only where the class has none. Whatever worked before works in the same way,
with one exception: the truth of boolean values. It was always True, and `if strategy.run(is_done):` was a bug.
TensorFlow's own collectives ask for the truth of `destinations`, and mean whether something is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute, value_methods
from replica_engine._tf.eager import EagerTensor
from replica_engine.diagnostics.misuse import is_in_replica
from replica_engine.errors import NoValueError, ReplicaValueError

_UNARY = {
    "__float__": "float(x)",
    "__int__": "int(x)",
    "__complex__": "complex(x)",
    "__round__": "round(x)",
    "__neg__": "-x",
    "__pos__": "+x",
    "__abs__": "abs(x)",
    "__invert__": "~x",
    "__getitem__": "x[...]",
    "__iter__": "for each in x",
}
_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_COMPARISONS = {"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}
_OF_NO_CLASS = (bool, int, float, complex, str, type(None), np.generic, np.ndarray, list, tuple, distribute.PerReplica)
"""Other operands for which nobody else implements the operator. A tensor does, and comes to the conversion below."""


def install() -> None:
    """Makes TensorFlow's `PerReplica` raise errors that say what to write; only once per process."""
    methods: dict[str, Callable[..., object]] = {name: _refusing(asked) for name, asked in _UNARY.items()}
    for name, sign in _OPERATORS.items():
        methods[f"__{name}__"] = _operator(f"x {sign} y")
        methods[f"__r{name}__"] = _refusing(f"y {sign} x")
    methods.update({name: _operator(f"x {sign} y") for name, sign in _COMPARISONS.items()})
    methods.update(__format__=_formatted, __bool__=_truth, __getattr__=_attribute)
    value_methods.refuse_several(methods, _as_tensor)


def _refusing(asked: str) -> Callable[..., object]:
    def refuse(self: distribute.PerReplica, *_: object) -> object:
        raise _error(self, asked)

    return refuse


def _operator(asked: str) -> Callable[..., object]:
    def operate(self: distribute.PerReplica, other: object) -> object:
        if isinstance(other, _OF_NO_CLASS):
            raise _error(self, asked)
        return NotImplemented

    return operate


def _formatted(self: distribute.PerReplica, spec: str) -> str:
    if spec:
        raise _error(self, f"f'{{x:{spec}}}'")
    return str(self)


def _truth(self: distribute.PerReplica) -> bool:
    """Whether a result is there: True, as for any object. But the truth of a boolean is what the program asks for."""
    asker = sys._getframe(1).f_globals.get("__name__", "")
    if asker.startswith(distribute.PACKAGE):
        return True
    if all(getattr(value, "dtype", type(value)) in (tf.bool, bool) for value in self.values):
        raise _error(self, "if x")
    return True


def _attribute(self: distribute.PerReplica, name: str) -> NoReturn:
    """The error of an attribute that only one tensor or array has; `hasattr` is False as before."""
    if not name.startswith("_") and (hasattr(EagerTensor, name) or hasattr(np.ndarray, name)):
        raise NoValueError.several(name, is_in_replica())
    raise AttributeError(f"'PerReplica' object has no attribute {name!r}", name=name, obj=self)


def _as_tensor(
    value: distribute.PerReplica, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
) -> object:
    """TensorFlow's hook that makes a tensor of a value. TensorFlow's own, which comes next, serves in replicas.

    But it asks the whole value for its dtype, so `tensor + x` failed there where `tf.identity(x)` works.
    """
    if not is_in_replica():
        raise _error(value, "A function of TensorFlow")
    return NotImplemented if dtype is None else tf.convert_to_tensor(distribute.own_value(value), dtype)


def _error(value: distribute.PerReplica, asked: str) -> ReplicaValueError:
    return ReplicaValueError.several(asked, len(value.values), is_in_replica())
