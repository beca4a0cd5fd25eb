"""Values of variables in memory that goes back to the operating system when TensorFlow frees them.

On processors with instructions for neural networks (AVX-512 VNNI, AVX-VNNI, AMX) TensorFlow turns oneDNN on. It then
allocates tensors of 256 KiB and more from a pool (`MklCPUAllocator`). The pool never shrinks: the memory of a freed
tensor stays with the process, for later tensors. So freeing the host's value of a variable saves memory only if the
value lies outside the pool. Here it lies in a NumPy array, which TensorFlow uses without a copy. A large one is mapped
alone: glibc keeps what is freed in its heaps (`process.memory`).

The value that the user's program computes lies in the pool first. Copying it out makes room for the next one. The pool
then keeps as much as the largest variable takes while it is made, instead of as much as all variables take.

All machines copy, with or without the pool. A difference between machines would hide errors, and the cost is only the
copy.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from replica_engine.upstream import eager

_ALIGNMENT = 64  # bytes; TensorFlow requires it of every tensor, and copies an array that is aligned otherwise
_LARGE = 1 << 20  # bytes of a value that is mapped alone
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros, as an array that `eager.tensor_on` takes without a copy. They take memory once they are written."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size >= _LARGE:
        mapped = mmap.mmap(-1, size, **_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, dtype).reshape(shape)
    return _aligned(np.zeros, shape, dtype)


def unset(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that CPU devices take without a copy. What is not written is whatever was in the memory before."""
    return _aligned(np.empty, shape, dtype)


def _aligned(make: Callable[..., np.ndarray], shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = make(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


def outside_pool(value: np.ndarray) -> tf.Tensor:
    """Copies a value into NumPy's memory, and returns it as a tensor."""
    own = array(value.shape, value.dtype)
    np.copyto(own, value)
    return eager.tensor_on(own)


def zeros(shape: Sequence[int], dtype: np.dtype) -> tf.Tensor:
    """Zeros in NumPy's memory. Large ones take no memory until something reads or writes them."""
    return eager.tensor_on(array(shape, dtype))


def leave_pool(handles: Sequence[tf.Tensor], dtype: tf.DType) -> None:
    """Moves the values behind handles to NumPy's memory. Values that shared memory before still share it afterwards.

    The caller makes sure that nothing writes to the variables meanwhile.
    """
    moved: dict[int, tf.Tensor] = {}
    for handle in handles:
        if not eager.is_initialized(handle):
            continue
        value = np.asarray(eager.read(handle, dtype))  # a view; the tensor's `numpy` method would copy
        address = value.ctypes.data
        if address not in moved:
            moved[address] = outside_pool(value)
        eager.write(handle, moved[address])
