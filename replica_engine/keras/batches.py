"""The batches of a model's steps, and how they are divided among the replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf.host_datasets import end_apart
from replica_engine.backend import Backend
from replica_engine.keras.shard import Shard
from replica_engine.telemetry import timeline
from replica_engine.values import samples
from replica_engine.values.regroup import regroup, select


class Batch(NamedTuple):
    """A batch of at least one sample.

    Attributes:
        data: the samples, as tensors.
        total: how many they are.
    """

    data: Any
    total: int


class WholeBatches:
    """The batches of an iterator over whole batches, which this process divides among the replicas.

    Args:
        backend: what runs the replicas.
        keeps: whether an iterator of tf.data is kept until the next one, or until `end`.
    """

    def __init__(self, backend: Backend, keeps: bool = True):
        self._keeps = keeps
        self._size = backend.strategy.num_replicas_in_sync
        devices = getattr(backend, "device_group", None)  # of one that compiles: the host divides
        self._own = range(0) if devices is None else range(devices.first, devices.first + devices.size)
        self._feeding = timeline.Track(type(backend.strategy).__name__, "feeding", order=-1)
        # By thread, the iterator that was last read there, as `end_apart` takes it.
        self._iterators: dict[int, list[tf.data.Iterator]] = {}

    def next(self, iterator: Iterator[object], most: int) -> tuple[list[Batch], Exception | None]:
        """The next batches, without empty ones; and the exception with which the iterator failed after them.

        Raises:
            StopIteration, OutOfRangeError: there is none.
        """
        last = self._iterators.get(threading.get_ident())
        if self._keeps and isinstance(iterator, tf.data.Iterator) and (last is None or last[0] is not iterator):
            self.end()
            self._iterators[threading.get_ident()] = [iterator]
        batches: list[object] = []
        failed: Exception | None = None
        for _ in range(most):
            try:
                with timeline.span(self._feeding, "next batch", "feeding"):
                    batches.append(self.whole(next(iterator)))
            except (StopIteration, tf.errors.OutOfRangeError):
                if not batches:
                    raise
                break
            except Exception as error:  # the steps before it count, as if they ran one by one
                failed = error
                break
        return [Batch(data, total) for data in batches if (total := samples.count(data))], failed

    def whole(self, batch: object) -> Any:
        """A batch as tensors; of the parts that TensorFlow has dealt to the replicas, all together."""
        dealt = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.distribute.DistributedValues)]
        if not dealt:
            return samples.as_tensors(batch)
        parts = [samples.as_tensors(select(index, batch)) for index in range(len(dealt[0].values))]
        return tf.nest.map_structure(
            lambda *leaves: samples.join(leaves) if samples.has_rows(leaves[0]) else leaves[0], *parts
        )

    def end(self) -> None:
        """Ends the iterator of tf.data that this thread has read, which is kept longer: Keras waits for its end."""
        last = self._iterators.pop(threading.get_ident(), None)
        if last is not None:
            end_apart(last)

    def taking(self, total: samples.Rows) -> Callable[[object], tuple[object, Shard]]:
        """Returns what gives a replica on a thread its shard of a batch of `total` samples, in a graph of any size."""
        each, more = total // self._size, total % self._size  # the first `more` replicas get one sample more

        def take(data: object) -> tuple[object, Shard]:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = each + tf.cast(replica < more, tf.int32)
            start = replica * each + tf.minimum(replica, more)
            return samples.on_device(samples.take(data, start, start + rows)), Shard(rows, total, self._size)

        return take

    def shares(self, data: object, total: int) -> Any:
        """Divides a batch on the host: equally many rows for each replica; a smaller shard has the one before too."""
        if total % self._size == 0:
            parts = samples.split(data, self._size)
            return regroup([parts[replica] for replica in self._own])
        data = samples.views(data)
        size = -(-total // self._size)
        larger = total - (size - 1) * self._size  # the number of shards with `size` rows
        stops = [replica * (size - 1) + min(replica, larger) for replica in range(1, self._size + 1)]
        return regroup([samples.take(data, stops[replica] - size, stops[replica]) for replica in self._own])
