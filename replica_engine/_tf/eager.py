"""Eager tensors without ops: arrays as tensors, and the memory of tensors as arrays.

An op that adds two small tensors takes some ten times as long to call as NumPy's addition. Checked on TensorFlow
2.21.0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# TFE_Py_TapeSetPossibleGradientTypes: whether a tape or a forward accumulator watches tensors.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# The thread's op callbacks are on the context.
from tensorflow.python.eager import context as _context

EagerTensor: Any = tf.__internal__.EagerTensor
"""What dense tensors are in eager mode. Its methods that are called here:

- `_numpy_internal`: the memory of one on a CPU, without the copy that `numpy()` makes;
- `_copy_to_device`: the like on another device;
- `_shape_tuple`: its shape, which as a TensorShape is made anew each time.
"""

_ALIGNMENT = 64  # bytes; TensorFlow copies an array again that is not so aligned
_LARGE = 16384  # bytes; below, the second copy costs less than finding an aligned place


def tensor(array: np.ndarray) -> tf.Tensor:
    """A tensor on the host, with a copy of the array, or the array itself if nobody else has its memory.

    As `tf.constant`, which takes ten times as long, most of it to look for a device.
    """
    return EagerTensor(_copy(array), _host(), None)


def is_eager(value: Any) -> bool:
    """Whether `value` is a dense tensor that has a value now."""
    return isinstance(value, EagerTensor)


def array_of(tensor: tf.Tensor) -> np.ndarray:
    """The memory of an eager tensor on a CPU; not to be written to. A scalar of NumPy's for one."""
    return tensor._numpy_internal()


def shape_of(tensor: tf.Tensor) -> tuple[int, ...]:
    """The shape of an eager tensor."""
    return tensor._shape_tuple()


def on_devices(array: np.ndarray, devices: Sequence[str]) -> tuple[tf.Tensor, ...]:
    """Tensors on these CPU devices of the value of an array, which may not be written to any more."""
    host = EagerTensor(array, devices[0].rpartition(":")[0] + ":0", None)
    return tuple([host._copy_to_device(device) for device in devices])


def soft_placement() -> bool:
    """What `tf.config.set_soft_device_placement` was given; True before that.

    `tf.config.get_soft_device_placement` builds a whole configuration for it, and says False inside a graph.
    """
    wanted = _context.context()._soft_device_placement
    return True if wanted is None else bool(wanted)


def is_watched(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether somebody watches what this thread does with tensors: a tape for gradients, a debugger of ops."""
    return bool(
        _pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors))
        or _context.context()._thread_local_data.op_callbacks
    )


def _copy(array: np.ndarray) -> np.ndarray:
    if array.flags.owndata and not array.flags.writeable:  # as jaxlib hands over to host calls
        return array
    if array.nbytes < _LARGE:
        return array.copy()
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    copied = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


@functools.cache
def _host() -> str:
    """The full name of the host's device."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(0).device
