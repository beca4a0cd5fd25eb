"""TensorFlow's reduction to one device, without its messages, and with sums of 16-bit floats that are rounded once.

`tf.distribute.ReductionToOneDevice` logs "Reduce to /job:localhost/... then broadcast to ..." at level INFO, which
notebooks show. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

# check_destinations, get_devices_from: the devices that get a result. _simple_reduce: the sum or mean on one device.
# _simple_gather: the concatenation on one device. _devices_match: whether values are on the devices of others.
from tensorflow.python.distribute import cross_device_ops as _ops

_NARROW = (tf.float16, tf.bfloat16)
_OPERATIONS = (tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN)


def is_narrow(value: tf.Tensor | tf.Variable | tf.IndexedSlices) -> bool:
    """Whether a value is a tensor or a variable of 16-bit floats."""
    return not isinstance(value, tf.IndexedSlices) and value.dtype in _NARROW


def added(values: Sequence[tf.Tensor | tf.Variable]) -> tf.Tensor:
    """The sum of tensors of one dtype, on the current device; that of 16-bit floats is a float32, not yet rounded."""
    return tf.add_n([tf.cast(value, tf.float32) for value in values] if is_narrow(values[0]) else values)


def total(values: Sequence[tf.Tensor | tf.Variable], divisor: int = 1) -> tf.Tensor:
    """The sum of tensors of one dtype, divided by a number, on the current device; 16-bit floats are rounded once.

    Rounded after each addition, a sum would depend on the order: 2048 + 1 + 1 + 1 would be 2048 or 2052.
    """
    result = added(values)
    if divisor != 1:
        result = result / divisor
    return tf.cast(result, values[0].dtype) if is_narrow(values[0]) else result


def changed(
    value: tf.Tensor | tf.IndexedSlices | None, change: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor | tf.IndexedSlices | None:
    """A tensor, or rows of a table, with other values; None stays None."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(change(value.values), value.indices, value.dense_shape)
    return change(value)


def adds_on_one_device(value: object, destinations: object) -> bool:
    """Whether TensorFlow's mirrored strategy adds a value on one device, whatever its all-reduce is."""
    devices = _ops.get_devices_from(destinations)
    return any("cpu" in device.lower() for device in devices) or not _ops._devices_match(value, destinations)


class QuietReduction(tf.distribute.ReductionToOneDevice):
    """TensorFlow's reduction to one device, without a message for each of its first ten calls.

    It adds 16-bit floats in float32 and rounds once.
    """

    def reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: tf.distribute.DistributedValues,
        destinations: object,
        options: object,
    ) -> tf.distribute.DistributedValues:
        """The hook that reduces one value; `options` have no meaning for it."""
        device = self._first(per_replica_value, destinations)
        values = per_replica_value.values
        if reduce_op in _OPERATIONS and len(values) > 1 and is_narrow(values[0]):
            with tf.device(device):
                reduced = total(values, len(values) if reduce_op == tf.distribute.ReduceOp.MEAN else 1)
        else:
            reduced = _ops._simple_reduce(per_replica_value, device, self.accumulation_fn, reduce_op)
        return self.broadcast(reduced, destinations)

    def _gather_implementation(
        self, per_replica_value: tf.distribute.DistributedValues, destinations: object, axis: int, options: object
    ) -> tf.distribute.DistributedValues:
        """The hook that gathers one value; `options` have no meaning for it."""
        gathered = _ops._simple_gather(per_replica_value, self._first(per_replica_value, destinations), axis)
        return self.broadcast(gathered, destinations)

    def _first(self, per_replica_value: object, destinations: object) -> str:
        """The device that computes: the named one, or the first of those that get the result."""
        of = destinations if _ops.check_destinations(destinations) else per_replica_value
        return self.reduce_to_device or _ops.get_devices_from(of, self._canonicalize_devices)[0]
