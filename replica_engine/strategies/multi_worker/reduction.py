"""All-reduces of several workers with several CPU devices each: the sum inside the worker comes first.

The replicas of a worker share one memory. So their values are added there, one collective for each worker goes over the
network, and each replica gets a copy of its result. With every replica in TensorFlow's ring, a worker of two replicas
would send each value through its own loopback too. All replicas of all workers get the same bits, since each worker
copies the one result of the collective.

Values of float16 and bfloat16 travel as float32, and their sum is rounded once: a sum that each worker rounds would
depend on how many replicas a worker has, and on the order of the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.reduction import added, changed, is_narrow

PIECE = 8 << 20
"""Bytes of a piece, and of a pack of small values, unless the user's options say otherwise."""


class WorkerReduction(tf.distribute.CrossDeviceOps):
    """Reduces inside the worker, and then over the workers.

    Args:
        over_workers: TensorFlow's collectives, with one device of each worker.
        device: that device.
        replicas: the number of replicas of all workers.
        workers: the number of workers.
    """

    def __init__(self, over_workers: tf.distribute.CrossDeviceOps, device: str, replicas: int, workers: int):
        super().__init__()
        self._over_workers = over_workers
        self._device = device
        self._replicas = replicas
        self._workers = workers

    @property
    def _num_between_graph_workers(self) -> int:
        """The hook that says that the replicas of this process are not all."""
        return self._workers

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """The hook of `reduce`."""
        (result,) = self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)
        return result

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook of `batch_reduce`; the values of a batch go over the network together."""
        size = options.bytes_per_pack or PIECE
        packed = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=size, timeout_seconds=options.timeout_seconds, implementation=options.implementation
        )
        with tf.device(self._device):
            own = [_sum(value.values) for value, _ in value_destination_pairs]
            pieces = [_pieces(value, size) for value in own]
        pairs = [(piece, self._device) for each in pieces for piece in each]
        sums = iter(self._over_workers.batch_reduce(tf.distribute.ReduceOp.SUM, pairs, packed))
        with tf.device(self._device):
            parts = [[distribute.first_values(next(sums)) for _ in each] for each in pieces]
            totals = [_joined(part, value) for part, value in zip(parts, own, strict=True)]
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                totals = [changed(total, lambda values: values / self._replicas) for total in totals]
            firsts = [value.values[0] for value, _ in value_destination_pairs]
            totals = [
                tf.cast(total, first.dtype) if is_narrow(first) else total
                for total, first in zip(totals, firsts, strict=True)
            ]
        destinations = [each for _, each in value_destination_pairs]
        return [self.broadcast(total, each) for total, each in zip(totals, destinations, strict=True)]

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        """The hook of gathers: the rows of one worker follow those of the worker before."""
        with tf.device(self._device):
            own = tf.concat(per_replica_value.values, axis)
        gathered = self._over_workers._gather(own, self._device, axis, options)
        return self.broadcast(distribute.first_values(gathered), destinations)


def _sum(values: Sequence[Any]) -> Any:
    """The sum of the replicas' values, on the current device: TensorFlow packs only values that say their device.

    The sum of 16-bit floats is a float32.
    """
    if not isinstance(values[0], tf.IndexedSlices):
        return added(values) if len(values) > 1 or is_narrow(values[0]) else tf.identity(values[0])
    rows, indices = (tf.concat([getattr(value, name) for value in values], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(rows, indices, values[0].dense_shape)


def _pieces(value: Any, size: int) -> list[Any]:
    """A large tensor in pieces of about `size` bytes; anything else as it is."""
    count = 1
    if isinstance(value, tf.Tensor) and value.shape.is_fully_defined():
        count = -(-value.shape.num_elements() * value.dtype.size // size)
    if count <= 1:
        return [value]
    elements = value.shape.num_elements()
    sizes = [elements * (part + 1) // count - elements * part // count for part in range(count)]
    return tf.split(tf.reshape(value, [-1]), sizes)


def _joined(parts: list[Any], like: Any) -> Any:
    """The tensor that was in pieces."""
    return parts[0] if len(parts) == 1 else tf.reshape(tf.concat(parts, 0), like.shape)
