"""Values become tensors, or an error names the one that cannot."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine.errors import ReplicaValueError


def as_tensor(value: Any, name: str) -> tf.Tensor:
    """`tf.convert_to_tensor`, whose errors come from wherever its attempts ended.

    Args:
        value: a tensor, or anything that may become one.
        name: what it is, for the error: "args[0]".

    Raises:
        ReplicaValueError: it cannot become one, or contains itself.
    """
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, tf.Variable):
        return tf.convert_to_tensor(value)  # reading one has errors of its own
    try:
        return tf.convert_to_tensor(value)
    except RecursionError:
        raise ReplicaValueError.endless(name[0].lower() + name[1:]) from None
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError, tf.errors.OpError) as error:
        raise ReplicaValueError.no_tensor(name, value, str(error)) from None
