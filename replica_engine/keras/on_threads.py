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
        self._functions: dict[Any, Any] = {}
        self._traced: set[Any] = set()
        self._is_undivided = False
        self._whole_steps = Undivided(model)
        self._tried: set[str] = set()

    def step(self, name: str, batches: Sequence[Any]) -> dict[str, Any]:
        """Runs `train_step` or `test_step` on batches of at least one sample; returns the logs of the last batch."""
        for batch in batches:
            logs = self._step(name, batch)
        return logs

    def _step(self, name: str, batch: Any) -> Any:
        # An eager step cannot be given up when one of its metrics turns out not to be a sum.
        is_whole = name in self._whole_steps or (self._model.run_eagerly and has_own_metrics(self._model))
        if samples.count(batch) >= self._size and not is_whole:
            with self._whole_steps.noted(name), self._undone_if_given_up(name):
                return self._call(self._shared, name, batch)
        return self._call(self._whole, name, batch)

    def _undone_if_given_up(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around a step that may be given up: an eager one has changed variables then, which its graph has not.

        Keras' own steps do in each call what they did in the first one; a step of the user's own may begin to clip.
        """
        is_known = name in self._tried and keras_trainer.has_keras_step(self._model, name)
        self._tried.add(name)
        if is_known or not self._model.run_eagerly:
            return contextlib.nullcontext()
        return kept_if(NotASum, self._model)

    def predict(self, batch: Any) -> Any:
        """The outputs for a batch of at least one sample, in the order of the samples."""
        # An eager step does not tell an output with a row per sample from another one of that length.
        if not self._is_undivided and (not self._model.run_eagerly or keras_model.gives_rows(self._model)):
            outputs, are_of_rows = self._call(self._predict, "predict_step", batch)
            if are_of_rows:
                return outputs
            self._is_undivided = True  # the outputs have no row per sample
        return self._call(self._predict_whole, "predict_step", batch)

    def _call(self, function: Callable[..., Any], name: str, batch: Any) -> Any:
        if self._model.run_eagerly:
            return function(name, batch)
        key = (function.__name__, name)
        if key not in self._functions:
            named: Any = functools.partial(function, name)
            named.__name__ = name  # as the watchdog calls it
            self._functions[key] = tf.function(named, reduce_retracing=True, autograph=False)
        compiled = self._functions[key]
        kind = (key, samples.described(batch), samples.places(batch))
        if kind in self._traced:
            return compiled(batch)
        what = f"{name} of {self._model.name!r} for {self._size} replicas, batches of {samples.described(batch)}"
        with compiling(what, only_traced=True):
            # The graph takes any number of samples, so the last batch of a dataset needs no other graph.
            compiled.get_concrete_function(samples.generalized(batch))
            outputs = compiled(batch)
        self._traced.add(kind)
        return outputs

    def _shared(self, name: str, batch: Any) -> Any:
        total = samples.count_in_graph(batch)
        each, more = total // self._size, total % self._size  # the first `more` replicas get one sample more

        def step(data: Any) -> Any:
            replica = _replica()
            size = each + tf.cast(replica < more, tf.int32)
            start = replica * each + tf.minimum(replica, more)
            shard = samples.on_device(samples.take(data, start, start + size))
            return run_step(self._model, name, shard, Shard(size, total, self._size))

        return select(0, self._strategy.run(step, args=(batch,)))

    def _whole(self, name: str, batch: Any) -> Any:
        total = samples.count_in_graph(batch)

        def step(data: Any) -> Any:
            return run_step(self._model, name, data, Shard(total, total, self._size, whole=True))

        return select(0, self._strategy.run(step, args=(batch,)))

    def _predict(self, name: str, batch: Any) -> Any:
        total = samples.count_in_graph(batch)
        size = -(-total // self._size)

        def step(padded: Any) -> Any:
            replica = _replica()
            return getattr(self._model, name)(
                samples.on_device(samples.take(padded, replica * size, (replica + 1) * size))
            )

        outputs = self._strategy.run(step, args=(samples.pad(batch, size * self._size - total),))
        # Outputs without a row per sample are not used here; they only need to be computable.
        if (of_rows := samples.are_of(select(0, outputs), size)) is False:
            return select(0, outputs), False
        return samples.take(joined(self._strategy, outputs), 0, total), of_rows

    def _predict_whole(self, name: str, batch: Any) -> Any:
        return select(0, self._strategy.run(getattr(self._model, name), args=(batch,)))


def _replica() -> Any:
    """The id of this replica among those of all workers."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group
