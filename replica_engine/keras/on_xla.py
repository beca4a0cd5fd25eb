"""The steps of a model, compiled by XLA: one program per batch size, because shard sizes are known while tracing.

A program has the same shapes on all replicas, but the shards of 13 samples on 4 replicas have 4, 3, 3 and 3 samples. So
each replica gets 4 rows and takes one of two branches, which differ in how many of the rows they read. Each branch
computes exactly the samples of its shard. Every collective comes after the branches. Some steps have a collective in
the middle: a synchronized batch normalization, a mask, or the model's own `train_step`, which may continue after its
update. Such steps cannot be divided, so every replica computes the whole batch. The same happens if both branches would
return gradients of an unknown number of table rows, since XLA needs equal shapes in both; and if the model works with
strings or lookup tables, which the host does outside of branches only.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from replica_engine import xla
from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.errors import CollectiveError, ReplicaEngineError
from replica_engine.errors.base import warning
from replica_engine.keras.compiling import compiling, layers_named, name_sparse_inputs
from replica_engine.keras.shard import Shard, Update
from replica_engine.keras.steps import Logs, Undivided, across_replicas, follow, joined, run_step
from replica_engine.keras.sums import NotASum
from replica_engine.strategies.multi_step import MultiStepContext
from replica_engine.strategies.tpu.device_loops import LoopSettings
from replica_engine.values import rows, samples
from replica_engine.values.regroup import regroup, select
from replica_engine.xla.body import apart
from replica_engine.xla.soft_placement.kinds import string_work

MANY_SIZES = 8
"""A warning is logged when programs for this many batch sizes of one step exist."""

_WASTE = 4
"""A prediction may use an existing program whose batch size is up to this many times as large."""

_logger = logging.getLogger("replica_engine")
Step = Callable[[str, Any, int], Any]
"""A step of `OnXla`: it takes the name of the model's method, the samples, and the size of the batch."""
Parts: TypeAlias = "tf.Tensor | list[tf.IndexedSlices]"
"""A gradient; that of a table in parts, one for each lookup."""
_as_keras_does = tf.autograph.experimental.do_not_convert


class OnXla:
    """Runs the steps of a model on a `TPUStrategy`.

    Args:
        model: the model.
        strategy: the strategy.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self._model = model
        self._strategy = strategy
        self._size = strategy.num_replicas_in_sync
        first, own = strategy.extended.device_group.first, strategy.extended.device_group.size
        self._own = range(first, first + own)  # the replicas of this process
        # Replicas take different branches in a step of unequal shares. In a branch, devices of several replicas must
        # not wait for each other, but they do where XLA divides a replica over devices.
        several = self._size > 1 and strategy.extended.device_group.mesh is not None
        self._undivided = {"train_step", "test_step"} if several else set()
        self._whole = Undivided(model)
        self._predicted: set[tuple[str, int]] = set()
        self._gives: dict[str, bool] = {}
        self._compiled: set[tuple[str, str, int, str]] = set()
        self._functions: dict[tuple[str, str, int, bool], Callable[..., object]] = {}
        if strategy.extended.backend.distribution is not None:
            strategy.extended.backend.distribution.check_layouts()
        self._programs = strategy.extended.backend.own_programs()  # they hold the model and are freed with it

    def step(self, name: str, batches: Sequence[tuple[object, int]]) -> dict[str, tf.Tensor]:
        """Runs `train_step` or `test_step` on batches of at least one sample, each with its number of samples.

        Consecutive batches of one size, as `steps_per_execution` requests them, run in one launch: a device loop.

        Returns:
            The logs of the last batch.
        """
        logs: object = None
        try:
            for step, data, size, group in self._launches(name, batches):
                try:
                    logs = self._run(step, name, data, size)
                    continue
                except NotASum as found:
                    self._whole.note(name, found)
                except CollectiveError:
                    if step != self._step_of_unequal_shares:
                        raise
                    self._undivided.add(name)
                for batch, total in group:
                    logs = self._run(self._step_of_whole_batch, name, batch, total)
        except ReplicaEngineError as error:
            name_sparse_inputs(error, batches[0][0])
            raise
        return select(0, logs)

    def _launches(
        self, name: str, batches: Sequence[tuple[object, int]]
    ) -> Iterator[tuple[Step, object, int, list[tuple[object, int]]]]:
        """For each launch: one of the steps below, what it takes, its batch size, and the batches that it computes."""
        for total, same in itertools.groupby(batches, operator.itemgetter(1)):
            group = list(same)
            divides = total % self._size == 0
            if len(group) > 1 and divides and name not in self._whole:
                yield self._loop, [self._shares(data, total) for data, _ in group], total, group
                continue
            for data, _ in group:
                own = [(data, total)]
                if name in self._whole or not (divides or self._has_unequal_shares(name, total)):
                    yield self._step_of_whole_batch, data, total, own
                elif divides:
                    yield self._step, self._shares(data, total), total, own
                else:
                    # One program serves all totals between two multiples of N: the number of larger shards is an input.
                    shares = self._shares(data, total), np.int32(total)
                    yield self._step_of_unequal_shares, shares, total // self._size, own

    def _has_unequal_shares(self, name: str, total: int) -> bool:
        is_divisible = name != "train_step" or keras_trainer.has_keras_step(self._model, name)
        return total > self._size and name not in self._undivided and is_divisible

    def predict(self, batch: object, total: int) -> object:
        """The outputs for a batch of so many samples, of at least one, in the order of the samples."""
        try:
            return self._outputs(batch, total)
        except ReplicaEngineError as error:
            name_sparse_inputs(error, batch)
            raise

    def _outputs(self, batch: object, total: int) -> object:
        data = samples.views(batch)
        kind = samples.described(data)
        known = [size for before, size in self._predicted if before == kind and total <= size <= _WASTE * total]
        size = min(known, default=-(-total // self._size) * self._size)
        if "predict_step" not in self._undivided:
            shares = self._shares(samples.pad(data, size - total), size)
            outputs = self._run(self._predict_step, "predict_step", shares, size)
            self._predicted.add((kind, size))
            if samples.are_of(select(0, outputs), size // self._size) and self._gives_rows(kind, data, total, outputs):
                return samples.take(joined(self._strategy, outputs), 0, total)
            self._undivided.add("predict_step")  # the outputs have no row per sample
        return select(0, self._run(self._predict_step, "predict_step", data, total))

    def _gives_rows(self, kind: str, data: object, total: int, outputs: object) -> bool:
        """Whether outputs that are as long as a shard have a row per sample: those of a longer shard are longer."""
        if kind not in self._gives:
            self._gives[kind] = keras_model.gives_rows(self._model) or self._grows(data, total, select(0, outputs))
        return self._gives[kind]

    def _grows(self, data: object, total: int, outputs: object) -> bool:
        rows = -(-total // self._size) + 1
        longer = self._shares(samples.pad(data, rows * self._size - total), rows * self._size)
        args = ("predict_step", longer, rows * self._size)
        specs = self._strategy.extended.backend.result_specs(self._programs, self._predict_step, args)
        leaves = [tf.nest.flatten(leaf, expand_composites=True) for leaf in tf.nest.flatten(outputs)]
        if len(specs) != sum(map(len, leaves)):
            return False  # a variable is among them
        left = iter(specs)
        of_leaves = [[next(left) for _ in parts] for parts in leaves]
        # Ragged and sparse outputs, of several parts, have told their numbers of rows.
        return all(spec.shape.rank and spec.shape[0] == rows for spec, *more in of_leaves if not more)

    def _run(self, step: Step, name: str, data: object, size: int) -> Any:
        """Runs one of the steps below on all replicas; `size` is the batch size for which the program is compiled."""
        if type(data) is tuple:  # a batch like the last one, of dense tensors, is found again by its objects
            function = self._functions.get((step.__name__, name, size, True))
            backend = self._strategy.extended.backend
            known = None if function is None else backend.run_again(function, data, self._programs)
            if known is not None:
                return known[0]
        run: Step = step if step == self._loop else functools.partial(self._launch, step)
        key = (step.__name__, name, size, samples.described(select(0, data)))
        if key in self._compiled:
            return run(name, data, size)
        before = xla.counts()

        def was_read() -> bool:
            made = xla.counts() - before
            return made.cache_hits > 0 and made.compiles == 0

        with compiling(self._what(name, step, size), was_read), layers_named(self._model):
            outputs = run(name, data, size)
        self._compiled.add(key)
        self._tell_of_many(name)
        return outputs

    def _what(self, name: str, step: Step, size: int) -> str:
        first = last = size
        if step == self._step_of_unequal_shares:
            first, last = size * self._size + 1, (size + 1) * self._size - 1
        sizes = f"{first}" if first == last else f"{first} to {last}"
        return f"{name} of {self._model.name!r} for {self._size} replicas, batches of {sizes} samples"

    def _tell_of_many(self, name: str) -> None:
        sizes = sum(name in key for key in self._compiled)
        if sizes == MANY_SIZES:
            text = (
                f"{name} of {self._model.name!r} has been compiled for {sizes} batch sizes, once for each size. "
                "Batches of one size compile once. replicate_model(model, "
                "strategy=replica_engine.MirroredStrategy(...)) has one graph for all sizes."
            )
            _logger.warning(warning("many_batch_sizes", text))

    def _launch(self, step: Step, name: str, data: object, size: int) -> object:
        key = (step.__name__, name, size, type(data) is tuple)
        if key not in self._functions:  # one function for all batches: `run_again` knows it by the objects that it uses
            self._functions[key] = self._function(*key)
        args = data if type(data) is tuple else (data,)
        return self._strategy.extended.backend.run(self._functions[key], args, programs=self._programs)

    def _function(self, step: str, name: str, size: int, in_parts: bool) -> Callable[..., object]:
        """A step under the name of the model's method that it runs, as messages about its program call it."""

        @_as_keras_does
        def run(*data: object) -> object:
            return getattr(self, step)(name, data if in_parts else data[0], size)

        run.__name__ = name
        return run

    def _loop(self, name: str, data: list[object], total: int) -> object:
        """Runs several steps in one launch."""

        @_as_keras_does
        def step(context: MultiStepContext, shares: object) -> None:
            context.set_last_step_output("logs", self._step(name, shares, total))

        step.__name__ = name
        settings = LoopSettings(len(data), spread=False, programs=self._programs)
        context = self._strategy.extended.backend.run_steps(step, iter(data), settings)
        return context.last_step_outputs["logs"]

    def _shares(self, data: object, total: int) -> object:
        """Each replica's rows, equally many for all; a smaller shard also gets the row before its first."""
        if total % self._size == 0:
            parts = samples.split(data, self._size)
            return regroup([parts[replica] for replica in self._own])
        data = samples.views(data)
        size = -(-total // self._size)
        larger = total - (size - 1) * self._size  # the number of shards with `size` rows
        stops = [replica * (size - 1) + min(replica, larger) for replica in range(1, self._size + 1)]
        return regroup([samples.take(data, stops[replica] - size, stops[replica]) for replica in self._own])

    @_as_keras_does
    def _step(self, name: str, data: object, total: int) -> dict[str, tf.Tensor]:
        return run_step(self._model, name, data, Shard(total // self._size, total, self._size))

    @_as_keras_does
    def _step_of_whole_batch(self, name: str, data: object, total: int) -> dict[str, tf.Tensor]:
        return run_step(self._model, name, data, Shard(total, total, self._size, whole=True))

    @_as_keras_does
    def _step_of_unequal_shares(self, name: str, data: tuple[object, tf.Tensor], size: int) -> dict[str, tf.Tensor]:
        shares, total = data
        larger = _Branch(self._model, name, shares, Shard(size + 1, total, self._size))
        smaller = _Branch(self._model, name, shares, Shard(size, total, self._size), larger)
        is_larger = xla.replica_id() < total % self._size
        logs = larger.finish(tf.cond(is_larger, larger.run, smaller.run), smaller)
        weight = tf.where(is_larger, larger.share.weight("float64"), smaller.share.weight("float64"))
        return across_replicas(self._model, logs, weight)

    @_as_keras_does
    def _predict_step(self, name: str, data: object, total: int) -> object:
        return getattr(self._model, name)(data)


class _Branch:
    """A step on a shard, up to the first collective; `finish` does the update of weights.

    Args:
        model: the model whose step it is.
        name: the name of the step.
        data: rows; the last ones are the shard.
        share: the shard.
        larger: the branch of the larger shard, which is traced first; None if this is that branch.
    """

    def __init__(self, model: keras.Model, name: str, data: object, share: Shard, larger: _Branch | None = None):
        self.share = share
        self._model, self._name = model, name
        self._data = data
        self._larger = larger

    def run(self) -> tuple[dict[str, tf.Tensor], list[object]]:
        """Traces the step; returns its logs and the gradients of its update, if it has one."""
        data = samples.take(self._data, samples.count_in_graph(self._data) - self.share.rows, None)
        deferred: list[Update] = []
        self.share.deferred = deferred
        self.share.results.clear()
        follow(self._model, self._name, data, self.share)
        with self.share.entered(), apart():
            self._logs = Logs(getattr(self._model, self._name)(data), self.share)
        if len(deferred) > 1:
            raise CollectiveError.apart("A second update of weights")
        if string_work(tf.compat.v1.get_default_graph().get_operations()) is not None:
            raise CollectiveError.apart("Work with strings or a lookup table")
        self._update = deferred[0] if deferred else None
        grads = self._update[1] if self._update is not None else []
        if any(isinstance(grad, tf.IndexedSlices) and grad.indices.shape[0] is None for grad in grads):
            # Text lookup: both branches must return equally many rows, but the number is unknown while tracing.
            raise CollectiveError.apart("A gradient of an unknown number of rows of a table")
        self._grads = [rows.pieces(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
        if self._larger is not None:
            self._grads = [_like(grad, wanted) for grad, wanted in zip(self._grads, self._larger._grads, strict=True)]
        return self._logs.values, [_tensors(grad) for grad in self._grads if grad is not None]

    def finish(self, outputs: tuple[dict[str, tf.Tensor], list[object]], smaller: _Branch) -> Logs:
        """Does the update with the gradients of the branch that ran; returns the logs."""
        self._logs.values, gradients = outputs
        if self._update is not None:
            apply, _, variables = self._update
            left = iter(gradients)
            grads = [
                None if grad is None else _gradient(next(left), grad, other, variable)
                for grad, other, variable in zip(self._grads, smaller._grads, variables, strict=True)
            ]
            apply(grads, variables)
        return self._logs


def _tensors(grad: Parts) -> tf.Tensor | list[list[tf.Tensor]]:
    return [[part.values, part.indices] for part in grad] if isinstance(grad, list) else tf.convert_to_tensor(grad)


def _gradient(
    tensors: tf.Tensor | list[list[tf.Tensor]], like: Parts, other: Parts, variable: keras.Variable
) -> tf.Tensor | tf.IndexedSlices:
    """The gradient of the branch that ran; `like` and `other` are those of both branches."""
    if not isinstance(like, list):
        return tensors
    parts = []
    for (values, indices), one, two in zip(tensors, like, other, strict=True):
        if rows.origin(one.indices) is not None and rows.origin(two.indices) is not None:
            rows.mark(indices)
        shape = tf.constant(tuple(variable.shape), indices.dtype)
        parts.append(tf.IndexedSlices(values, indices, dense_shape=shape))
    return rows.joined(parts)


def _like(grad: Parts, wanted: Parts) -> Parts:
    """Pads a gradient to the shape of `wanted`: repeats one table row with zeros as its values."""
    if isinstance(grad, list):
        return [_like(part, other) for part, other in zip(grad, wanted, strict=True)]
    if not isinstance(grad, tf.IndexedSlices) or isinstance(wanted, list):
        return grad
    if (more := wanted.indices.shape[0] - grad.indices.shape[0]) == 0:
        return grad
    indices = tf.concat([grad.indices, tf.repeat(grad.indices[:1], more)], 0)
    values = tf.concat([grad.values, tf.zeros([more, *grad.values.shape[1:]], grad.values.dtype)], 0)
    return tf.IndexedSlices(values, indices, grad.dense_shape)
