"""The steps of a model on replica threads: the graph of the step takes any batch, and each replica takes its shard."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.keras.compiling import compiling
from replica_engine.keras.hooks import has_own_metrics
from replica_engine.keras.shard import Shard
from replica_engine.keras.steps import Undivided, joined, run_step
from replica_engine.keras.sums import NotASum
from replica_engine.keras.variables import kept_if
from replica_engine.values import samples
from replica_engine.values.regroup import select

_NOTHING = contextlib.nullcontext()


class OnThreads:
    """Runs the steps of a model on a strategy with threads.

    Args:
        model: the model.
        strategy: the strategy.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self._model = model
        self._strategy = strategy
        self._size = strategy.num_replicas_in_sync
        self._is_eager = bool(model.run_eagerly)
        self._functions: dict[tuple[str, str], tf.types.experimental.PolymorphicFunction] = {}
        # What was traced: a function, the method of the model, and what batches are like but for their length.
        self._traced: set[tuple[str, str, str, object]] = set()
        self._is_undivided = False
        self._whole_steps = Undivided(model)
        self._tried: set[str] = set()

    def step(self, name: str, batches: Sequence[tuple[object, int]]) -> dict[str, tf.Tensor]:
        """Runs `train_step` or `test_step` on batches of at least one sample, each with its number of samples.

        Returns:
            The logs of the last batch.
        """
        logs: dict[str, tf.Tensor] = {}
        for batch, total in batches:
            # An eager step cannot be given up when one of its metrics turns out not to be a sum.
            is_whole = name in self._whole_steps or (self._is_eager and has_own_metrics(self._model))
            if total >= self._size and not is_whole:
                try:
                    with self._undone_if_given_up(name) if self._is_eager else _NOTHING:
                        logs = self._run(self._shared, name, batch)
                    continue
                except NotASum as found:
                    self._whole_steps.note(name, found)
            logs = self._run(self._whole, name, batch)
        return logs

    def _undone_if_given_up(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around an eager step that may be given up: it has changed variables then, which its graph has not.

        Keras' own steps do in each call what they did in the first one; a step of the user's own may begin to clip.
        """
        is_known = name in self._tried and keras_trainer.has_keras_step(self._model, name)
        self._tried.add(name)
        return _NOTHING if is_known else kept_if(NotASum, self._model)

    def predict(self, batch: object, total: int) -> object:
        """The outputs for a batch of so many samples, of at least one, in the order of the samples."""
        # An eager step does not tell an output with a row per sample from another one of that length.
        if not self._is_undivided and (not self._is_eager or keras_model.gives_rows(self._model)):
            outputs, are_of_rows = self._run(self._predict, "predict_step", batch)
            if are_of_rows:
                return outputs
            self._is_undivided = True  # the outputs have no row per sample
        return self._run(self._predict_whole, "predict_step", batch)

    def _run(self, function: Callable[[str, object], object], name: str, batch: object) -> Any:
        """Runs one of the functions below: its graph for batches of this kind, unless the model runs eagerly."""
        if self._is_eager:
            return function(name, batch)
        described = samples.described(batch)
        kind = (function.__name__, name, described, samples.places(batch))
        if kind in self._traced:
            return self._functions[kind[:2]](batch)
        if kind[:2] not in self._functions:
            named: Any = functools.partial(function, name)
            named.__name__ = name  # as the watchdog calls it
            self._functions[kind[:2]] = tf.function(named, reduce_retracing=True, autograph=False)
        graph = self._functions[kind[:2]]
        what = f"{name} of {self._model.name!r} for {self._size} replicas, batches of {described}"
        with compiling(what, only_traced=True):
            # The graph takes any number of samples, so the last batch of a dataset needs no other graph.
            graph.get_concrete_function(samples.generalized(batch))
            outputs = graph(batch)
        self._traced.add(kind)
        return outputs

    def _shared(self, name: str, batch: object) -> dict[str, tf.Tensor]:
        total = samples.count_in_graph(batch)
        each, more = total // self._size, total % self._size  # the first `more` replicas get one sample more

        def step(data: object) -> dict[str, tf.Tensor]:
            replica = _replica()
            size = each + tf.cast(replica < more, tf.int32)
            start = replica * each + tf.minimum(replica, more)
            shard = samples.on_device(samples.take(data, start, start + size))
            return run_step(self._model, name, shard, Shard(size, total, self._size))

        return select(0, self._strategy.run(step, args=(batch,)))

    def _whole(self, name: str, batch: object) -> dict[str, tf.Tensor]:
        total = samples.count_in_graph(batch)

        def step(data: object) -> dict[str, tf.Tensor]:
            return run_step(self._model, name, data, Shard(total, total, self._size, whole=True))

        return select(0, self._strategy.run(step, args=(batch,)))

    def _predict(self, name: str, batch: object) -> tuple[object, bool | tf.Tensor]:
        total = samples.count_in_graph(batch)
        size = -(-total // self._size)

        def step(padded: object) -> object:
            replica = _replica()
            return getattr(self._model, name)(
                samples.on_device(samples.take(padded, replica * size, (replica + 1) * size))
            )

        outputs = self._strategy.run(step, args=(samples.pad(batch, size * self._size - total),))
        # Outputs without a row per sample are not used here; they only need to be computable.
        if (of_rows := samples.are_of(select(0, outputs), size)) is False:
            return select(0, outputs), False
        return samples.take(joined(self._strategy, outputs), 0, total), of_rows

    def _predict_whole(self, name: str, batch: object) -> object:
        return select(0, self._strategy.run(getattr(self._model, name), args=(batch,)))


def _replica() -> int | tf.Tensor:
    """The id of this replica among those of all workers."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group
