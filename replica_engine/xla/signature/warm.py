"""The arguments of the last call of a function, to recognise those of the next call without taking them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from replica_engine._tf import distribute
from replica_engine._tf.eager import EagerTensor, described
from replica_engine.xla.signature.arguments import Arguments, is_viewed


class Warm:
    """Positional arguments that are all tensors, one for all replicas or one for each.

    Args:
        slots: for each argument, how many values it has, and the dtype and the shape of each of them.

    Attributes:
        shapes: the shape of each argument.
    """

    def __init__(self, slots: Sequence[tuple[int, tuple[Any, tuple[int, ...]]]]):
        self._slots = slots
        self.shapes = tuple(shape for _, (_, shape) in slots)

    @classmethod
    def of(cls, args: Sequence[Any], arguments: Arguments) -> Warm | None:
        """The arguments of a call; None if some are not tensors whose memory NumPy can see, or are of uneven shapes.

        Args:
            args: the positional arguments; there are no others.
            arguments: the same, taken apart.
        """
        if type(args) is not tuple or len(args) != len(arguments.slots) or arguments.summary_writer is not None:
            return None
        slots = []
        for value in args:
            values = _values(value)
            if not values or not all(type(each) is EagerTensor and is_viewed(each) for each in values):
                return None
            kinds = set(map(described, values))
            if len(kinds) > 1:
                return None
            slots.append((len(values), kinds.pop()))
        return cls(slots)

    def values(self, args: Sequence[Any]) -> list[list[np.ndarray]] | None:
        """The values of arguments like these, as arrays; None if the arguments are not like these."""
        if type(args) is not tuple or len(args) != len(self._slots):
            return None
        found = []
        for value, (count, kind) in zip(args, self._slots, strict=True):
            values = _values(value)
            if len(values) != count:
                return None
            for each in values:
                if type(each) is not EagerTensor or described(each) != kind:
                    return None
            found.append(list(map(np.asarray, values)))  # what `view` does with these dtypes
        return found


def is_one(value: Any) -> bool:
    """Whether all replicas get the same tensor of an argument."""
    first, *others = _values(value)
    return all(each is first for each in others)


def _values(value: Any) -> Sequence[Any]:
    """The values of an argument; none if it is neither a tensor nor a distributed value of a plain type."""
    if type(value) is EagerTensor:
        return (value,)
    return value.values if type(value) in _DISTRIBUTED else ()


_DISTRIBUTED = frozenset((distribute.PerReplica, distribute.LaterPerReplica, distribute.Mirrored))
