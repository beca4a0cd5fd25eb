"""The batches of a model's steps, and how they are divided among the replicas.

TensorFlow deals 13 samples to 4 replicas as 4, 4, 4 and 1, and 5 as 2, 2, 1 and 0. `DealtBatches` takes equal shares as
they are. Others are joined and divided again, but for those of several workers on threads, which need no equal shapes:
there each replica only needs a sample.

What must never happen: one of several workers joins the shares of a batch or refuses them, and another one does not.
So they tell each other the shares before the first step on them, and all decide by the same numbers.
"""

from __future__ import annotations

import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.backend import Backend
from replica_engine.errors import BatchError, base
from replica_engine.keras.shard import Shard
from replica_engine.upstream import distribute
from replica_engine.upstream.host_datasets import end_apart, is_on_host
from replica_engine.values import samples
from replica_engine.values.regroup import regroup, select
from replica_engine.watch import timeline


class Batch(NamedTuple):
    """A batch of at least one sample.

    Attributes:
        data: the samples, as tensors; of a batch that is used as it was dealt, a list of the parts that the replicas of
            this process have.
        total: how many samples all replicas have.
        dealt: the numbers of `DealtBatches._shares` for all replicas, if the batch is used as it was dealt.
        is_whole: whether it cannot be divided, as its arrays have different numbers of samples.
    """

    data: Any
    total: int
    dealt: np.ndarray | None = None
    is_whole: bool = False

    @property
    def sample(self) -> Any:
        """The batch, or a part of it."""
        return self.data if self.dealt is None else self.data[0]

    @property
    def is_uneven(self) -> bool:
        """Whether replicas have unequal shares of it, as it was dealt."""
        return self.dealt is not None and not _are_equal(self.dealt[0])


class WholeBatches:
    """The batches of an iterator over whole batches, which this process divides among the replicas.

    Args:
        backend: what runs the replicas.
    """

    def __init__(self, backend: Backend):
        self._size = backend.strategy.num_replicas_in_sync
        devices = getattr(backend, "device_group", None)  # of one that compiles: the host divides
        self._own = range(0) if devices is None else range(devices.first, devices.first + devices.size)
        self._feeding = timeline.Track(type(backend.strategy).__name__, "feeding", order=-1)
        # By thread, the iterator that was last read there. Keras waits for its end, so it ends on another thread.
        self._iterators: dict[int, weakref.ref[tf.data.Iterator]] = {}

    def next(self, iterator: Iterator[object], most: int) -> tuple[list[Batch], Exception | None]:
        """The next batches, without empty ones; and the exception with which the iterator failed after them.

        Raises:
            StopIteration, OutOfRangeError: there is none.
        """
        if isinstance(iterator, tf.data.Iterator):
            # The end of an iterator waits for the thread with which TensorFlow tunes the dataset.
            # That may take as long as the iterator has lived.
            last = self._iterators.get(threading.get_ident())
            if last is None or last() is not iterator:
                self._iterators[threading.get_ident()] = end_apart(iterator)
        batches: list[Any] = []
        failed: Exception | None = None
        for _ in range(most):
            try:
                with timeline.span(self._feeding, "next batch", "feeding"):
                    batches.append(self._taken(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                if not batches:
                    raise
                break
            except Exception as error:  # the steps before it count, as if they ran one by one
                failed = error
                break
        return self._counted(batches, failed), failed

    def _taken(self, iterator: Iterator[object]) -> Any:
        """The next batch of an iterator, as `_counted` takes it. What is wrong with it alone is found here."""
        data = _joined(_parts(next(iterator)))
        return Batch(data, samples.count(data))

    def _counted(self, batches: Sequence[Any], failed: Exception | None) -> list[Batch]:
        """The batches that are not empty."""
        return [batch for batch in batches if batch.total]

    def wholes(self, batch: object) -> list[Any]:
        """A batch as tensors; the parts that TensorFlow has dealt to the replicas are joined if they are alike."""
        parts = _parts(batch)
        return [_joined(parts)] if len(set(map(samples.described, parts))) == 1 else parts

    def joined(self, batch: Batch) -> Any:
        """The samples of a batch in one piece.

        Raises:
            BatchError: they cannot be joined, on all workers.
        """
        return batch.data

    def taking(self, total: samples.Rows) -> Callable[[object], tuple[object, Shard]]:
        """Returns what gives a replica on a thread its shard of a batch of `total` samples, in a graph of any size."""
        each, more = total // self._size, total % self._size  # the first `more` replicas get one sample more

        def take(data: object) -> tuple[object, Shard]:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = each + tf.cast(replica < more, tf.int32)
            start = replica * each + tf.minimum(replica, more)
            return samples.on_device(samples.take(data, start, start + rows)), Shard(rows, total, self._size)

        return take

    def shares(self, batch: Batch) -> Any:
        """Divides a batch on the host: equally many rows for each replica; a smaller shard has the one before too."""
        if batch.dealt is not None:
            return regroup(batch.data)
        data, total = batch.data, batch.total
        if total % self._size == 0:
            parts = samples.split(data, self._size)
            return regroup([parts[replica] for replica in self._own])
        data = samples.views(data)
        size = -(-total // self._size)
        larger = total - (size - 1) * self._size  # the number of shards with `size` rows
        stops = [replica * (size - 1) + min(replica, larger) for replica in range(1, self._size + 1)]
        return regroup([samples.take(data, stops[replica] - size, stops[replica]) for replica in self._own])


class DealtBatches(WholeBatches):
    """The batches of a model in a scope: those that TensorFlow has dealt to the replicas, and whole ones.

    With several workers, a batch that nobody has dealt is this worker's part.

    Args:
        backend: what runs the replicas.
    """

    def __init__(self, backend: Backend):
        super().__init__(backend)
        self._backend = backend
        # In eager mode, TensorFlow's iterators make a dozen ops for each replica.
        self._following = tf.function(lambda iterator: iterator.get_next(), autograph=False)

    def _taken(self, iterator: Iterator[object]) -> Any:
        is_distributed = isinstance(iterator, tf.distribute.DistributedIterator) and not is_on_host(iterator)
        parts = _parts(self._following(iterator) if is_distributed else next(iterator))
        if self._backend.saving is None:
            return self._batch(parts, self._shares(parts) if len(parts) > 1 else None)
        own = len(self._backend.strategy.extended.worker_devices)
        return parts if len(parts) == own else _divided(parts[0], own)

    def _counted(self, batches: Sequence[Any], failed: Exception | None) -> list[Batch]:
        workers, found = self._backend.saving, batches
        if workers is not None:
            if failed is not None and not batches:
                raise failed
            own = len(self._backend.strategy.extended.worker_devices)
            first = self._own.start if self._backend.compiles else own * workers.worker
            mine = np.array([self._shares(parts) for parts in batches])
            # XLA does not compile collectives of 64 bits for TPUs; TensorFlow has those of 32 bits on the host.
            # Each worker fills in its own part: the sum over all is everything.
            told = np.zeros([*mine.shape[:-1], self._size], np.int32 if self._backend.compiles else np.int64)
            told[..., first : first + own] = mine
            of_each = _per_replica([told, *[np.zeros_like(told)] * (own - 1)])
            of_all = self._backend.strategy.reduce("SUM", of_each, axis=None).numpy()
            found = [self._batch(parts, shares) for parts, shares in zip(batches, of_all, strict=True)]
        return [batch for batch in found if batch.total]

    def _batch(self, parts: list[Any], shares: np.ndarray | None) -> Batch:
        """The batch of which this process has these parts, and all replicas these shares; None if it is not dealt."""
        if shares is None or not shares.size:
            return Batch(parts[0], samples.count(parts[0]))
        rows = shares[0]
        total, is_whole = int(rows[0].sum()), bool((rows != rows[0]).any())
        takes_any = not self._backend.compiles and not is_whole and (self._joins_not(shares) or self._size > len(parts))
        if total and rows.min() and (_are_equal(rows) or takes_any):
            return Batch(parts, total, shares)
        return Batch(self._together(parts, shares) if total else None, total, is_whole=is_whole)

    def joined(self, batch: Batch) -> Any:
        return batch.data if batch.dealt is None else self._together(batch.data, batch.dealt)

    def _shares(self, parts: Sequence[Any]) -> np.ndarray:
        """Two numbers for each part of each leaf with samples: how many it has, and one that stands for all else.

        The second is odd if the leaf can go to other workers.
        """
        leaves = [[leaf for leaf in tf.nest.flatten(part) if samples.has_rows(leaf)] for part in parts]
        rows = [[int(samples.count_in_graph(leaf)) for leaf in each] for each in leaves]
        return np.array([rows, [list(map(self._kind, each)) for each in leaves]], np.int64).swapaxes(1, 2)

    def _kind(self, leaf: Any) -> int:
        # 31 bits, since compiled workers exchange int32. The lowest one says whether the leaf can go to other workers.
        is_sent = isinstance(leaf, tf.Tensor) and not (self._backend.compiles and leaf.dtype == tf.string)
        return (zlib.crc32(samples.described(leaf).encode()) & 0x7FFFFFFE) | is_sent

    def _joins_not(self, shares: np.ndarray) -> bool:
        """Whether the parts of a batch differ in more than their numbers of samples, or cannot go to other workers."""
        kinds = shares[1]
        return not _are_equal(kinds) or (self._backend.saving is not None and not (kinds & 1).all())

    def _together(self, parts: list[Any], shares: np.ndarray) -> Any:
        """The parts of all replicas, joined.

        Raises:
            BatchError: they cannot be joined, on all workers.
        """
        if self._joins_not(shares):
            *rows, last = (int(each) for each in shares[0, 0])
            raise BatchError(
                f"A batch of {base.plural(sum(rows) + last, 'sample')} is dealt to {self._size} replicas as "
                f"{', '.join(map(str, rows))} and {last}. Such a batch must be joined, as its shares are not equal or "
                "the model computes whole batches. But its parts cannot be: they must have one shape everywhere, and "
                "over several workers they must be dense, and no strings under TPUStrategy. Pass batches that all "
                f"replicas share equally, of a multiple of {self._size} samples: dataset.batch(n, drop_remainder=True)."
            )
        if self._backend.saving is None:
            return _joined(parts)
        of_leaf = iter(shares[0])
        return tf.nest.map_structure(
            lambda *leaves: self._gathered(leaves, next(of_leaf)) if samples.has_rows(leaves[0]) else leaves[0], *parts
        )

    def _gathered(self, leaves: Sequence[tf.Tensor], rows: np.ndarray) -> tf.Tensor:
        """A leaf of all workers, of whose parts the replicas have so many rows; compiled, all need equal shapes."""
        most = rows.max()
        padded = [tf.concat([leaf, tf.zeros([most - len(leaf), *leaf.shape[1:]], leaf.dtype)], 0) for leaf in leaves]
        places = [replica * most + np.arange(each) for replica, each in enumerate(rows)]
        return tf.gather(self._backend.strategy.gather(_per_replica(padded), axis=0), np.concatenate(places))


def _parts(batch: object) -> list[Any]:
    """The parts that TensorFlow has dealt to the replicas of this process, as tensors; of another batch, it alone."""
    dealt = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.distribute.DistributedValues)]
    if not dealt:
        return [samples.as_tensors(batch)]
    return [samples.as_tensors(select(index, batch)) for index in range(len(dealt[0].values))]


def _per_replica(values: Sequence[Any]) -> tf.distribute.DistributedValues:
    return distribute.PerReplica(tuple(map(tf.convert_to_tensor, values)))


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: samples.join(leaves) if samples.has_rows(leaves[0]) else leaves[0], *parts
    )


def _divided(batch: object, size: int) -> list[Any]:
    """A batch in as many parts, as evenly as possible."""
    total = samples.count(batch)
    stops = [total * part // size for part in range(size + 1)]
    return [samples.take(batch, *each) for each in itertools.pairwise(stops)]


def _are_equal(shares: np.ndarray) -> bool:
    """Whether all replicas have the same number, of each leaf."""
    return bool((shares == shares[:, :1]).all())
