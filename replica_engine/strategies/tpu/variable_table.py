"""The variables of a strategy: how each is divided over the devices of a replica, and their bytes."""

from __future__ import annotations

import math
import threading
import weakref
from typing import NamedTuple

from replica_engine.pjrt.partitions.layout import Axes
from replica_engine.telemetry import html
from replica_engine.xla.state.device_value import DeviceValue


class Row(NamedTuple):
    """One variable.

    Attributes:
        path: its path if it is Keras', otherwise its name.
        shape: its shape; None if it is not known.
        dtype: its dtype.
        axes: for each dimension the name of an axis of the mesh, several names, or None.
        bytes: its bytes on each device.
        whole: its bytes in all.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str
    axes: Axes
    bytes: int
    whole: int


class Layouts(NamedTuple):
    """The variables of a strategy, in the order in which they were made. A table when printed.

    Attributes:
        mesh: the name and the size of each axis of the mesh; empty if a replica has one device.
        rows: the variables.
    """

    mesh: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [_HEAD, *self._cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in text), self._foot()])

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return html.table(self._foot(), _HEAD, self._cells())

    def _cells(self) -> list[tuple[str, ...]]:
        return [(row.path, str(row.shape), row.dtype, str(row.axes), _bytes(row.bytes, row.whole)) for row in self.rows]

    def _foot(self) -> str:
        mesh = " x ".join(f"{name!r}={size}" for name, size in self.mesh) or "one device"
        sizes = _bytes(sum(row.bytes for row in self.rows), sum(row.whole for row in self.rows))
        return f"mesh: {mesh}; a device has {sizes} bytes"


class VariableTable:
    """The variables of one strategy, which it does not keep alive.

    Args:
        mesh: the name and the size of each axis of the devices of a replica; empty if a replica has one device.
    """

    def __init__(self, mesh: tuple[tuple[str, int], ...]):
        self._mesh = mesh
        self._paths: weakref.WeakKeyDictionary[DeviceValue, str] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def note(self, value: DeviceValue, path: str) -> None:
        """Notes the value of a new variable, and its path."""
        with self._lock:
            self._paths[value] = path

    def path_of(self, value: DeviceValue) -> str:
        """The path that a value was noted with."""
        with self._lock:
            return self._paths[value]

    @property
    def bytes(self) -> int:
        """The bytes of all variables on each device."""
        with self._lock:
            return sum(value.bytes for value in self._paths)

    def layouts(self) -> Layouts:
        """How the variables are divided."""
        with self._lock:
            rows = [_row(path, value) for value, path in self._paths.items()]
        return Layouts(self._mesh, tuple(rows))


_HEAD = ("variable", "shape", "dtype", "axes", "bytes on a device")


def _row(path: str, value: DeviceValue) -> Row:
    shape = value.shape
    axes = value.axes if shape is None else (*value.axes, *[None] * (len(shape) - len(value.axes)))
    whole = 0 if shape is None or not value.bytes else value.dtype.size * math.prod(shape)
    return Row(path, shape, value.dtype.name, axes, value.bytes, whole)


def _bytes(part: int, whole: int) -> str:
    return f"{part:,}" if part == whole else f"{part:,} of {whole:,}"
