"""Whether the copies of variables on the replicas are bitwise equal."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.errors.base import brief
from replica_engine.upstream import distribute, eager


def check_replicas_equal(variables: Any) -> None:
    """Fails if the copies of a variable that replicas share are not bitwise equal.

    Variables of each replica's own (`ON_READ`) and variables without a strategy are not looked at. Over workers, each
    looks at its own replicas.

    Args:
        variables: a variable of TensorFlow or Keras, a Keras model or optimizer, a structure of these, or a strategy:
            then all variables that were made in its scope and still exist.

    Raises:
        AssertionError: the message has each variable that differs, the replica, and by how much.
        TypeError: it is none of these.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> from replica_engine.testing import check_replicas_equal
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> with strategy.scope():
        ...     weight = tf.Variable([1.0, 2.0])
        >>> check_replicas_equal([weight])
    """
    found = [text for variable in _variables_in(variables) for text in _differences(variable)]
    if found:
        raise AssertionError("copies of variables are not equal:\n  " + "\n  ".join(found))


def _variables_in(given: Any) -> Iterator[Any]:
    if isinstance(given, tf.distribute.Strategy):
        every = [each for each in gc.get_objects() if isinstance(each, distribute.DistributedVariable)]
        yield from (each for each in every if each.distribute_strategy is given)
        return
    for leaf in tf.nest.flatten(given):
        if isinstance(leaf, tf.Variable):
            yield leaf
        elif isinstance(getattr(leaf, "value", None), tf.Variable):  # a variable of Keras
            yield leaf.value
        elif hasattr(leaf, "variables"):  # a model or an optimizer
            yield from _variables_in(list(leaf.variables))
        else:
            raise TypeError(f"check_replicas_equal takes variables, models and strategies, and not {brief(leaf)}")


def _differences(variable: Any) -> Iterator[str]:
    if not eager.is_mirrored(variable):
        return
    first, *others = [copy.numpy() for copy in variable.values]
    for index, other in enumerate(others, 1):
        if first.tobytes() != other.tobytes():
            is_number = first.dtype.kind in "fiu" or first.dtype.name == "bfloat16"
            by = np.abs(first.astype("float64") - other.astype("float64")).max() if is_number else None
            name = variable.name.removesuffix(":0")
            yield f"{name}: replica {index} differs from replica 0" + ("" if by is None else f" by up to {by:.3g}")
