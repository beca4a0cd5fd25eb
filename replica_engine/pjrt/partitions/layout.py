"""How values are divided over the devices of a replica."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Entry = str | Sequence[str] | None
Axes = tuple[Entry, ...]
"""For each dimension of a value: the name of an axis of the mesh, several names, or None. The last ones may lack."""

WHOLE: Axes = ()
"""The axes of a value of which each device has all."""

REPLICAS = "replica"
"""The axis of the replicas, in front of those of the mesh."""

MESH = "mesh"
"""The mesh of all devices in a divided program."""

ONE = "one_device"
"""A mesh of one device in it."""


class ReplicaMesh(NamedTuple):
    """The devices of one replica.

    Attributes:
        axes: the name and the size of each axis.
        batch: the axis over which the batch of a replica is divided; None if each device gets the whole batch.
    """

    axes: tuple[tuple[str, int], ...]
    batch: str | None

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(size for _, size in self.axes)

    def parts(self, axes: Axes) -> list[int]:
        """Into how many parts each dimension is divided."""
        sizes = dict(self.axes)
        return [math.prod(sizes[name] for name in names(entry)) for entry in axes]

    def stored(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """The shape in which a value is stored: each dimension as long as its parts together."""
        return tuple(
            -(-size // count) * count
            for size, count in itertools.zip_longest(shape, self.parts(axes[: len(shape)]), fillvalue=1)
        )

    def on_each(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """The shape of what each device has of a value."""
        parts = itertools.chain(self.parts(axes), itertools.repeat(1))
        return tuple(size // count for size, count in zip(self.stored(shape, axes), parts, strict=False))

    def of_batch(self, shape: Sequence[int | None], lead: int = 0) -> Axes:
        """The axes of an argument or a result: its first dimension over the axis of the batch, if it is long enough.

        Args:
            shape: its shape.
            lead: how many dimensions come before the first one of a batch.
        """
        if self.batch is None or len(shape) <= lead or (shape[lead] or 0) < dict(self.axes)[self.batch]:
            return WHOLE
        return (*[None] * lead, self.batch)


class Part(NamedTuple):
    """What a device has of a value, without the zeros behind it.

    Attributes:
        place: the first index and the length in each dimension.
        shard: which device of this process has it.
        is_first: whether no device of another process comes first among those that have it.
    """

    place: tuple[tuple[int, int], ...]
    shard: int
    is_first: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        """The place as an index of the whole value."""
        return tuple(slice(begin, begin + length) for begin, length in self.place)


class Layout(NamedTuple):
    """How the values of a program lie on its devices.

    Attributes:
        mesh: the devices of each replica.
        replicas: the number of replicas.
        rows: whether each value has a first dimension with a row for each replica.
        arguments: the axes of each parameter.
        results: the axes of each result.
    """

    mesh: ReplicaMesh
    replicas: int
    rows: bool
    arguments: tuple[Axes, ...]
    results: tuple[Axes, ...]


def names(entry: Entry) -> tuple[str, ...]:
    """The names in one entry of `Axes`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def dimensions(entries: Iterable[Entry]) -> str:
    """The axes of each dimension, as Shardy writes them. A part of an axis is "name:(before)size"."""

    def quoted(name: str) -> str:
        axis, colon, part = name.partition(":")
        return f'"{axis}"{colon}{part}'

    return "[" + ", ".join("{" + ", ".join(map(quoted, names(each))) + "}" for each in entries) + "]"
