"""Takes the results of a host function apart: tensors that the body goes on with, and the structure around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.errors import HostResultError
from replica_engine.values.structure import open_level


class HostResults:
    """The results of a host function, taken apart.

    Numbers and arrays become tensors. None, and a graph's ops without results (for example of `tf.print`), are None.

    Args:
        value: the value that the function returned, with tensors, arrays or specs of tensors in it.

    Attributes:
        tensors: the tensors, or their specs, in order.
        names: the path of each in the structure: "['loss']".
        kinds: pairs (path, kind) for each place of the structure; equal for equal structures.
        rebuild: builds the structure with other tensors.
        is_tensor: whether the value is a tensor, without a structure around it.
        of_zeros: whether the function returned the value when it was called with zeros.

    Raises:
        HostResultError: some part of the value cannot become a tensor.
    """

    def __init__(self, value: Any):
        self.of_zeros = False
        self.tensors: list[Any] = []
        self.names: list[str] = []
        self.kinds: list[tuple[str, str]] = []
        self.rebuild: Callable[[Sequence[Any]], Any] = self._open(value, "")
        self.is_tensor = self.kinds == [("", "a tensor")]

    def _open(self, value: Any, name: str) -> Callable[[Sequence[Any]], Any]:
        if isinstance(value, tf.Tensor):  # first, since it is the most frequent case
            return self._add(value, name)
        if value is None or isinstance(value, tf.Operation):
            self.kinds.append((name, "None"))
            return lambda _: None
        if isinstance(value, tf.TensorSpec):
            return self._add(value, name)
        if isinstance(value, (tf.Variable, np.ndarray, np.generic, bool, int, float, complex, str, bytes)):
            return self._add(tf.convert_to_tensor(value), name)
        if isinstance(value, (tf.__internal__.CompositeTensor, tf.TypeSpec)):
            return self._open_composite(value, name)
        level = open_level(value)
        if level is None:
            raise HostResultError.no_tensor(name, value)
        self.kinds.append((name, level.kind))
        # Sorted by name: dictionaries are equal in any order of their keys.
        order = sorted(range(len(level.names)), key=level.names.__getitem__)
        builds = {index: self._open(level.children[index], name + level.names[index]) for index in order}
        return lambda tensors: level.rebuild([builds[index](tensors) for index in range(len(order))])

    def _open_composite(self, value: Any, name: str) -> Callable[[Sequence[Any]], Any]:
        spec = value if isinstance(value, tf.TypeSpec) else tf.type_spec_from_value(value)
        parts = tf.nest.flatten(value, expand_composites=True)
        self.kinds.append((name, f"a {type(spec).__name__.removesuffix('Spec')} of {len(parts)} components"))
        builds = [self._add(part, f"{name} (component {index})") for index, part in enumerate(parts)]
        return lambda tensors: tf.nest.pack_sequence_as(
            value, [build(tensors) for build in builds], expand_composites=True
        )

    def _add(self, tensor: Any, name: str) -> Callable[[Sequence[Any]], Any]:
        index = len(self.tensors)
        self.tensors.append(tensor)
        self.names.append(name)
        self.kinds.append((name, "a tensor"))
        return lambda tensors: tensors[index]
