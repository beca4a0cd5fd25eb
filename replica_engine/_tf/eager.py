"""Eager tensors without ops: converts arrays to tensors, and reads the memory of tensors as arrays.

Calling an op that adds two small tensors takes about ten times as long as NumPy's addition. Checked on TensorFlow
2.21.0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# TFE_Py_TapeSetPossibleGradientTypes: whether a tape or a forward accumulator watches tensors. TFE_FromDlpackCapsule:
# what `tf.experimental.dlpack.from_dlpack` calls, which takes twice as long.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# context: has the thread's op callbacks.
from tensorflow.python.eager import context as _context

EagerTensor = tf.__internal__.EagerTensor
"""The class of dense tensors in eager mode. These of its methods are called here:

- `_numpy_internal`: the memory of a tensor on a CPU, without the copy that `numpy()` makes;
- `_copy_to_device`: an equal tensor on another device;
- `_datatype_enum`: the number of the dtype, which takes less time than the dtype;
- `_shape_tuple`: the shape; the property `shape` makes a new TensorShape each time.
"""

# What TensorFlow writes to tensors itself.
_OWN_ATTRIBUTES = frozenset(("assign", "_cached_value", "_handle_data", "_name", "_parent_trackable", "_unique_id"))
_ALIGNMENT = 64  # bytes; TensorFlow copies an array with a smaller alignment
_LARGE = 16384  # bytes; below, TensorFlow's copy costs less than an aligned one


def tensor(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor on the host from a copy of the array, or from the array itself if no other code has its memory.

    `tf.constant` takes ten times as long, mostly to look for a device.
    """
    return EagerTensor(_copy(array), _host(), None)


def of_memory(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor on the host that shares the memory of an array, which is aligned, and which nobody writes."""
    return EagerTensor(array, _host(), None)


def of_capsule(capsule: object) -> tf.Tensor:
    """Makes a tensor on the host that is a view of the memory of a DLPack capsule.

    Raises:
        tf.errors.InvalidArgumentError: TensorFlow does not know the dtype.
    """
    return _pywrap_tfe.TFE_FromDlpackCapsule(capsule, _context.context()._handle)


def is_replaced_interrupt(error: BaseException) -> bool:
    """Whether an error says that Ctrl-C came while TensorFlow made an exception: pybind11 gives up both for its own."""
    return type(error) is RuntimeError and "REPLACED BY KeyboardInterrupt" in str(error)


def is_eager(value: object) -> bool:
    """Whether `value` is a dense eager tensor."""
    return isinstance(value, EagerTensor)


def array_of(tensor: tf.Tensor) -> np.ndarray:
    """The memory of an eager tensor on a CPU, which must not be written to; a NumPy scalar for a scalar."""
    return tensor._numpy_internal()


def described(tensor: tf.Tensor) -> tuple[int, tuple[int, ...]]:
    """The dtype of an eager tensor, as a number, and its shape."""
    return tensor._datatype_enum(), tensor._shape_tuple()


def shape_of(tensor: tf.Tensor) -> tuple[int, ...]:
    """The shape of an eager tensor."""
    return tensor._shape_tuple()


def on_devices(array: np.ndarray, devices: Sequence[str]) -> tuple[tf.Tensor, ...]:
    """Makes a tensor on each of these CPU devices from an array, which must not be written to any more."""
    host = EagerTensor(array, devices[0].rpartition(":")[0] + ":0", None)
    return tuple([host._copy_to_device(device) for device in devices])


def soft_placement() -> bool:
    """The last argument of `tf.config.set_soft_device_placement`; True if it was never called.

    `tf.config.get_soft_device_placement` builds a whole configuration first, and returns False inside a graph.
    """
    wanted = _context.context()._soft_device_placement
    return True if wanted is None else bool(wanted)


def is_watched(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether anything on this thread watches these tensors: a gradient tape, or a debugger of ops."""
    return bool(
        _pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors))
        or _context.context()._thread_local_data.op_callbacks
    )


def _copy(array: np.ndarray) -> np.ndarray:
    if array.flags.owndata and not array.flags.writeable:  # such as the arrays that jaxlib passes to host calls
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
    """The full name of the host's CPU device."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(0).device


def attributes(tensor: tf.Tensor) -> dict[str, object]:
    """The attributes that Python code has given to a tensor, such as the mask of a Keras layer."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}
