"""What is reduced outside of replicas: looked at before TensorFlow's own reductions go on with it.

Those take tensors, and stumble over what replicas may return as well: Python numbers, None, ragged tensors, a zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.errors import ReplicaValueError
from replica_engine.values.structure import open_level
from replica_engine.values.tensors import as_tensor

_NUMBERS = (bool, int, float, complex, np.generic)


class Reductions:
    """Reduces any structure of tensors and numbers. Mix it in before an extended class of `tf.distribute`."""

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce` and `reduce_to`: one leaf of a structure at a time."""
        if not isinstance(value, distribute.DistributedValues):  # whose attributes are those of what is being reduced
            try:
                level = open_level(value)
                if level is not None:
                    reduced = [self._reduce_to(reduce_op, child, destinations, options) for child in level.children]
                    return level.rebuild(reduced)
                if tf.nest.is_nested(value):  # a deque, a range
                    return tf.nest.map_structure(
                        lambda leaf: self._reduce_to(reduce_op, leaf, destinations, options), value
                    )
            except RecursionError:
                raise ReplicaValueError.endless("the values to reduce") from None
        if isinstance(value, (bool, int, float, complex)) and not value:
            return value  # the sum of zeros, and their mean
        if distribute.is_mirrored(value) and reduce_op == tf.distribute.ReduceOp.SUM:
            raise ReplicaValueError.sum_of_one(value)
        value = as_tensors(value, self.worker_devices)  # type: ignore[attr-defined]
        return super()._reduce_to(reduce_op, value, destinations, options)  # type: ignore[misc]


def as_tensors(value: Any, devices: Any) -> Any:
    """A distributed value with tensors for the numbers in it; any other value as it is.

    Args:
        value: the value.
        devices: of the replicas.

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


def _is_tensor(component: Any) -> bool:
    if isinstance(component, tf.IndexedSlices):
        return isinstance(component.values, tf.Tensor) and isinstance(component.indices, tf.Tensor)
    return isinstance(component, (tf.Tensor, tf.Variable))


def _as_tensor(component: Any, index: int, devices: Any) -> Any:
    if _is_tensor(component):
        return component
    if not isinstance(component, (*_NUMBERS, np.ndarray)):
        raise ReplicaValueError.not_reducible(component)
    with tf.device(devices[index] if index < len(devices) else None):
        return as_tensor(component, f"The value of replica {index}")
