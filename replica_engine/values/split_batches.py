"""Batches of custom training loops: split evenly over replicas, or computed in several parts.

`split_batch` splits batches of any size evenly, with weights that exclude the padding. A compiled program needs the
same shapes on all replicas, but 13 samples on 4 replicas make shares of 4, 3, 3 and 3. So the batch is padded to 16
rows with copies of its last sample, and each row gets a weight: 1/13 for a sample, 0 for a copy. A loss that sums the
rows' losses times the weights, summed over replicas, is the mean over the 13 samples. The gradients of this loss,
summed over replicas, are the gradients of the mean.

`accumulate` computes one replica's batch in several parts, one after the other. A step that computes its gradients in k
micro-batches needs the memory of one of them, and one all-reduce for all. The parts run in a loop of the graph, so the
graph does not grow with k. The function of a part must not meet other replicas: the loop belongs to one replica, and
sizes may differ between replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.errors import BatchError, ReplicaValueError
from replica_engine.errors.base import as_int, brief, positive_int
from replica_engine.upstream.graphs import autograph
from replica_engine.values import samples, structure
from replica_engine.values.regroup import parts, regroup


def split_batch(
    strategy: tf.distribute.Strategy, batch: object, batch_size: int | None = None
) -> tuple[Any, tf.distribute.DistributedValues]:
    """Splits a batch over the replicas of a strategy, also if its size is not divisible by N, less than N, or 0.

    Args:
        strategy: the strategy whose N replicas will process the batch.
        batch: a structure of arrays or tensors whose first dimension is the samples; None stays None.
        batch_size: the number of samples of the largest batch. A smaller batch, such as the last one of a dataset, is
            padded to the same shapes, so that the same compiled program can run it. None pads only to the next multiple
            of N.

    Returns:
        The shares and the weights, both for the `args` of `strategy.run`. The shares have equal numbers of rows, in the
        order of the samples. The weights are a float32 vector per replica: 1 / n for each of the n samples, 0 for
        padding.

    Raises:
        BatchError: arrays have different lengths, the batch has no array, or it has more than `batch_size` samples.
        ReplicaValueError: a leaf cannot become a tensor, or `batch_size` is not a number of samples.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> shares, weights = replica_engine.split_batch(strategy, tf.constant([1.0, 2.0, 6.0]))
        >>> def mean(x, weights):
        ...     return tf.reduce_sum(x * weights)
        >>> means = strategy.run(mean, args=(shares, weights))
        >>> float(strategy.reduce("SUM", means, axis=None))
        3.0
    """
    _check_strategy(strategy)
    batch_size = _number("batch_size", batch_size)
    batch = samples.as_tensors(batch)
    total = samples.count(batch)
    if batch_size is not None and total > batch_size:
        raise BatchError(f"The batch has {total} samples, more than the batch_size={batch_size} that was given.")
    replicas = strategy.num_replicas_in_sync
    size = max(1, -(-(batch_size or total) // replicas))
    padded = samples.pad(batch if total else samples.blank(batch), size * replicas - max(1, total))
    weights = tf.cast(tf.range(size * replicas) < total, tf.float32) / max(total, 1)
    devices = strategy.extended.worker_devices
    shares = []
    for replica in range(replicas):
        with tf.device(devices[replica]):
            shares.append(samples.on_device(samples.take((padded, weights), replica * size, (replica + 1) * size)))
    return regroup(shares)


def join_outputs(strategy: tf.distribute.Strategy, outputs: object, count: int | None = None) -> Any:
    """Joins the outputs of the replicas for their shares to one batch, in the order of the samples.

    Args:
        strategy: the strategy whose replicas processed the shares.
        outputs: the result of `strategy.run`: for each replica a structure of tensors, with one row per row of its
            share.
        count: the number of samples of the batch; rows after it are padding and are dropped. None keeps all rows.

    Returns:
        The structure with the rows of all replicas.

    Raises:
        StructureMismatchError: the replicas returned different structures.
        ReplicaValueError: an output has no rows, or `count` is not a number of rows.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> shares, _ = replica_engine.split_batch(strategy, tf.constant([1.0, 2.0, 6.0]))
        >>> doubled = strategy.run(lambda x: 2 * x, args=(shares,))
        >>> replica_engine.join_outputs(strategy, doubled, 3).numpy().tolist()
        [2.0, 4.0, 12.0]
    """
    _check_strategy(strategy)
    count = _number("count", count)
    joined = samples.join(parts(outputs, strategy.num_replicas_in_sync, "outputs"))
    return joined if count is None else samples.take(joined, 0, count)


def _check_strategy(strategy: object) -> None:
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ReplicaValueError.no_strategy(strategy)


def _number(name: str, value: Any) -> samples.Rows | None:
    """Checks a number of rows: an int, an integer of NumPy or TensorFlow, or an integer tensor of a graph."""
    is_symbolic = isinstance(value, tf.Tensor) and not isinstance(value, tf.__internal__.EagerTensor)
    if value is None or (is_symbolic and value.dtype.is_integer and value.shape.rank in (0, None)):
        return value
    number = as_int(value)
    if number is None or number < 0 or isinstance(value, bool):
        raise ReplicaValueError.bad_rows(name, value)
    return number


Sums = list[tf.Tensor | None]
"""The flat results of a part, or of several parts together."""
REDUCTIONS = ("mean", "sum")


@autograph.artifact
def accumulate(fn: Callable[..., object], batch: Sequence[object], steps: int, reduction: str = "mean") -> Any:
    """Calls a function on `steps` parts of a batch, one after the other, and combines the results.

    Call it in a replica, around the code that computes gradients, and reduce or apply the result: gradients then travel
    between replicas once for the whole batch. It works in eager code, in a `tf.function` and in a compiled program,
    under every strategy and under none.

    Args:
        fn: called as `fn(*parts)` with the same rows of each element of `batch`. It must not contain sync points (an
            all-reduce, an optimizer's `apply`); it may update metrics and other variables that replicas keep
            separately.
        batch: the arguments, such as `(x, y)`: structures of tensors whose first dimension is the samples. None and
            scalars are passed on as they are.
        steps: the number k of parts. A part has n / k of the n rows, rounded up; the last one may have fewer. A batch
            of fewer rows than k has as many parts as rows.
        reduction: "mean" if `fn` returns means over the rows that it is given: the result is the mean over the rows of
            the batch, also if the last part is smaller. "sum" adds up the results, for sums over rows.

    Returns:
        The structure that `fn` returns, with the combined tensors. None counts as zero; what is None for all parts
        stays None. Gradients of tables (`tf.IndexedSlices`) become dense.

    Raises:
        ReplicaValueError: an argument is invalid, or the function returns a value that cannot be averaged,
            or, in a graph, None for the first part alone.
        BatchError: arrays have different lengths, or the batch has no array.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> with strategy.scope():
        ...     weight = tf.Variable(0.0)
        >>> def gradient(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((weight * x - y) ** 2)
        ...     return tape.gradient(loss, weight), loss
        >>> def step(x, y):
        ...     of_batch, loss = replica_engine.accumulate(gradient, (x, y), steps=4)
        ...     weight.assign_sub(0.1 * tf.distribute.get_replica_context().all_reduce("MEAN", of_batch))
        ...     return loss
        >>> x = tf.constant([1.0, 2.0, 3.0, 4.0])
        >>> losses = strategy.run(step, args=(x, 3.0 * x))
        >>> round(float(weight.numpy()), 4)  # 0.1 * 6 * mean(x ** 2)
        4.5
    """
    if not callable(fn):
        raise ReplicaValueError.no_function(fn)
    if not isinstance(batch, (list, tuple)):
        raise ReplicaValueError.no_positional(batch, "batch")
    number = positive_int(steps)
    if number is None:
        raise ReplicaValueError(
            f"steps, the number of parts that a batch is computed in, must be a positive int; got {brief(steps)}."
        )
    if reduction not in REDUCTIONS:
        raise ReplicaValueError(
            f'Results of the parts of a batch are combined with "mean" or "sum"; got {brief(reduction)}.'
        )
    return _Parts(fn, tuple(samples.as_tensors(tuple(batch))), number, reduction == "mean").combined()


class _Parts:
    """The parts of one batch."""

    def __init__(self, fn: Callable[..., object], batch: tuple[object, ...], steps: int, is_mean: bool):
        self._fn = fn if tf.executing_eagerly() else autograph.convert(fn)
        self._batch = batch
        self._is_mean = is_mean
        self._rows = _count(batch)
        at_least_one = max if isinstance(self._rows, int) else tf.maximum
        self._size = at_least_one(-(-self._rows // steps), 1)
        self._structure: object = None

    def combined(self) -> Any:
        """The combined results of all parts."""
        rows, size = self._rows, self._size
        whole, rest = rows // size, rows % size
        known = isinstance(rows, int)
        # The first part comes before the loop: it may create variables, and it shows what the function returns.
        totals = self._compute_rows(0, min(size, rows) if known else tf.minimum(size, rows))
        if tf.executing_eagerly():
            for index in range(1, whole):
                totals = _sums(totals, self._compute_rows(index * size, size))
        elif not known or whole > 1:
            totals = self._loop(totals, whole)
        if not known:
            totals = self._with_rest(totals, whole * size, rest)
        elif whole and rest:
            with tf.control_dependencies(_tensors(totals)):  # memory for one part at a time
                totals = _sums(totals, self._compute_rows(whole * size, rest))
        return tf.nest.pack_sequence_as(self._structure, totals)

    def _loop(self, totals: Sums, whole: samples.Rows) -> Sums:
        """Adds the results of the second to the last whole part, in a loop of the graph."""

        def body(index: tf.Tensor, *sums: tf.Tensor) -> tuple:
            return index + 1, *self._added(_filled(totals, sums), index * self._size, self._size)

        begin = [tf.constant(1), *_tensors(totals)]
        # One iteration at a time, with memory for one part.
        _, *sums = tf.while_loop(lambda index, *_: index < whole, body, begin, parallel_iterations=1)
        return _filled(totals, sums)

    def _with_rest(self, totals: Sums, start: samples.Rows, rest: samples.Rows) -> Sums:
        """Adds the results of the last rows if there are any; their number is not known while the graph is built."""
        tensors = _tensors(totals)
        sums = tf.cond(rest > 0, lambda: self._added(totals, start, rest), lambda: list(map(tf.identity, tensors)))
        return _filled(totals, sums)

    def _added(self, totals: Sums, start: samples.Rows, size: samples.Rows) -> list[tf.Tensor]:
        """The sums with one more part, in a loop or branch of the graph: as many tensors as there were."""
        more = self._compute_rows(start, size)
        if any(total is None and each is not None for total, each in zip(totals, more, strict=True)):
            raise ReplicaValueError(
                "A result of the function for `accumulate` is None for the first part of the batch, and a tensor "
                "for a later one. The parts of a graph return the same: return zeros for None. For gradients, "
                "write tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)."
            )
        return _tensors(_sums(totals, more))

    def _compute_rows(self, start: samples.Rows, size: samples.Rows) -> Sums:
        """The flat results for the rows from `start` on, weighted by how many they are."""
        found = self._fn(*tf.nest.map_structure(lambda leaf: _cut_rows(leaf, start, size), self._batch))
        if self._structure is None:
            self._structure = found
        else:
            tf.nest.assert_same_structure(self._structure, found)
        return [self._weighted(leaf, size) for leaf in tf.nest.flatten(found)]

    def _weighted(self, leaf: object, size: samples.Rows) -> tf.Tensor | None:
        if leaf is None:
            return None
        tensor = structure.as_tensor(leaf, "A result of the function for `accumulate`")
        if not self._is_mean:
            return tensor
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise ReplicaValueError(
                f"A result of a part of the batch is {tensor.dtype.name}, and only floating numbers are averaged. "
                'Cast it, tf.cast(x, tf.float32), or add the results up: accumulate(..., reduction="sum").'
            )
        if isinstance(self._rows, int):
            return tensor * tf.cast(size / max(self._rows, 1), tensor.dtype)
        weight = tf.cast(size, tf.float64) / tf.cast(tf.maximum(self._rows, 1), tf.float64)
        return tensor * tf.cast(weight, tensor.dtype)


def _count(batch: tuple[object, ...]) -> samples.Rows:
    """The number of rows of a batch: an int if it is known while a graph is built, otherwise a tensor."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if samples.has_rows(leaf)]
    is_known = all(isinstance(leaf, tf.Tensor) and leaf.shape[0] is not None for leaf in leaves)
    return samples.count(batch) if is_known or tf.executing_eagerly() else samples.count_in_graph(batch)


def _sums(totals: Sums, more: Sums) -> Sums:
    """Adds up; None, such as the gradient of what one part does not use, counts as zero beside a tensor."""
    pairs = zip(totals, more, strict=True)
    return [each if total is None else total if each is None else total + each for total, each in pairs]


def _tensors(totals: Sums) -> list[tf.Tensor]:
    return [each for each in totals if each is not None]


def _filled(totals: Sums, tensors: Sequence[tf.Tensor]) -> Sums:
    """The list with other tensors in place of its own; None stays None."""
    left = iter(tensors)
    return [None if each is None else next(left) for each in totals]


def _cut_rows(leaf: object, start: samples.Rows, size: samples.Rows) -> object:
    """Some rows of a leaf, cut so that XLA knows the shape of a part where it knows the shape of the whole."""
    if not samples.has_rows(leaf):
        return leaf
    if not isinstance(leaf, tf.Tensor):
        return samples.take(leaf, start, start + size)
    inner = leaf.shape[1:]
    sizes = list(inner) if inner.is_fully_defined() else tf.unstack(tf.shape(leaf)[1:])
    return tf.slice(leaf, [start, *[0] * len(inner)], [size, *sizes])
