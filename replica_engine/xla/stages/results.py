"""The results of a launch as tensors.

On CPU devices a result stays where the program left it until somebody looks at it, since making a tensor takes about as
long as a small program. Then small values become views of the device's memory, which no later program writes: only
values of variables are donated. Large values are copied, as jaxlib may free the memory of a view late. On other devices
the values are fetched at once, as the program may still run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import eager
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.process import shutdown

Column = Sequence[Any] | Callable[[], list[tf.Tensor]]
"""One result: the values of the replicas, or a function that makes a tensor of each."""

_MOST_BYTES = 1 << 14  # of a view
_VIEWED = frozenset(map(np.dtype, "?bBhHiIqQefdFD"))  # dtypes that DLPack and TensorFlow know


def column(shape: tuple[int, ...], dtype: np.dtype) -> Callable[[Array], Column]:
    """How to make a column of an array with this shape and dtype on CPU devices."""
    is_viewed = dtype in _VIEWED and 0 < np.prod(shape, dtype=int) * dtype.itemsize <= _MOST_BYTES
    return functools.partial(functools.partial, _views if is_viewed else _copies)


def tensors(column: Column) -> list[tf.Tensor]:
    """The tensors of a column, one for each replica."""
    return column() if callable(column) else list(map(_as_tensor, column))


def _views(array: Array) -> list[tf.Tensor]:
    with shutdown.running():  # who looks at a result late may be a daemon thread
        return list(map(eager.of_capsule, DeviceGroup.views(array)))


def _copies(array: Array) -> list[tf.Tensor]:
    with shutdown.running():
        return list(map(_as_tensor, DeviceGroup.shards(array)))


def _as_tensor(value: Any) -> tf.Tensor:
    return eager.tensor(value) if isinstance(value, np.ndarray) and value.dtype != object else tf.constant(value)
