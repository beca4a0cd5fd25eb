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
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import checkpoints
from replica_engine.checkpoints import snapshot
from replica_engine.process import scoped

if TYPE_CHECKING:  # replicas on threads have no jax
    from replica_engine.pjrt.partitions.layout import Part
    from replica_engine.xla.state.device_value import DeviceValue

_SLICED = frozenset(
    (
        *(tf.float32, tf.float64, tf.bfloat16, tf.complex64, tf.complex128),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.bool),
    )
)
"""The dtypes of which TensorFlow puts slices together."""


def serialized(value: DeviceValue, device: str) -> dict[str, object] | None:
    """What a variable saves now, or reads now, in parts; None if TensorFlow's own way is right.

    Args:
        value: the value of the variable.
        device: the device of the variable on the host.

    Returns:
        For each part in TensorFlow's words, or "" for all, what reads the value.
    """
    taken, reading = snapshot.current(), _reading.get()
    parts = value.parts_here() if value.dtype in _SLICED else None
    spec = functools.partial(checkpoints.spec, dtype=value.dtype, device=device)
    if taken is None:
        if reading is None or parts is None or not value.spans:
            return None  # a worker that has all parts reads them at once
        first = _words(value, parts[0])
        reading.specs[value] = spec(_nothing, first)  # TensorFlow tells it the key, and reads this part
        return {first: reading.specs[value]}
    if parts is None:
        return None if value.spans else {"": spec(functools.partial(value.newest, taken.keep, None), "")}
    if value.spans and not taken.together:
        return None  # the workers put it together
    return {
        _words(value, part): spec(
            functools.partial(value.newest, taken.keep, part) if part.is_first or not taken.together else _nothing,
            _words(value, part),
        )
        for part in parts
    }


def restored(value: DeviceValue, first: tf.Tensor) -> bool:
    """Sets a variable of which this worker reads its parts; returns False for any other variable.

    Args:
        value: the value of the variable.
        first: what TensorFlow has read.
    """
    reading = _reading.get()
    spec = None if reading is None else reading.specs.pop(value, None)
    if reading is None or spec is None:
        return False
    parts = value.parts_here()
    assert parts is not None, "it has a spec"
    others = (
        tf.raw_ops.RestoreV2(
            prefix=reading.path,
            tensor_names=[spec.name] * (len(parts) - 1),
            shape_and_slices=[_words(value, part) for part in parts[1:]],
            dtypes=[value.dtype] * (len(parts) - 1),
        )
        if len(parts) > 1
        else []
    )
    value.set_parts({part: np.asarray(tensor) for part, tensor in zip(parts, [first, *others], strict=True)})
    return True


def _nothing() -> None:
    """Stands for a part that another worker saves, or that is read."""


def _words(value: DeviceValue, part: Part) -> str:
    """A part as TensorFlow names it: "8 2 0,4:-" are the first four rows of eight."""
    shape = value.shape or ()
    places = (
        "-" if (begin, length) == (0, size) else f"{begin},{length}"
        for size, (begin, length) in zip(shape, part.place, strict=True)
    )
    return f"{' '.join(map(str, shape))} {':'.join(places)}"


class _Reading:
    """A checkpoint that is being read, and the variables of which this worker reads its parts."""

    def __init__(self, path: str):
        self.path = path
        self.specs: dict[DeviceValue, Any] = {}


_reading: contextvars.ContextVar[_Reading | None] = contextvars.ContextVar("replica_engine_reading", default=None)


def reading(path: str) -> contextlib.AbstractContextManager[object]:
    """Inside, variables of which this worker has parts read only those."""
    return scoped.variable(_reading, _Reading(path))
