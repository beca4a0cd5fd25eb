"""TensorFlow's reduction to one device, without its messages.

`tf.distribute.ReductionToOneDevice` logs "Reduce to /job:localhost/... then broadcast to ..." at level INFO, which
notebooks show. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# check_destinations, get_devices_from: the devices that get a result. _simple_reduce: the sum or mean on one device.
# _simple_gather: the concatenation on one device.
from tensorflow.python.distribute import cross_device_ops as _ops


class QuietReduction(tf.distribute.ReductionToOneDevice):
    """TensorFlow's reduction to one device, without a message for each of its first ten calls."""

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """The hook that reduces one value; `options` have no meaning for it."""
        device = self._first(per_replica_value, destinations)
        reduced = _ops._simple_reduce(per_replica_value, device, self.accumulation_fn, reduce_op)
        return self.broadcast(reduced, destinations)

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: Any, options: Any) -> Any:
        """The hook that gathers one value; `options` have no meaning for it."""
        gathered = _ops._simple_gather(per_replica_value, self._first(per_replica_value, destinations), axis)
        return self.broadcast(gathered, destinations)

    def _first(self, per_replica_value: Any, destinations: Any) -> Any:
        """The device that computes: the named one, or the first of those that get the result."""
        of = destinations if _ops.check_destinations(destinations) else per_replica_value
        return self.reduce_to_device or _ops.get_devices_from(of, self._canonicalize_devices)[0]
