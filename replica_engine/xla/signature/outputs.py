"""The results of a body, taken apart: tensors, which become results of the program, and the structure around them."""

from __future__ import annotations

from operator import itemgetter

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.values.structure import Build, as_tensor, components, flatten, of_components
from replica_engine.xla.unknown_results import check_known

_RESULT = "A result of the replicas"  # for messages


class Outputs:
    """The results of a body, taken apart.

    None, Python values and distributed variables belong to the structure and come out unchanged.

    Args:
        value: the value that the body returned.
        numbers: whether Python numbers and strings come out as tensors, one for all replicas.

    Attributes:
        tensors: the tensors, in the graph of the body.
        rebuild: builds the value that the body returned, with other tensors.
        is_plain: whether anything may stand in the places of the tensors, such as the values of all replicas.

    Raises:
        ReplicaValueError: an array in the value cannot become a tensor, or the structure contains itself.
        HostResultError: the value has results of a host function in it that are not known.
    """

    def __init__(self, value: object, numbers: bool = False):
        self._numbers = numbers
        self.is_plain = True
        self.tensors: list[tf.Tensor] = []
        leaves, spec = flatten(value, what="the results")
        self.rebuild = spec.builder(list(map(self._open, leaves)))

    def _open(self, value: object) -> Build:
        check_known(value)
        if isinstance(value, (distribute.DistributedVariable, tf.Operation)):
            returned = None if isinstance(value, tf.Operation) else value
            return lambda _: returned
        if isinstance(value, tf.Variable):
            container = distribute.value_container(value)
            if container is not value and not isinstance(value, distribute.UnreadVariable):
                return lambda _: container
        if isinstance(value, (tf.Tensor, tf.Variable, np.ndarray, np.generic)):
            return self._add(as_tensor(value, _RESULT))
        if isinstance(value, tf.__internal__.CompositeTensor):
            self.is_plain = False
            return of_components(value, [self._add(as_tensor(part, _RESULT)) for part in components(value, _RESULT)])
        if self._numbers and isinstance(value, (bool, int, float, complex, str, bytes)):
            with tf.init_scope():
                value = as_tensor(value, _RESULT)
        return lambda _: value

    def _add(self, tensor: tf.Tensor) -> Build:
        self.tensors.append(tf.identity(tensor))
        return itemgetter(len(self.tensors) - 1)
