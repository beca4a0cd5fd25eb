"""Converts values to tensors; if a value cannot become a tensor, the error names it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine.errors import ReplicaValueError


def as_tensor(value: Any, name: str) -> tf.Tensor:
    """Converts a value like `tf.convert_to_tensor`, with one clear error instead of TensorFlow's many.

    Args:
        value: a tensor, or a value that may become one.
        name: the name of the value for the error, such as "args[0]".

    Raises:
        ReplicaValueError: the value cannot become a tensor, or contains itself.
    """
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, tf.Variable):
        return tf.convert_to_tensor(value)  # a variable that cannot be read raises its own error
    try:
        return tf.convert_to_tensor(value)
    except RecursionError:
        raise ReplicaValueError.endless(name[0].lower() + name[1:]) from None
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError, tf.errors.OpError) as error:
        raise ReplicaValueError.no_tensor(name, value, str(error)) from None
