"""The arguments of the last call of a function, to recognise those of the next call without taking them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from replica_engine._tf import distribute
from replica_engine._tf.eager import EagerTensor, described, shape_of
from replica_engine.xla.signature.arguments import Arguments, is_viewed


class _Slot(NamedTuple):
    """A positional argument.

    Attributes:
        values: how many values it has: one tensor for all replicas, or one for each.
        described: the dtype and the shape of each.
        shape: the shape of each.
    """

    values: int
    described: tuple[Any, tuple[int, ...]]
    shape: tuple[int, ...]


class Warm:
    """Positional arguments that are all tensors, one for all replicas or one for each.

    Attributes:
        slots: the arguments.
    """

    def __init__(self, slots: Sequence[_Slot]):
        self.slots = slots

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
            slots.append(_Slot(len(values), kinds.pop(), shape_of(values[0])))
        return cls(slots)

    def values(self, args: Sequence[Any]) -> list[list[np.ndarray]] | None:
        """The values of arguments like these, as arrays; None if the arguments are not like these."""
        if type(args) is not tuple or len(args) != len(self.slots):
            return None
        found = []
        for value, slot in zip(args, self.slots, strict=True):
            values = _values(value)
            if len(values) != slot.values:
                return None
            for each in values:
                if type(each) is not EagerTensor or described(each) != slot.described:
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
