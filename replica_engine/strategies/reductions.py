"""Prepares the values that are reduced outside replicas for TensorFlow's own reductions.

TensorFlow's reductions take tensors. They fail on other values that replicas may return: Python numbers, None, ragged
tensors, a plain zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute, reduction
from replica_engine.diagnostics.misuse import check_outside_replicas
from replica_engine.errors import ReplicaValueError, ScopeError
from replica_engine.errors.base import brief
from replica_engine.strategies.validation import NOT_REDUCED, not_reduced
from replica_engine.values.structure import as_tensor

NUMBERS = (bool, int, float, complex, np.generic)


def is_narrow(value: object) -> bool:
    """Whether each replica has a tensor of 16-bit floats of its own."""
    if not isinstance(value, (distribute.PerReplica, distribute.DistributedVariable)) or distribute.is_mirrored(value):
        return False
    return reduction.is_narrow(value.values[0])


def by_dtype(pairs: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Reduces pairs of a value and its destination, those of each dtype in a call of its own.

    TensorFlow packs a batch into one tensor, and fails at two dtypes.
    """
    places: dict[tuple[bool, tf.DType], list[int]] = {}
    for place, (value, _) in enumerate(pairs):
        first = value.values[0] if isinstance(value, distribute.DistributedValues) else value
        places.setdefault((type(first) is tf.IndexedSlices, tf.as_dtype(first.dtype)), []).append(place)
    results: list[Any] = [None] * len(pairs)
    for indices in places.values():
        for index, reduced in zip(indices, reduce([pairs[index] for index in indices]), strict=True):
            results[index] = reduced
    return results


def better(error: Exception, method: str, value: object) -> Exception:
    """The error that says what an error of TensorFlow in a method of the extended half means; otherwise that error."""
    try:
        check_outside_replicas(method)
    except ScopeError as scope:
        scope.__suppress_context__ = True
        return scope
    return not_reduced(error, value) if isinstance(error, NOT_REDUCED) else error


def as_tensors(value: object, devices: Sequence[str]) -> object:
    """Converts the numbers in a distributed value to tensors; returns any other value unchanged.

    Args:
        value: the value.
        devices: the devices of the replicas, in their order.

    Raises:
        ReplicaValueError: a component is neither a tensor nor a number.
    """
    if not isinstance(value, distribute.DistributedValues) or isinstance(value, distribute.DistributedVariable):
        return value
    if all(map(_is_tensor, value.values)):
        return value
    return distribute.PerReplica(
        tuple(_as_tensor(component, index, devices) for index, component in enumerate(value.values))
    )


def _is_tensor(component: object) -> bool:
    if isinstance(component, tf.IndexedSlices):
        return isinstance(component.values, tf.Tensor) and isinstance(component.indices, tf.Tensor)
    return isinstance(component, (tf.Tensor, tf.Variable))


def _as_tensor(component: object, index: int, devices: Sequence[str]) -> object:
    if _is_tensor(component):
        return component
    if not isinstance(component, (*NUMBERS, np.ndarray)):
        raise ReplicaValueError(
            f"Values of replicas are reduced as tensors, but a replica has {brief(component)}. Return tensors or "
            "numbers from the replicas. For ragged and sparse tensors, reduce the parts: x.flat_values, "
            "tf.sparse.to_dense(x)."
        )
    with tf.device(devices[index] if index < len(devices) else None):
        return as_tensor(component, f"The value of replica {index}")
