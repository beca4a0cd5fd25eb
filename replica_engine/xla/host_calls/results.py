"""Takes the results of a host function apart: tensors that the body goes on with, and the structure around them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.errors import HostResultError
from replica_engine.values.structure import Build, OtherStructure, flatten, of_composite


class HostResults:
    """The results of a host function, taken apart.

    Numbers and arrays become tensors. None, and a graph's ops without results (for example of `tf.print`), are None.

    Args:
        value: the value that the function returned, with tensors, arrays or specs of tensors in it.

    Attributes:
        tensors: the tensors, or their specs, in order.
        names: the path of each in the structure: "['loss']".
        rebuild: builds the structure with other tensors.
        of_zeros: whether the function returned the value when it was called with zeros.

    Raises:
        HostResultError: some part of the value cannot become a tensor.
        ReplicaValueError: the value contains itself.
    """

    def __init__(self, value: Any):
        self.of_zeros = False
        self.tensors: list[Any] = []
        self.names: list[str] = []
        leaves, self._spec = flatten(value, what="the results of a host function")
        self._kinds: list[str] = []
        builds = []
        for leaf, path in zip(leaves, self._spec.paths, strict=True):
            kind, tensors = _open(leaf, path)
            builds.append(self._build(leaf, kind, len(tensors)))
            self._kinds.append(kind)
            self.tensors += tensors
            self.names += [path] if kind == _TENSOR else [f"{path} (component {n})" for n in range(len(tensors))]
        self.rebuild: Build = self._spec.builder(builds)

    def tensors_of(self, value: Any) -> list[Any]:
        """The tensors of another value that the function returned.

        Raises:
            HostResultError: the value has another structure, or some part of it cannot become a tensor.
        """
        if isinstance(value, tf.Tensor) and self._kinds == [_TENSOR] and self._spec.is_leaf:  # the most common case
            return [value]
        try:
            leaves = self._spec.leaves_of(value)
        except OtherStructure as other:
            given = other.given or _open(other.value, other.path)[0]
            wanted = other.wanted or self._kinds[other.leaf]
            raise HostResultError.other_structure(other.path, given, wanted) from None
        found: list[Any] = []
        for leaf, path, wanted in zip(leaves, self._spec.paths, self._kinds, strict=True):
            kind, tensors = _open(leaf, path)
            if kind != wanted:
                raise HostResultError.other_structure(path, kind, wanted)
            found += tensors
        return found

    def _build(self, leaf: Any, kind: str, count: int) -> Build:
        first = len(self.tensors)
        if kind == _TENSOR:
            return itemgetter(first)
        return of_composite(leaf, list(map(itemgetter, range(first, first + count)))) if count else lambda _: None


_TENSOR = "a tensor"


def _open(value: Any, name: str) -> tuple[str, Sequence[Any]]:
    """What a leaf is, for messages, and the tensors in it."""
    if isinstance(value, (tf.Tensor, tf.TensorSpec)):
        return _TENSOR, [value]
    if value is None or isinstance(value, tf.Operation):
        return "None", []
    if isinstance(value, (tf.Variable, np.ndarray, np.generic, bool, int, float, complex, str, bytes)):
        return _TENSOR, [tf.convert_to_tensor(value)]
    if not isinstance(value, (tf.__internal__.CompositeTensor, tf.TypeSpec)):
        raise HostResultError.no_tensor(name, value)
    spec = value if isinstance(value, tf.TypeSpec) else tf.type_spec_from_value(value)
    parts = tf.nest.flatten(value, expand_composites=True)
    return f"a {type(spec).__name__.removesuffix('Spec')} of {len(parts)} components", parts
