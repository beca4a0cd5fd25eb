"""All-reduces and gathers of threads: on the devices of one process, and over workers.

CPU devices of one process share one memory. So a sum is computed once and given to every replica (`CpuReduction`). It
needs fewer copies than a ring, has no op that blocks a thread of TensorFlow's pool until its peers arrive, and leaves
replicas bitwise equal by construction. Sums of float16 and bfloat16 are added in float32 and rounded once.

With several workers, values are reduced or gathered inside the worker first, and then over the workers
(`WorkerReduction`): one sum for each worker goes over the network, and each replica gets a copy of its result. All
replicas of all workers get the same bits. Values of float16 and bfloat16 travel as float32, and their sum is rounded
once: a sum that each worker rounds would depend on how many replicas a worker has, and on the order of the workers.
With `set_ordered_sums` the values of all replicas travel as they are, and each worker adds them as one process does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from replica_engine.process import sums_are_ordered
from replica_engine.threads.merge_checks import Launches
from replica_engine.upstream import distribute, eager, worker_collectives
from replica_engine.upstream.distribute import QuietReduction, added, changed, is_narrow, total
from replica_engine.upstream.graphs import function_graphs
from replica_engine.workers import Program

if TYPE_CHECKING:  # jax is an extra
    from replica_engine.pjrt.worker_sums import WorkerSums


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
    arrays = [eager.view_as_array(tensor) for tensor in value.values]
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
    dtype, shape = tensors[0].dtype, eager.read_shape(tensors[0])
    if dtype not in _DTYPES or math.prod(shape) * dtype.size > MOST_BYTES:
        return False
    alike = all(tensor.dtype is dtype and eager.read_shape(tensor) == shape for tensor in tensors[1:])
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
    # A copy, which is added to in place; the arrays are the memory of tensors.
    result = np.array(arrays[0])
    for array in arrays[1:]:
        result += array
    return result


class OverWorkers:
    """Sums, gathers and the chief's values over the workers: at once, or whenever the graph under construction runs.

    The sum over the workers is a program of jaxlib (`pjrt.worker_sums`). In the graph of a `tf.function` a host op
    launches it. Each of these ops reads and writes one dummy variable, so TensorFlow runs them in the order of the
    program.

    Args:
        sums: the programs.
        launches: tells the other workers of each launch.
        device: the device of the results.
    """

    def __init__(self, sums: WorkerSums, launches: Launches, device: str):
        self._sums, self._launches, self._device = sums, launches, device

    def total(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of tensors of one dtype, in one launch.

        Raises:
            TypeError: they cannot be added.
        """
        described = self._describe(values)
        shapes = [value.shape for value in values]
        return self._run(described, lambda *given: self._sums.sums(given[:-1], given[-1]), values, shapes)

    def ordered_total(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """The same, for each of several values of this worker's replicas: as one process with all replicas adds them.

        The values of all replicas travel, in one launch.
        """
        described = self._describe([of_replica[0] for of_replica in values])
        own = [tf.stack(of_replica) for of_replica in values]
        shapes = [tf.TensorShape([None]).concatenate(each.shape[1:]) for each in own]
        gather = lambda *given: self._sums.gather_equal(given[:-1], given[-1])  # noqa: E731
        replicas = len(values[0]) * self._sums.workers
        return [added(tf.unstack(rows, replicas)) for rows in self._run(described, gather, own, shapes)]

    def _describe(self, values: Sequence[tf.Tensor]) -> tuple[Program, Callable[[], int]]:
        if values[0].dtype in (tf.bool, tf.string):
            raise TypeError(f"Tensors of {values[0].dtype.name} cannot be added.")
        operand: Any = values[0]
        if len(values) > 1:
            sizes = [value.shape.num_elements() for value in values]
            operand = tf.TensorSpec([None if None in sizes else sum(sizes)], operand.dtype)
        return self._launches.described("all_reduce", operand)

    def gathered(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        """The tensors of all workers, joined along an axis, along which their sizes may differ."""
        shape = value.shape
        if shape.rank is not None:
            if not -shape.rank <= axis < shape.rank:
                raise ValueError(f"A tensor of shape {shape} has no axis {axis}.")
            axis %= shape.rank
            shape = tf.TensorShape([None if index == axis else size for index, size in enumerate(shape)])
        gather = lambda given, call: [self._sums.gather(given, axis, call)]  # noqa: E731
        described = self._launches.described("all_gather", tf.TensorSpec(shape, value.dtype))
        (joined,) = self._run(described, gather, [value], [shape])
        return joined

    def broadcast_from_chief(self, value: tf.Tensor, program: Program | None = None) -> tf.Tensor:
        """The chief's tensor, bit by bit; a program may say what it is for."""
        described = (
            self._launches.described("broadcast", value) if program is None else self._launches.with_launch(program)
        )
        broadcast_from_chief = lambda given, call: [self._sums.broadcast_from_chief(given, call)]  # noqa: E731
        (chiefs,) = self._run(described, broadcast_from_chief, [value], [value.shape])
        return chiefs

    def _run(
        self,
        described: tuple[Program, Callable[[], int]],
        run: Callable[..., list[np.ndarray]],
        values: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape],
    ) -> list[tf.Tensor]:
        """The results of a function of arrays and of the call that all workers make; of eager tensors, at once."""
        from replica_engine.pjrt.worker_sums import WorkersCall

        program, launched = described
        with worker_collectives.made(), tf.device(self._device):
            number = worker_collectives.number(launched)
            if tf.executing_eagerly():
                results = run(
                    *[_array(eager.view_as_array(value)) for value in values], WorkersCall(program, int(number))
                )
                return [tf.convert_to_tensor(result) for result in results]
            return _in_graph(program, number, run, values, shapes)


def _in_graph(
    program: Program,
    number: tf.Tensor,
    run: Callable[..., list[np.ndarray]],
    values: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
) -> list[tf.Tensor]:
    from replica_engine.pjrt.worker_sums import WorkersCall

    def at_run(number: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        return run(*map(_array, arrays), WorkersCall(program, int(number)))

    function_graphs.leave_uncompiled()  # XLA cannot compile an op that calls Python
    token = _token()
    with eager.no_tape(), tf.control_dependencies([token.read_value()]):
        results = function_graphs.python_op(at_run, [number, *values], [value.dtype for value in values])
        with tf.control_dependencies(results):
            token.assign(True)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _array(value: Any) -> np.ndarray:
    """An array of what TensorFlow gives: bytes for a scalar string, which NumPy would take for one of that length."""
    return np.asarray(value, object) if isinstance(value, bytes) else np.asarray(value)


@functools.cache
def _token() -> tf.Variable:
    with tf.init_scope(), distribute.outside_scopes(), tf.device("CPU:0"):
        return tf.Variable(True, trainable=False, name="replica_engine_order")


class WorkerReduction(tf.distribute.CrossDeviceOps):
    """Reduces inside the worker, and then over the workers.

    Args:
        over_workers: what reduces over the workers.
        device: the device of sums.
        replicas: how many values of all workers a mean is over.
        workers: the number of workers.
    """

    def __init__(self, over_workers: OverWorkers, device: str, replicas: int, workers: int):
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
        """The hook of `reduce`; `options` have no meaning for it."""
        (result,) = self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)
        return result

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook of `batch_reduce`; the values of a batch go over the network together."""
        with tf.device(self._device):
            values = [value.values for value, _ in value_destination_pairs]
            if isinstance(values[0][0], tf.IndexedSlices):
                totals = [self._rows(_joined_rows(each)) for each in values]
            elif sums_are_ordered() and (values[0][0].dtype.is_floating or values[0][0].dtype.is_complex):
                totals = self._over_workers.ordered_total(values)
            else:
                totals = self._over_workers.total([_sum_in_worker(each) for each in values])
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                totals = [changed(total, lambda values: values / self._replicas) for total in totals]
            firsts = [value.values[0] for value, _ in value_destination_pairs]
            totals = [
                tf.cast(total, first.dtype) if is_narrow(first) else total
                for total, first in zip(totals, firsts, strict=True)
            ]
        destinations = [each for _, each in value_destination_pairs]
        return [self.broadcast(total, each) for total, each in zip(totals, destinations, strict=True)]

    def _rows(self, own: tf.IndexedSlices) -> tf.IndexedSlices:
        rows, indices = (self._over_workers.gathered(part, 0) for part in (own.values, own.indices))
        return tf.IndexedSlices(rows, indices, own.dense_shape)

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        """The hook of gathers: the rows of one worker follow those of the worker before."""
        with tf.device(self._device):
            own = tf.concat(per_replica_value.values, axis)
        return self.broadcast(self._over_workers.gathered(own, axis), destinations)


def _sum_in_worker(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of the replicas' values, on the current device. The sum of 16-bit floats is a float32."""
    return added(values) if len(values) > 1 or is_narrow(values[0]) else tf.convert_to_tensor(values[0])


def _joined_rows(values: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    rows, indices = (tf.concat([getattr(value, name) for value in values], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(rows, indices, values[0].dense_shape)
