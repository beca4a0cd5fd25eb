"""All-reduces between CPU devices: the sum is computed once and given to every replica.

CPU devices share one memory. So one sum needs fewer copies than a ring, has no op that blocks a thread of TensorFlow's
pool until its peers arrive, and leaves replicas bitwise equal by construction. Sums of float16 and bfloat16 are added
in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute, eager
from replica_engine._tf.reduction import QuietReduction, total

MOST_BYTES = 1 << 16
"""Largest tensor, in bytes, that NumPy adds; above it TensorFlow's threads save more time than its ops cost."""

FEWEST = 16
"""Smallest number of tensors to pack; fewer tensors lose more by waiting for each other than transfers cost."""

MOST_PACKED = 1 << 20
"""Approximate size of a pack in a graph, in bytes; tensors that are ready early need not wait for all the others."""

_DTYPES = frozenset((tf.float32, tf.float64, tf.int32, tf.int64))  # NumPy and TensorFlow add these alike
_NORMAL = {np.dtype(kind): np.finfo(kind).tiny for kind in ("float32", "float64")}  # the smallest normal number
_OPERATIONS = (tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN)


class CpuReduction(QuietReduction):
    """TensorFlow's reduction to one device, with a faster path for small tensors.

    In eager mode NumPy adds small tensors, without ops. In a graph many small tensors are reduced at a time. The
    additions have the same order as in TensorFlow's own reduction, so the results are equal.
    """

    def reduce(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any = None) -> Any:
        """Reduces one value, like `tf.distribute.CrossDeviceOps.reduce`."""
        small = _reduced_if_small(reduce_op, per_replica_value, destinations)
        return super().reduce(reduce_op, per_replica_value, destinations, options) if small is None else small

    def batch_reduce(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> list[Any]:
        """Reduces many values, like `tf.distribute.CrossDeviceOps.batch_reduce`."""
        results = [_reduced_if_small(reduce_op, *pair) for pair in value_destination_pairs]
        rest = [pair for pair, small in zip(value_destination_pairs, results, strict=True) if small is None]
        if not rest:
            return results
        reduced = iter(super().batch_reduce(reduce_op, rest, options))
        return [next(reduced) if small is None else small for small in results]

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook of TensorFlow; in a graph, small tensors of the same kind are packed and travel together.

        Without packing, each tensor needs two transfers for each device except the first. These take longer than the
        sums.
        """
        packs: dict[Any, list[int]] = {}
        sizes: dict[Any, int] = {}
        for index, pair in enumerate(value_destination_pairs):
            kind = _packs_as(*pair) if reduce_op in _OPERATIONS else None
            if kind:
                packs.setdefault((*kind, sizes.setdefault(kind, 0) // MOST_PACKED), []).append(index)
                sizes[kind] += pair[0].values[0].shape.num_elements() * pair[0].values[0].dtype.size
        results: dict[int, Any] = {}
        for (devices, *_), indices in packs.items():
            if len(indices) >= FEWEST:
                values = [value_destination_pairs[index][0] for index in indices]
                results.update(zip(indices, _reduced_packed(reduce_op, values, devices), strict=True))
        rest = [index for index in range(len(value_destination_pairs)) if index not in results]
        pairs = [value_destination_pairs[index] for index in rest]
        results.update(zip(rest, super().batch_reduce_implementation(reduce_op, pairs, options), strict=True))
        return [results[index] for index in range(len(value_destination_pairs))]


def _packs_as(value: Any, destinations: Any) -> Any:
    """The key that values of a graph must share to travel in one pack; None for a value that travels alone."""
    if tf.executing_eagerly():
        return None
    devices = tuple(_destinations(value, destinations))
    if (
        not devices
        or len(devices) != len(value.values)
        or not all(isinstance(each, tf.Tensor) for each in value.values)
    ):
        return None
    first = value.values[0]
    if any(each.dtype != first.dtype or each.shape != first.shape for each in value.values):
        return None
    small = first.shape.is_fully_defined() and first.shape.num_elements() * first.dtype.size <= MOST_BYTES
    return (devices, first.dtype) if small else None


def _reduced_packed(reduce_op: tf.distribute.ReduceOp, values: Sequence[Any], devices: Sequence[str]) -> list[Any]:
    """Reduces many small values as one: one sum, and one copy to each device, for all of them."""
    shapes = [value.values[0].shape for value in values]
    packed = []
    for replica, device in enumerate(devices):
        with tf.device(device):
            flat = tf.constant([-1])  # one for all: each op of a large graph takes time to make and to optimize
            parts = [value.values[replica] for value in values]
            packed.append(tf.concat([part if part.shape.rank == 1 else tf.reshape(part, flat) for part in parts], 0))
    with tf.device(devices[0]):
        reduced = total(packed, len(packed) if reduce_op == tf.distribute.ReduceOp.MEAN else 1)
    columns = []
    for device in devices:
        with tf.device(device):
            parts = tf.split(tf.identity(reduced), [shape.num_elements() for shape in shapes])
            pairs = zip(parts, shapes, strict=True)
            columns.append([part if shape.rank == 1 else tf.reshape(part, shape) for part, shape in pairs])
    return [distribute.Mirrored(components) for components in zip(*columns, strict=True)]


def _reduced_if_small(reduce_op: Any, value: Any, destinations: Any) -> Any:
    """The reduced value if NumPy may add it up; otherwise None."""
    if reduce_op not in _OPERATIONS:
        return None
    devices = _destinations(value, destinations)
    if not devices or not _is_small(value.values):
        return None
    arrays = [eager.array_of(tensor) for tensor in value.values]
    if reduce_op == tf.distribute.ReduceOp.MEAN and arrays[0].dtype.kind != "f":
        return None
    with np.errstate(all="ignore"):  # the user sees infinities without warnings, as always
        result = _sum(arrays)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            result /= result.dtype.type(len(arrays))
        if result.dtype.kind == "f":  # denormal numbers become zeros, as in TensorFlow's ops
            np.multiply(result, 0, out=result, where=np.abs(result) < _NORMAL[result.dtype])
    return distribute.Mirrored(eager.on_devices(result, devices))


def _destinations(value: Any, destinations: Any) -> list[str]:
    """The devices that the reduced value goes to; empty unless they are several CPUs and the value is per replica."""
    if not isinstance(value, distribute.PerReplica) or not isinstance(destinations, distribute.DistributedValues):
        return []
    devices = [component.device for component in destinations.values]
    return devices if len(devices) > 1 and all("device:CPU:" in device for device in devices) else []


def _is_small(tensors: Sequence[Any]) -> bool:
    """Whether tensors are eager, small, equal in dtype and shape, in host memory, and not watched by a tape."""
    if not all(eager.is_eager(tensor) and "device:CPU:" in tensor.device for tensor in tensors):
        return False
    dtype, shape = tensors[0].dtype, eager.shape_of(tensors[0])
    if dtype not in _DTYPES or math.prod(shape) * dtype.size > MOST_BYTES:
        return False
    alike = all(tensor.dtype is dtype and eager.shape_of(tensor) == shape for tensor in tensors[1:])
    return alike and not eager.is_watched(tensors)


def _sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Adds in the order of TensorFlow's `add_n`: up to nine arrays one after the other, then the rest in eights."""
    first = len(arrays) % 8
    first = first + 8 if first < 2 else first
    result = _one_after_the_other(arrays[:first])
    for begin in range(first, len(arrays), 8):
        result += _one_after_the_other(arrays[begin : begin + 8])
    return result


def _one_after_the_other(arrays: Sequence[np.ndarray]) -> np.ndarray:
    result = np.array(arrays[0])
    for array in arrays[1:]:
        result += array
    return result
