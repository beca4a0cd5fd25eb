"""tf.function, taken apart and put together again. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# The class of what tf.function returns; tf.types.experimental.PolymorphicFunction is its public base, which
# says nothing of python_function and options.
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function


def is_tf_function(fn: Any) -> bool:
    """Whether `fn` is a tf.function."""
    return isinstance(fn, Function)


def clone(fn: Any, python_function: Callable) -> Any:
    """A tf.function with the options of `fn` around another Python function."""
    return fn._clone(python_function=python_function)


def is_compiled(fn: Any) -> bool:
    """Whether `fn` was made with `jit_compile=True`."""
    return bool(fn._jit_compile)


def options(fn: Any) -> tuple[bool, bool, Any]:
    """Of a tf.function: whether AutoGraph converts it, whether it is to be traced seldom, its input signature."""
    return bool(fn._autograph), bool(fn._reduce_retracing), fn.input_signature
