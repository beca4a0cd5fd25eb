"""Values that stand for specs of tensors, where a body is compiled and does not run."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute, eager
from replica_engine.errors import InputsError

_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap.MAP_NORESERVE of Python 3.13


def with_values(arguments: object, caller: str) -> Any:
    """A structure of arguments with zeros for each `tf.TensorSpec`, and for the specs of a distributed dataset.

    Args:
        arguments: the structure.
        caller: the name of the function that was called, for errors.

    Raises:
        InputsError: a spec does not say the whole shape, or is of another kind than tensors.
    """
    try:
        return tf.nest.map_structure(lambda value: _value(value, caller), arguments)
    except RecursionError:  # a structure that contains itself: who takes it apart next says so
        return arguments


def _value(value: object, caller: str) -> object:
    if not isinstance(value, tf.TypeSpec):
        return value
    if (specs := distribute.specs_of_replicas(value)) is not None:
        return distribute.PerReplica([_value(each, caller) for each in specs])
    if not isinstance(value, tf.TensorSpec):
        raise InputsError(
            f"{caller} was called with {value!r}. Only a tf.TensorSpec stands for a value: pass a "
            f"{value.value_type.__name__} like those that the step will get."
        )
    if not value.shape.is_fully_defined():
        raise InputsError(
            f"{caller} was called with {value}. XLA compiles for fixed shapes: give every dimension a size. Batches "
            "have one size with dataset.batch(n, drop_remainder=True)."
        )
    if value.dtype == tf.string:
        return tf.constant("", shape=value.shape)
    dtype = np.dtype(value.dtype.as_numpy_dtype)
    bytes_ = value.shape.num_elements() * dtype.itemsize
    if bytes_ < mmap.PAGESIZE:
        return tf.zeros(value.shape, value.dtype)
    # Nobody looks at the zeros. Pages that nobody looks at take no memory, so the spec may be larger than this machine.
    pages = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return eager.of_memory(np.frombuffer(pages, dtype).reshape(value.shape))
