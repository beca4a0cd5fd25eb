"""Reductions and gathers of several workers with CPU devices: inside the worker first, and then over the workers.

The replicas of a worker share one memory. So their values are added there, one sum for each worker goes over the
network, and each replica gets a copy of its result. All replicas of all workers get the same bits.

The sum over the workers is a program of jaxlib (`pjrt.worker_sums`). In the graph of a `tf.function` a host op launches
it. A variable without meaning, which each of these ops takes and writes, keeps them in the order of the program.

Values of float16 and bfloat16 travel as float32, and their sum is rounded once: a sum that each worker rounds would
depend on how many replicas a worker has, and on the order of the workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import collectives, distribute, eager, variables
from replica_engine._tf.graphs import function
from replica_engine._tf.graphs.python_ops import python_op
from replica_engine._tf.reduction import added, changed, is_narrow
from replica_engine.hosts import Program
from replica_engine.strategies.multi_worker.launches import Launches

if TYPE_CHECKING:  # jax is an extra
    from replica_engine.pjrt.worker_sums import WorkerSums


class OverWorkers:
    """Sums, gathers and the chief's values over the workers: at once, or whenever the graph under construction runs.

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
        if values[0].dtype in (tf.bool, tf.string):
            raise TypeError(f"Tensors of {values[0].dtype.name} cannot be added.")
        operand: Any = values[0]
        if len(values) > 1:
            sizes = [value.shape.num_elements() for value in values]
            operand = tf.TensorSpec([None if None in sizes else sum(sizes)], operand.dtype)
        shapes = [value.shape for value in values]
        described = self._launches.described("all_reduce", operand)
        return self._run(described, lambda *given: self._sums.sums(given[:-1], given[-1]), values, shapes)

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

    def of_chief(self, value: tf.Tensor, program: Program | None = None) -> tf.Tensor:
        """The chief's tensor, bit by bit; a program may say what it is for."""
        described = self._launches.described("broadcast", value) if program is None else self._launches.of(program)
        of_chief = lambda given, call: [self._sums.of_chief(given, call)]  # noqa: E731
        (chiefs,) = self._run(described, of_chief, [value], [value.shape])
        return chiefs

    def _run(
        self,
        described: tuple[Program, Callable[[], int]],
        run: Callable[..., list[np.ndarray]],
        values: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape],
    ) -> list[tf.Tensor]:
        """The results of a function of arrays and of the call that all workers make; of eager tensors, at once."""
        from replica_engine.pjrt.worker_sums import Call

        program, launched = described
        with collectives.made(), tf.device(self._device):
            number = collectives.number(launched)
            if tf.executing_eagerly():
                results = run(*[_array(eager.array_of(value)) for value in values], Call(program, int(number)))
                return [tf.convert_to_tensor(result) for result in results]
            return _in_graph(program, number, run, values, shapes)


def _in_graph(
    program: Program,
    number: tf.Tensor,
    run: Callable[..., list[np.ndarray]],
    values: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
) -> list[tf.Tensor]:
    from replica_engine.pjrt.worker_sums import Call

    def at_run(number: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        return run(*map(_array, arrays), Call(program, int(number)))

    function.leave_uncompiled()  # XLA cannot compile an op that calls Python
    token = _token()
    with variables.no_tape(), tf.control_dependencies([token.read_value()]):
        results = python_op(at_run, [number, *values], [value.dtype for value in values])
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
            own = [_sum(value.values) for value, _ in value_destination_pairs]
            if isinstance(own[0], tf.IndexedSlices):
                totals = [self._rows(value) for value in own]
            else:
                totals = self._over_workers.total(own)
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


def _sum(values: Sequence[Any]) -> Any:
    """The sum of the replicas' values, on the current device. The sum of 16-bit floats is a float32."""
    if not isinstance(values[0], tf.IndexedSlices):
        return added(values) if len(values) > 1 or is_narrow(values[0]) else tf.convert_to_tensor(values[0])
    rows, indices = (tf.concat([getattr(value, name) for value in values], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(rows, indices, values[0].dense_shape)
