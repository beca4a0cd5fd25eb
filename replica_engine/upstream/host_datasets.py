"""Distributed datasets whose replicas all take their batches on the host: one plain iterator for all replicas.

TensorFlow makes a multi-device iterator for each pass over a distributed dataset: an iterator, a buffer and several
traced functions for each device, to copy batches to devices ahead of time. That takes 40 to 200 ms of CPU time. Where
every device is a CPU of this machine, there is nothing to copy. Here the N replicas take turns at one iterator instead:
element i goes to replica i % N, which is also the order of the multi-device iterator. How batches are split, partial
batches, optionals and loops in a `tf.function` remain TensorFlow's own code. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import tensorflow as tf

# compute_batch_size: the number of rows of a dataset's batches, as far as the calls that made it tell.
from tensorflow.python.data.experimental.ops.distribute import compute_batch_size as _compute_batch_size

# The classes of what `batch` and `padded_batch` return.
from tensorflow.python.data.ops.batch_op import _BatchDataset, _ParallelBatchDataset
from tensorflow.python.data.ops.padded_batch_op import _PaddedBatchDataset

# The classes of distributed datasets and their iterators, with their type specs. _create_per_replica: the distributed
# value of one batch per replica. _dummy_tensor_fn: what a replica gets that has no batch.
from tensorflow.python.distribute import input_lib as _input_lib

from replica_engine.errors import InputsError
from replica_engine.process import interrupts, threads
from replica_engine.upstream.data_pulls import Pulls, count_element_bytes, may_call_python
from replica_engine.upstream.graphs.function_graphs import python_op

T = TypeVar("T")
Data: TypeAlias = tf.data.Dataset | tf.distribute.DistributedDataset
Options: TypeAlias = tf.distribute.InputOptions | None
Agree = Callable[[tf.Tensor | bool], tf.Tensor | bool]  # see `HostDatasets`

_MOST_AHEAD = 64  # elements that are read ahead for all replicas together
_SMALL = 1 << 16  # bytes that they may take then

_COPYING = (_BatchDataset, _ParallelBatchDataset, _PaddedBatchDataset)
# Without strings and variants, which are never NumPy's memory, and float8 and int4, which `DeepCopy` does not know.
_COPIED = frozenset(
    tf.as_dtype(name)
    for name in (
        *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)


class HostDatasets(tf.distribute.StrategyExtended):
    """Distributes datasets over CPU devices without copies. Put it before an extended class of `tf.distribute`.

    With several workers, a pass over a dataset ends on all of them with the one that has the fewest batches. So the
    extended class may have a method `have_batches`, which returns a function or, without other workers, None. The
    function takes whether this worker has a batch, and returns whether all have one; in a graph, tensors.
    """

    def _experimental_distribute_dataset(self, dataset: Data, options: Options) -> tf.distribute.DistributedDataset:
        """The hook of `experimental_distribute_dataset`.

        Raises:
            InputsError: `dataset` is neither a dataset nor distributed already, or its elements are not batches.
        """
        if not isinstance(dataset, Data):
            raise InputsError(
                f"experimental_distribute_dataset takes a tf.data.Dataset, not {type(dataset).__name__}. Make a "
                "dataset of arrays, with the batch of all replicas:\n"
                "    dataset = tf.data.Dataset.from_tensor_slices(x).batch(n)\n"
                "    dataset = strategy.experimental_distribute_dataset(dataset)"
            )
        if isinstance(dataset, tf.data.Dataset):
            _check_shares(dataset, self._num_replicas_in_sync)
        try:
            distributed = super()._experimental_distribute_dataset(_in_own_memory(dataset), options)
            return _on_host(distributed)
        except IndexError:  # TensorFlow looks for the first dimension of each part of an element
            if not any(getattr(spec, "shape", None) == [] for spec in tf.nest.flatten(dataset.element_spec)):
                raise
        raise InputsError(
            "The dataset has single samples and no batches: its elements are scalars, or have scalars in them, "
            "which replicas cannot share. Batch it first, with the batch of all replicas:\n"
            "    dataset = strategy.experimental_distribute_dataset(dataset.batch(n))"
        )

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Options
    ) -> tf.distribute.DistributedDataset:
        """The hook of `distribute_datasets_from_function`."""

        def copied(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return _in_own_memory(dataset_fn(context))

        return _on_host(super()._distribute_datasets_from_function(copied, options))


def _check_shares(dataset: tf.data.Dataset, replicas: int) -> None:
    """Raises InputsError if some replicas would get rows of one part of each element, and none of another part.

    Parts of two sizes may be two batches, such as one with labels and one without. Each replica has rows of both then.
    """
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(getattr(dataset, "element_spec", ()))]
    sizes = list(dict.fromkeys(shape[0] for shape in shapes if shape is not None and shape.rank and shape[0]))
    if len(sizes) > 1 and min(sizes) < replicas:
        shown = ", ".join(str(shape) for shape in shapes if shape is not None)
        raise InputsError(
            f"The elements of the dataset are not batches that {replicas} replicas can share: their parts have the "
            f"shapes {shown}, so a replica would get rows of some parts and none of others. Batch single samples "
            "first, with the batch of all replicas:\n"
            "    dataset = strategy.experimental_distribute_dataset(dataset.batch(n))\n"
            "What is the same for all rows of a batch is no part of it: pass it to run as an argument of its own."
        )


def rows_of_batches(dataset: tf.data.Dataset) -> int | None:
    """The number of rows of each batch of a dataset except the last one; None if the dataset does not tell.

    A dataset that `batch` or `padded_batch` made tells, and one whose batches have a known shape.
    """
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    if not tf.executing_eagerly() or any(shape is None or shape.rank == 0 for shape in shapes):
        return None
    rows = int(_compute_batch_size(dataset))
    return rows if rows > 0 else None


def find_pulls(iterator: object) -> Pulls | None:
    """The `Pulls` that take batches of an eager iterator as arrays; None if its batches are not those of its dataset.

    A batch of a distributed iterator has one element for each replica, any other batch has one for all.
    """
    if not isinstance(iterator, _HostIterator):
        return Pulls.from_iterator(iterator)
    (turns,) = iterator._iterators
    if turns.agree is not None or iterator._enable_get_next_as_optional:
        return None
    return Pulls.from_iterator(turns.iterator, len(turns.devices), turns.round)


def is_on_host(iterator: object) -> bool:
    """Whether it is an iterator over a distributed dataset whose batches all stay on the host of this process."""
    return isinstance(iterator, _HostIterator)


def _on_host(dataset: tf.distribute.DistributedDataset) -> tf.distribute.DistributedDataset:
    """The dataset with the iterator of this module, unless it feeds other devices than CPUs or has several workers.

    In a job of several workers, TensorFlow's iterator asks the others whether any of them has a batch. A failure of
    the job keeps it (`keep_iterators`).
    """
    workers = dataset._input_workers
    kinds = {tf.DeviceSpec.from_string(device).device_type for device in workers.compute_devices_for_worker(0)}
    cls = _CLASSES.get(type(dataset))
    if (
        cls is None
        or workers.num_workers != 1
        or kinds != {"CPU"}
        or dataset._strategy.extended._in_multi_worker_mode()
    ):
        dataset.__class__ = _NOTED.get(type(dataset), type(dataset))
        return dataset
    # TensorFlow's hooks name the class that they make. So its state is moved to an object of the right class.
    on_host = cls.__new__(cls)
    vars(on_host).update(vars(dataset))
    return on_host


class _Iterable:
    """Makes the iterators of a distributed dataset. Put it before a class of TensorFlow."""

    _spec: type[tf.TypeSpec]

    def __iter__(self: tf.distribute.DistributedDataset) -> _HostIterator:
        def made() -> tf.data.Iterator:
            with tf.device(self._input_workers.worker_devices[0]):
                return iter(self._read_ahead())

        # TensorFlow asks Python for shapes here. If the handler of a signal raises then, it writes beyond an array.
        own = interrupts.held_off_once().around(made) if tf.executing_eagerly() else made()
        iterator = _wrap_iterator(self, own)
        if tf.executing_eagerly():
            (turns,) = iterator._iterators
            turns.end = _ends.after(turns, turns.iterator)
        return iterator

    def _read_ahead(self: tf.distribute.DistributedDataset) -> tf.data.Dataset:
        """The dataset of the iterators. It is made once, because Keras makes two iterators an epoch.

        In a graph it is an op of that graph, and no other graph may use it.
        """
        ahead = getattr(self, "_ahead", None)
        if ahead is None:
            (dataset,) = self._type_spec._to_components(self)
            ahead = _ahead(dataset, self._options, len(self._input_workers.compute_devices_for_worker(0)))
            if tf.executing_eagerly():
                self._ahead = ahead
        return ahead

    @property
    def _type_spec(self) -> tf.TypeSpec:
        spec = super()._type_spec  # type: ignore[misc]
        spec.__class__ = self._spec  # TensorFlow's property names the class that it makes
        return spec


def _wrap_iterator(
    dataset: tf.distribute.DistributedDataset | _HostIteratorSpec, iterator: tf.data.Iterator
) -> _HostIterator:
    """The distributed iterator that takes from a plain one; `dataset` may also be the type of such an iterator."""
    workers, cardinality = dataset._input_workers, dataset._cardinality
    have_batches = getattr(dataset._strategy.extended, "have_batches", None)  # see `HostDatasets`
    agree = None if have_batches is None or cardinality == tf.data.INFINITE_CARDINALITY else have_batches()
    turns = _Turns(iterator, workers.worker_devices[0], workers.compute_devices_for_worker(0), agree)
    return _HostIterator(
        workers,
        components=[turns],
        element_spec=dataset._element_spec,
        strategy=dataset._strategy,
        cardinality=cardinality,
        enable_get_next_as_optional=dataset._enable_get_next_as_optional,
        options=dataset._options,
    )


def _ahead(dataset: tf.data.Dataset, options: Options, replicas: int) -> tf.data.Dataset:
    """The dataset that reads as many elements ahead for each replica as the user wants; by default one.

    By default small elements that no Python code makes are read further ahead: with a place for one or two of them,
    two threads would wake each other for every element.
    """
    buffer = 1 if options is None else options.experimental_per_replica_buffer_size
    size = count_element_bytes(dataset.element_spec) if options is None else None
    if size is not None and size * replicas <= _SMALL // 2 and not may_call_python(dataset):
        buffer = max(1, min(_MOST_AHEAD, _SMALL // max(1, size)) // replicas)
    settings = tf.data.Options()
    settings.experimental_distribute.num_devices = replicas
    if not tf.executing_eagerly():
        settings.autotune.enabled = False  # a graph ends its iterators itself, and would wait, see `_Ends`
    if buffer:
        dataset = dataset.prefetch(buffer * replicas)
    else:
        settings.experimental_optimization.inject_prefetch = False
    return dataset.with_options(settings)


_LOOK, _LOOKS = 0.01, 100
"""Seconds between two looks whether an iterator can end, and how many: its owner is about to be freed elsewhere."""


class _Ends:
    """Ends iterators on threads for which nobody waits.

    The end of an iterator waits for TensorFlow's thread that tunes its dataset. This thread sleeps for 10 ms, then for
    twice as long each time, up to a minute. It is woken a moment before it can see that it must end, and about every
    second time it looks too early and sleeps on. So the end took up to as long as the iterator had lived.
    """

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[list[object]] = queue.SimpleQueue()  # its `put` may interrupt itself
        self._starting = threading.Lock()
        self._is_running = False

    def after(self, owner: T, iterator: object) -> weakref.ref[T]:
        """What ends an iterator once nobody refers to `owner`; somebody must have it until then.

        No Python code runs for it: an exception that a signal's handler raises there would be lost.

        Args:
            owner: has the iterator, and nothing else has.
            iterator: the iterator, or its resource.
        """
        self._start()
        return weakref.ref(owner, functools.partial(self._ended.put, [iterator]))

    def _start(self) -> None:
        with self._starting:
            if not self._is_running:
                threads.start(threading.Thread(target=self._run, name="replica_engine: ends of iterators", daemon=True))
                self._is_running = True

    def _run(self) -> None:
        while True:
            held = self._ended.get()  # it is emptied, so that no other thread drops the last reference
            try:
                # A thread for each: otherwise one that takes a minute would keep the buffers of those after it.
                _thread.start_new_thread(_clear_last, (held,))
            except RuntimeError:  # there are too many threads
                held.clear()


def _clear_last(held: list[object]) -> None:
    """Empties a list when nothing else refers to its element: who drops the last reference waits for the end."""
    for _ in range(_LOOKS):
        if sys.getrefcount(held[0]) <= 2:  # the list, and the argument of this call
            break
        time.sleep(_LOOK)
    held.clear()


_ends = _Ends()


def _after_fork() -> None:
    """A forked child does not have the thread."""
    global _ends
    _ends = _Ends()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def end_apart(iterator: tf.data.Iterator) -> weakref.ref[tf.data.Iterator]:
    """What ends an iterator on a thread for which nobody waits, once nobody refers to it; to be kept until then."""
    try:
        return _ends.after(iterator, iterator._iterator_resource)
    except (AttributeError, RuntimeError):  # it is of a class of the user's, or there are too many threads
        return weakref.ref(iterator)


class _Turns:
    """An iterator at which the replicas take turns, as the one worker of a distributed iterator.

    Args:
        iterator: the plain iterator.
        worker: the device that it is on.
        devices: the device of each replica.
        agree: see `HostDatasets`.

    Attributes:
        round: held during a round of turns, which is not interrupted by that of another thread.
        end: what ends the iterator when this object is gone; None if nobody would have to wait for it.
    """

    end: weakref.ref[_Turns] | None = None

    def __init__(self, iterator: tf.data.Iterator, worker: str, devices: Sequence[str], agree: Agree | None):
        self.iterator = iterator
        self.agree = agree
        self._worker = worker
        self.devices = devices
        self.round = threading.Lock()
        self._is_plain = count_element_bytes(iterator.element_spec) is not None

    def get_next_as_list(self, name: str | None = None) -> list[object]:
        """The next elements of all replicas; raises OutOfRangeError if one gets none."""
        with self.round:
            if self.agree is None:
                return [self._on(device, self._next()) for device in self.devices]
            optionals = [self.iterator.get_next_as_optional() for _ in self.devices]
            agreed = self.agree(tf.reduce_all([optional.has_value() for optional in optionals]))
            if not tf.executing_eagerly():
                agreed = python_op(_end_unless, [agreed], tf.bool)
            elif not agreed:
                raise _ended()
            with tf.control_dependencies([agreed]):
                pairs = zip(self.devices, optionals, strict=True)
                return [self._on(device, optional.get_value()) for device, optional in pairs]

    def get_next_as_optional_list(self) -> list[tf.experimental.Optional]:
        """The next elements of all replicas, as optionals on the worker's device."""
        with self.round:
            optionals = [self.iterator.get_next_as_optional() for _ in self.devices]
            if self.agree is None:
                return optionals
            agreed = tf.convert_to_tensor(self.agree(tf.reduce_any([optional.has_value() for optional in optionals])))
            spec = self.iterator.element_spec
            return [
                tf.cond(agreed, lambda optional=optional: optional, lambda: tf.experimental.Optional.empty(spec))
                for optional in optionals
            ]

    def _next(self) -> object:
        """The next element; without TensorFlow's code for elements of all kinds, which takes longer than the op."""
        iterator = self.iterator
        if not self._is_plain or not tf.executing_eagerly() or not tf.config.experimental.get_synchronous_execution():
            return iterator.get_next()
        tensors = tf.raw_ops.IteratorGetNext(
            iterator=iterator._iterator_resource,
            output_types=iterator._flat_output_types,
            output_shapes=iterator._flat_output_shapes,
        )
        return tf.nest.pack_sequence_as(iterator.element_spec, tensors)

    def padded(self) -> list[object]:
        """The next elements of all replicas, with empty ones at the end; raises OutOfRangeError if all get none."""
        elements: list[object] = []
        try:
            with self.round:
                for device in self.devices:
                    elements.append(self._on(device, self._next()))
        except tf.errors.OutOfRangeError:
            if self.agree is not None and not self.agree(bool(elements)):
                elements = []
            if not elements:
                raise
            for device in self.devices[len(elements) :]:
                with tf.device(device):
                    elements.append(_input_lib._dummy_tensor_fn(self.iterator.element_spec))
            return elements
        if self.agree is not None and not self.agree(True):
            raise _ended()
        return elements

    def _on(self, device: str, element: object) -> object:
        if device == self._worker:
            return element
        with tf.device(device):
            return tf.nest.map_structure(_copy, element, expand_composites=True)


def _ended() -> tf.errors.OutOfRangeError:
    return tf.errors.OutOfRangeError(None, None, "A worker has no batch left.")


def _end_unless(agreed: tf.Tensor) -> tf.Tensor:
    """Raises StopIteration, which TensorFlow makes an OutOfRangeError, unless all workers have a batch."""
    if not agreed:
        raise StopIteration(_ended().message)
    return agreed


def _copy(leaf: tf.Tensor | None) -> tf.Tensor | None:
    return leaf if leaf is None else tf.identity(leaf)


class _HostIterator(_input_lib.DistributedIterator):
    """The iterator over a distributed dataset on the host."""

    def get_next(self, name: str | None = None) -> object:
        """The next batch of each replica.

        In eager mode TensorFlow would enter scopes or, if shapes are not known, ask for optionals and make a dozen ops
        of them, for each replica.
        """
        in_scope = tf.distribute.has_strategy()
        misplaced = in_scope and tf.distribute.get_replica_context() is not None
        foreign = in_scope and tf.distribute.get_strategy() is not self._strategy
        if not tf.executing_eagerly() or misplaced or foreign:
            return super().get_next(name)
        (turns,) = self._iterators
        with tf.device(self._input_workers.worker_devices[0]):
            elements = turns.padded() if self._enable_get_next_as_optional else turns.get_next_as_list()
        return _input_lib._create_per_replica(elements, self._strategy)

    @property
    def _type_spec(self) -> _HostIteratorSpec:
        return _HostIteratorSpec(  # and not TensorFlow's of another class: each step asks for it
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
        )


class _HostIteratorSpec(_input_lib.DistributedIteratorSpec):
    """The type of such an iterator. Its one component is the plain iterator."""

    @property
    def value_type(self) -> type:
        return _HostIterator

    @property
    def _component_specs(self) -> list[tf.TypeSpec]:
        return [tf.data.IteratorSpec(each._element_spec) for each in super()._component_specs]

    def _to_components(self, value: _HostIterator) -> list[tf.data.Iterator]:
        return [turns.iterator for turns in value._iterators]

    def _from_components(self, components: Sequence[tf.data.Iterator]) -> _HostIterator:
        (iterator,) = components
        return _wrap_iterator(self, iterator)


class _Spec:
    """The type of a dataset of this module. Put it before a class of TensorFlow."""

    @property
    def value_type(self) -> type:
        """The class of the dataset."""
        return _CLASSES[super().value_type]  # type: ignore[misc]

    def _from_components(self, components: object) -> tf.distribute.DistributedDataset:
        return _on_host(super()._from_components(components))  # type: ignore[misc]


class _DatasetSpec(_Spec, _input_lib.DistributedDatasetSpec):
    """Of `_HostDataset`."""


class _FromFunctionSpec(_Spec, _input_lib.DistributedDatasetsFromFunctionSpec):
    """Of `_FromFunction`."""


class _HostDataset(_Iterable, _input_lib.DistributedDataset):
    _spec = _DatasetSpec


class _FromFunction(_Iterable, _input_lib.DistributedDatasetsFromFunction):
    _spec = _FromFunctionSpec


_noted: weakref.WeakValueDictionary[int, tf.distribute.DistributedIterator] = weakref.WeakValueDictionary()


def keep_iterators() -> None:
    """Keeps TensorFlow's eager iterators over distributed datasets until the process ends: the job has failed.

    A loop has the last reference to its iterator. The exception that leaves the loop drops it, and so would be heard of
    only after the end of the iterator, up to a minute later (see `_Ends`). On another thread the iterator must not end
    either: with the functions of a multi-device iterator go traces of Python, for which TensorFlow takes Python's lock,
    and a process that ends meanwhile is aborted.
    """
    for each in _noted.valuerefs():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each()))  # where it is gone, of None


def _note(iterator: tf.distribute.DistributedIterator) -> tf.distribute.DistributedIterator:
    if tf.executing_eagerly():
        _noted[id(iterator)] = iterator
    return iterator


# Without a class before TensorFlow's: a dataset that TensorFlow has made must be able to get the class.
class _NotedDataset(_input_lib.DistributedDataset):
    def __iter__(self) -> tf.distribute.DistributedIterator:
        return _note(super().__iter__())


class _NotedFromFunction(_input_lib.DistributedDatasetsFromFunction):
    def __iter__(self) -> tf.distribute.DistributedIterator:
        return _note(super().__iter__())


_CLASSES = {_input_lib.DistributedDataset: _HostDataset, _input_lib.DistributedDatasetsFromFunction: _FromFunction}
_NOTED = {
    _input_lib.DistributedDataset: _NotedDataset,
    _input_lib.DistributedDatasetsFromFunction: _NotedFromFunction,
}

for _theirs, _ours in [*_CLASSES.items(), *_NOTED.items(), (_input_lib.DistributedIterator, _HostIterator)]:
    _ours.__name__ = _ours.__qualname__ = _theirs.__name__  # the name that messages show and users know


def _in_own_memory(dataset: Data) -> Data:
    """The dataset with copies of its elements, if they may be the memory of Python; otherwise the dataset itself.

    TensorFlow takes an array that a generator or `tf.numpy_function` returns without a copy, if its memory is aligned
    to 64 bytes. It marks such memory as not its own, so no op writes its result there in place of its input. But a
    slice of it does not carry the mark, and a distributed dataset gives each replica a slice of the batch. An op of the
    step may then overwrite the user's array. The next epoch trains on what the step has computed, and where arrays lie
    and which op comes last differ from run to run. TensorFlow's own strategies do so too.

    `batch` copies its elements. So only what Python does after the last `batch` matters here.
    """
    if not isinstance(dataset, tf.data.Dataset) or not may_call_python(dataset, _COPYING):
        return dataset
    several = type(dataset.element_spec) is tuple  # `map` passes the parts of a tuple one by one

    @tf.autograph.experimental.do_not_convert
    def copied(*element: object) -> object:
        return tf.nest.map_structure(_copied, element if several else element[0], expand_composites=True)

    return dataset.map(copied)


def _copied(tensor: object) -> object:
    return tf.raw_ops.DeepCopy(x=tensor) if getattr(tensor, "dtype", None) in _COPIED else tensor
