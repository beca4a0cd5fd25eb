"""A model that was made in `strategy.scope()`: its variables are the replicas' own, and Keras' `fit` is its loop.

Keras would distribute its data, and a step would have a mean over replicas where one device has a mean over samples.
Here the data stays whole, and a `StepFunction` divides it, as for a replicated model. A `train_step` of the user's own
keeps the rule of `tf.distribute`: gradients are summed over replicas, and the step divides by the batch of all.

Several workers, and threads on GPUs, take the shares that TensorFlow has dealt to them (`DealtBatches`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine.backend import Backend
from replica_engine.diagnostics.user_frames import here
from replica_engine.errors import ScopeError
from replica_engine.keras import batches, shard_hooks, shard_step, train_function
from replica_engine.process.interrupts import afterwards, held_off_once
from replica_engine.upstream import distribute
from replica_engine.upstream.keras import keras_models, keras_training

_lock = threading.RLock()
_active: dict[int, list[Any]] = {}  # of each model that is in a step, by its id: its hooks, and how many steps it is in


class ScopedModel:
    """The steps of a model on the replicas whose variables it has.

    Args:
        model: the model.
        backend: what runs the replicas.
        name: "train_step", "test_step" or "predict_step".
    """

    def __init__(self, model: keras.Model, backend: Backend, name: str):
        shard_hooks.extend_losses_and_gradients()
        self._model = model
        self._strategy = strategy = backend.strategy
        self._hooks = shard_hooks.Hooks(model, strategy, None)
        self._known: object = None
        step = shard_step.ShardedStep(model, name, own_step="sum")
        self.function = train_function.StepFunction(model, backend, step, batches.DealtBatches(backend), self.ready)

    def ready(self, batch: object) -> contextlib.AbstractContextManager[object]:
        """Called before a step, with a batch of it if it may make variables of the model; around it, hooks are put."""
        if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None:
            raise ScopeError.in_replica("run", here())
        if batch is not None and not keras_models.is_built(self._model):
            with self._strategy.scope():
                keras_models.build(self._model, batch)
        model = self._model
        state = keras_models.read_traced_state(model), keras_models.counts(model), len(model.metrics)
        if self._known != state:
            train_function.check_trainable(self._model)
            self.function.forget()
            self._hooks.find()
            self._known = state
        return self._hooked()

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        """Steps of one model may overlap on several threads: the first one puts hooks, and the last takes them away."""
        with _lock:
            # Train and test functions each have a set of hooks, and only one set is in place at a time.
            # A second set would take the first for Keras' own, and put it back.
            active = _active.setdefault(id(self._model), [self._hooks, 0])
            active[1] += 1
        with afterwards(self._left, "taking hooks away from the model"):
            with _lock:
                active[0].put()
            with distribute.outside_scopes() if tf.distribute.has_strategy() else contextlib.nullcontext():
                yield

    def _left(self) -> None:
        with _lock:
            active = _active[id(self._model)]
            active[1] -= 1
            if not active[1]:
                del _active[id(self._model)]
                # No Ctrl-C in between: the model would keep a part of its hooks.
                held_off_once().around(active[0].take_away)


def make_step_function(model: keras.Model, name: str) -> train_function.StepFunction:
    """What Keras calls to run a step of a model."""
    return ScopedModel(model, keras_training.find_strategy(model).extended.backend, name).function
