"""tf.function, taken apart and put together again. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# XLA_COMPILE: the attribute that jit_compile=True becomes.
from tensorflow.python.eager.polymorphic_function.attributes import XLA_COMPILE as _XLA_COMPILE

# The class of what tf.function returns; tf.types.experimental.PolymorphicFunction is its public base, which
# says nothing of python_function and options.
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

# _create_concrete_function: where a tf.function is traced; `tracing_options` there has its attributes.
from tensorflow.python.eager.polymorphic_function.tracing_compilation import (
    _create_concrete_function as _trace_function,
)


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


def leave_uncompiled() -> None:
    """Takes `jit_compile=True` off the tf.functions that are being traced around here.

    For an op that compiles its own program, and runs it from the host. TensorFlow asks for the attribute after it
    has traced the function, and it is on this thread's stack and nowhere else.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _trace_function.__code__:
            attributes = frame.f_locals["tracing_options"].attributes
            if attributes and attributes.get(_XLA_COMPILE):
                attributes[_XLA_COMPILE] = False
        frame = frame.f_back  # type: ignore[assignment]
