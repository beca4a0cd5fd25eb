"""How a variable on devices is saved and read: as it lies there, without a whole copy on the host.

A divided variable is saved as slices, which TensorFlow's V2 format has for variables in partitions: each has the same
key, and its place in the whole. A read of the key gives the whole value, whatever slices there are, and any other slice
can be read too. So a checkpoint does not depend on how variables were divided, and plain TensorFlow reads it.

Where a replica has devices of several workers, each worker saves its own parts, and reads the parts that it needs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from replica_engine._tf import checkpoints
from replica_engine.checkpoints import snapshot

if TYPE_CHECKING:  # replicas on threads have no jax
    from replica_engine.pjrt.partitions import Part
    from replica_engine.xla.state.device_value import DeviceValue

_SLICED = frozenset(
    (
        *(tf.float32, tf.float64, tf.bfloat16, tf.complex64, tf.complex128),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.bool),
    )
)
"""The dtypes of which TensorFlow puts slices together."""


def saveable(value: DeviceValue, name: str, device: str) -> checkpoints.Saveable | None:
    """How a variable is saved now, or read now; None if TensorFlow's own way is right.

    Args:
        value: the value of the variable.
        name: its key in the checkpoint.
        device: the device of the variable on the host.
    """
    taken = snapshot.current()
    parts = value.parts_here() if value.dtype in _SLICED else None
    if taken is None:
        if not _reading.get() or not value.spans or parts is None:
            return None  # a worker that has all parts reads them at once
        return checkpoints.Saveable(name, value.dtype, device, _rows(value, parts, None), _restored(value, parts))
    if value.spans and not (taken.together and parts is not None):
        return None  # the workers put it together
    whole = functools.partial(value.newest, taken.keep, None)
    rows = [("", whole)] if parts is None else _rows(value, parts, taken)
    return checkpoints.Saveable(name, value.dtype, device, rows, None)


def _rows(
    value: DeviceValue, parts: Sequence[Part], taken: snapshot.Snapshot | None
) -> list[tuple[str, checkpoints.Read]]:
    """The slices as TensorFlow names them, and what gives each to a snapshot."""
    return [
        (
            _spec(value.shape or (), part),
            _nothing
            if taken is None or (taken.together and not part.is_first)
            else functools.partial(value.newest, taken.keep, part),
        )
        for part in parts
    ]


def _nothing() -> None:
    """Stands for a part that another worker saves, or that is read."""


def _restored(value: DeviceValue, parts: Sequence[Part]) -> checkpoints.Restore:
    def restore(tensors: Sequence[tf.Tensor]) -> None:
        value.set_parts({part: np.asarray(tensor) for part, tensor in zip(parts, tensors, strict=True)})

    return restore


def _spec(shape: tuple[int, ...], part: Part) -> str:
    places = (
        "-" if (begin, length) == (0, size) else f"{begin},{length}"
        for size, (begin, length) in zip(shape, part.place, strict=True)
    )
    return f"{' '.join(map(str, shape))} {':'.join(places)}"


_reading: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_reading", default=False)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Inside, variables of which this worker has parts read only those."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)
