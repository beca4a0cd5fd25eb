"""Takes the next elements of a dataset's iterator as arrays: many with one call, once they come quickly.

In Python the next element of an iterator takes several times as long as in TensorFlow's C++ code. So a function of
TensorFlow takes many, one after the other on the calling thread, and returns them stacked.

- An element that was taken is never lost. The function puts each into a queue of TensorFlow before it takes the next.
  If the iterator ends or fails, those before it are still in the queue and come first; the end or the error is raised
  by the next call.
- The function returns when all elements are there. So it must never wait for something that the receiver of the first
  of them does. Only Python code can wait for that, so elements of datasets that call Python are taken one by one.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# _VariantDataset: a dataset behind a handle, which does not tell what the dataset is made of.
from tensorflow.python.data.ops.dataset_ops import _VariantDataset

# OwnedIterator: the iterator of a tf.data.Dataset in eager mode.
from tensorflow.python.data.ops.iterator_ops import OwnedIterator as _OwnedIterator

from replica_engine.upstream.graphs import graph_walk

Columns = Sequence[Sequence[np.ndarray] | np.ndarray]
"""For each component, the arrays of some elements: one after the other, or stacked."""

MANY = 16
"""About the number of elements that one call takes."""

_PATIENCE = 64  # elements that come quickly, one by one, before the function is traced
_QUICK = 2e-3  # seconds; for a slower element the cost of the call does not matter
_EXECUTOR = "SINGLE_THREADED_EXECUTOR"  # runs the ops of a function one after the other on the calling thread


class Pulls:
    """Takes batches of one iterator whose elements are dense tensors of numbers, of known shapes.

    Args:
        iterator: the iterator; not kept, since it keeps this object alive.
        each: how many elements make a batch.
        lock: held while elements are taken, so that those of a batch follow each other.

    Attributes:
        each: how many elements make a batch.
    """

    def __init__(self, iterator: _OwnedIterator, each: int, lock: contextlib.AbstractContextManager[object]):
        self.each = each
        self._resource = iterator._iterator_resource
        self._types = tuple(iterator._flat_output_types)
        self._shapes = tuple(iterator._flat_output_shapes)
        # One that a function returned has none.
        self._dataset: tf.data.Dataset | None = getattr(iterator, "_dataset", None)
        self._together = max(1, MANY // each)  # batches that one call takes
        self._quick = 0  # how many elements came quickly; one that came slowly counts against several
        self._alone: bool | None = None  # whether elements are taken one by one for good; None if not yet known
        self._queue: tf.queue.FIFOQueue | None = None
        self._failed: tf.errors.OpError | None = None
        self._lock = lock

    @classmethod
    def from_iterator(
        cls, iterator: tf.data.Iterator, each: int = 1, lock: contextlib.AbstractContextManager[object] | None = None
    ) -> Pulls | None:
        """The `Pulls` of an iterator, the same object at each call; None for an iterator that it cannot serve."""
        if type(iterator) is not _OwnedIterator or not tf.executing_eagerly():
            return None
        if not tf.config.experimental.get_synchronous_execution():
            return None  # in asynchronous mode an op would not raise the end of the iterator
        found = _pulls.get(iterator)
        if found is None:
            if count_element_bytes(iterator.element_spec) is not None:
                found = _pulls[iterator] = cls(iterator, each, lock or threading.Lock())
        else:
            with found._lock:
                found._failed = None  # from an earlier loop that ended before it met this error
        return found

    def take(self, most: int) -> Columns:
        """Takes at least one batch and at most `most`: for each component, the arrays of all elements.

        Nothing changes these arrays afterwards. Elements at the end that make no whole batch are left out.

        Raises:
            tf.errors.OutOfRangeError: no batch is left.
            tf.errors.OpError: the dataset raised it.
        """
        with self._lock:
            columns: Columns = ()
            if self._failed is None:
                columns = self._many() if most >= self._together and self._may_take_many() else self._one_by_one()
            whole = len(columns[0]) // self.each * self.each if columns else 0
            if whole:
                return [column[:whole] for column in columns]
            failed, self._failed = self._failed, None
            assert failed is not None, "otherwise there is a batch"
            try:
                raise failed
            finally:
                del failed  # the exception refers to this frame: a cycle that would keep the queue alive

    def _one_by_one(self) -> Columns:
        """The elements of a batch, or fewer if the iterator ends or fails."""
        rows: list[list[np.ndarray]] = []
        began = time.perf_counter()
        try:
            for _ in range(self.each):
                tensors = tf.raw_ops.IteratorGetNext(
                    iterator=self._resource, output_types=self._types, output_shapes=self._shapes
                )
                rows.append([_array(tensor) for tensor in tensors])
        except tf.errors.OpError as error:
            self._failed = error
        self._note(self.each, time.perf_counter() - began)
        return list(zip(*rows, strict=True))

    def _many(self) -> Columns:
        """The elements of `_together` batches, or fewer if the iterator ends or fails."""
        count = self._together * self.each
        if self._queue is None:
            free = _free_queues.setdefault((self._types, self._shapes, count), [])
            self._queue = free.pop() if free else tf.queue.FIFOQueue(count, self._types, self._shapes)
            # Given back when this object goes, and not deleted: see `_free_queues`.
            weakref.finalize(self, free.append, self._queue).atexit = False
        take = _taking(self._types, self._shapes, count)
        began = time.perf_counter()
        try:
            tensors = tf.raw_ops.StatefulPartitionedCall(
                args=[self._resource, self._queue.queue_ref], Tout=self._types, f=take, executor_type=_EXECUTOR
            )
        except tf.errors.OpError as error:
            self._failed = error
            tensors = tf.raw_ops.QueueDequeueManyV2(
                handle=self._queue.queue_ref, n=self._queue.size(), component_types=self._types, timeout_ms=-1
            )
        self._note(count, time.perf_counter() - began)
        return [_array(tensor) for tensor in tensors]

    def _note(self, count: int, seconds: float) -> None:
        """Notes how long elements took. A busy machine may let a few of them wait."""
        quick = seconds < count * _QUICK
        self._quick = min(self._quick + count, 2 * _PATIENCE) if quick else max(self._quick - 8 * count, 0)

    def _may_take_many(self) -> bool:
        """Whether elements come quickly, and none waits for what is done with those before."""
        if self._quick < _PATIENCE:
            return False
        if self._alone is None:
            self._alone, self._dataset = may_call_python(self._dataset), None
        return not self._alone


# Queues that nobody uses now, which are empty. TensorFlow keeps 34 KB for each queue that was ever made in eager mode.
_free_queues: dict[tuple[object, ...], list[tf.queue.FIFOQueue]] = {}

# The pulls of each iterator, which may be used by one device loop after the other.
_pulls: weakref.WeakKeyDictionary[_OwnedIterator, Pulls] = weakref.WeakKeyDictionary()


def _is_plain(spec: tf.TypeSpec) -> bool:
    return type(spec) is tf.TensorSpec and spec.shape.is_fully_defined() and (spec.dtype.is_bool or _is_number(spec))


def _is_number(spec: tf.TensorSpec) -> bool:
    return spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_complex


def _array(tensor: tf.Tensor) -> np.ndarray:
    """The memory of a tensor that no other code has, so nothing changes it."""
    return np.asarray(tensor._numpy_internal())


@functools.lru_cache(maxsize=64)
def _taking(types: tuple, shapes: tuple, count: int) -> tf.types.experimental.ConcreteFunction:
    """The function that takes that many elements of an iterator by way of a queue.

    Called as an op it begins after 10 us; a call of the function itself begins after 100.
    """

    def take(iterator: tf.Tensor, queue: tf.Tensor) -> list[tf.Tensor]:
        kept: list[tf.Operation] = []
        for _ in range(count):  # a loop of the graph would not run on the calling thread alone
            with tf.control_dependencies(kept):  # each is in the queue before the next one is taken, which may fail
                element = tf.raw_ops.IteratorGetNext(iterator=iterator, output_types=types, output_shapes=shapes)
            kept = [tf.raw_ops.QueueEnqueueV2(handle=queue, components=element, timeout_ms=-1)]
        return tf.raw_ops.QueueDequeueManyV2(handle=queue, n=count, component_types=types, timeout_ms=-1)

    resource = tf.TensorSpec([], tf.resource)
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.function(take, autograph=False).get_concrete_function(resource, resource)


def count_element_bytes(spec: object) -> int | None:
    """The bytes of an element, by its specs; None if they are not known, or it is not of dense tensors of numbers."""
    specs = tf.nest.flatten(spec)
    if not specs or not all(map(_is_plain, specs)):
        return None
    return sum(each.shape.num_elements() * each.dtype.size for each in specs)


def may_call_python(dataset: tf.data.Dataset | None, without: tuple[type, ...] = ()) -> bool:
    """Whether a dataset calls Python, as far as can be seen: True if some part of it cannot be seen.

    Args:
        dataset: the dataset; None if it is not known.
        without: classes of datasets that are not looked at, and whose inputs are not either.
    """
    if dataset is None:
        return True
    for each in graph_walk.reached([dataset], lambda each: [] if isinstance(each, without) else each._inputs()):
        if isinstance(each, without):
            continue
        if isinstance(each, _VariantDataset):
            return True
        for wrapper in each._functions():
            graph = wrapper.function.graph
            if any(outside.dtype in (tf.variant, tf.resource) for outside, _ in graph.captures):
                return True  # another dataset or iterator inside
            if b"PyFunc" in graph.as_graph_def().SerializeToString():
                return True
    return False
