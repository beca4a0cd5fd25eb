"""Hooks that change the behaviour of a Keras model while the model runs on replicas.

The `train_step` and `test_step` of Keras, or of the model, run unchanged on each replica. They are written for a batch
and run here on a shard of it. In these places the difference matters:

- an optimizer's `apply` first reduces gradients over replicas;
- each gradient counts with the weight of the shard, once. In Keras' own `train_step`, `scale_loss` multiplies the loss
  by the weight: it is called once, and nobody sees its result. In a `train_step` of the user's own, `apply` multiplies
  the gradients: the step may scale one loss for two optimizers, or one of two losses, or show the scaled loss;
- the loss of one of several outputs counts with the shard's fraction of the batch;
- a metric records the results of its `result`, so that the logs can show the result over all replicas instead;
- a metric of the user's own is looked at while it is traced: whether its values on shards can be added up.

Between steps, a callback may change the model. These changes are noticed at once:

- an optimizer that a callback builds gets plain variables, which are then shared with the replicas;
- `compile` brings another optimizer and other metrics, which get their hooks;
- before weights are saved or read, the replicas agree on moving statistics. So training continues from exactly what was
  saved, and a second process that loads the weights continues from the same values.

The hooks are attributes of the model, optimizers and metrics. They exist only while a replicated method runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import sums as keras_sums
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.keras.cross_replica_optimizer import CrossReplicaOptimizer
from replica_engine.keras.optimizer import apply_across_replicas, of_whole_batch
from replica_engine.keras.shard import current_shard
from replica_engine.keras.undivided import looked_at

_NOTHING = object()
_READING = ("save", "save_weights", "export", "get_weights")


class Listener(Protocol):
    """The interface of the object that is told what a callback does to a model."""

    def build(self, optimizer: keras.optimizers.Optimizer, build: Callable[[], None]) -> None:
        """Called when an optimizer builds its variables; `build` is the optimizer's own method."""

    def changed(self) -> None:
        """Called when the model may have other variables, optimizers or metrics than before."""

    def reconcile(self) -> None:
        """Called before variables are read."""


class Hooks:
    """The hooks of one model, its optimizers and metrics.

    Args:
        model: the model.
        listener: the object to tell what happens to the model.
    """

    def __init__(self, model: keras.Model, listener: Listener):
        self._model = model
        self._listener = listener
        self._there: dict[tuple[int, str], tuple[Any, Any]] = {}

    def put(self) -> None:
        """Installs the hooks that the model needs now, and removes those on objects that the model no longer has."""
        wanted = {(id(target), name): (target, make) for target, name, make in self._wanted()}
        for key in [key for key in self._there if key not in wanted]:
            self._take(key)
        for key, (target, make) in wanted.items():
            if key not in self._there:
                self._there[key] = target, vars(target).get(key[1], _NOTHING)
                vars(target)[key[1]] = make(target)

    def take_away(self) -> None:
        """Removes all hooks, and restores the attributes that they replaced."""
        for key in list(self._there):
            self._take(key)

    def _take(self, key: tuple[int, str]) -> None:
        target, before = self._there.pop(key)
        if before is _NOTHING:
            vars(target).pop(key[1], None)
        else:
            vars(target)[key[1]] = before

    def _wanted(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """Yields each hook as its target object, its attribute name, and the function that makes it."""
        yield self._model, "compile", lambda model: _then(model.compile, self._listener.changed)
        for name in _READING:
            yield self._model, name, functools.partial(self._reading, name=name)
        for optimizer in keras_model.optimizers_of(self._model):
            yield optimizer, "apply", functools.partial(_apply, has_weighted=self._has_weighted)
            yield optimizer, "scale_loss", functools.partial(_scale_loss, has_weighted=self._has_weighted)
            for each in keras_model.with_inner_optimizers(optimizer):
                yield each, "build", self._build
        of_outputs = keras_model.output_losses(self._model)
        for metric in keras_model.metrics_of(self._model):
            yield metric, "result", _result
            if any(metric is each for each in of_outputs) and not self._model.run_eagerly:
                yield metric, "update_state", _update
            elif keras_sums.has_own_update(metric):
                yield metric, "update_state", looked_at

    def _has_weighted(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether gradients that reach the optimizer have the weight of the shard, because their loss had it."""
        is_main = optimizer is getattr(self._model, "optimizer", None)
        return is_main and keras_trainer.has_keras_step(self._model, "train_step")

    def _build(self, optimizer: keras.optimizers.Optimizer) -> Callable[[Any], None]:
        own = optimizer.build
        return lambda variables: self._listener.build(optimizer, lambda: own(variables))

    def _reading(self, model: keras.Model, name: str) -> Callable[..., Any]:
        own = getattr(model, name)

        @functools.wraps(own)
        def read(*args: Any, **kwargs: Any) -> Any:
            self._listener.reconcile()
            return own(*args, **kwargs)

        return read


def _then(own: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        after()
        return result

    return method


def _apply(optimizer: keras.optimizers.Optimizer, has_weighted: Callable[[Any], bool]) -> Callable[..., None]:
    # A CrossReplicaOptimizer reduces gradients itself. It must not do so a second time.
    updated = optimizer.inner_optimizer if isinstance(optimizer, CrossReplicaOptimizer) else optimizer
    own = updated.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        share = current_shard()
        if share is None:
            own(grads, trainable_variables)
            return
        if not has_weighted(optimizer):
            grads = [_weighted(grad, share) for grad in grads]
        if share.whole:
            grads = of_whole_batch(grads)
        if share.deferred is not None:
            share.deferred.append((apply_reduced, list(grads), trainable_variables or keras_model.trained_by(updated)))
        else:
            if share.longer is not None:
                share.longer.tell(grads, share.rows)
            apply_reduced(grads, trainable_variables)

    def apply_reduced(grads: Any, trainable_variables: Any) -> None:
        apply_across_replicas(updated, own, grads, trainable_variables, "sum")

    return apply


def _scale_loss(optimizer: keras.optimizers.Optimizer, has_weighted: Callable[[Any], bool]) -> Callable[[Any], Any]:
    own = optimizer.scale_loss

    def scale_loss(loss: Any) -> Any:
        share = current_shard()
        if share is None:
            return own(loss)
        # The gradient of a vector is the gradient of its sum: such a loss is a sum over samples, not a mean.
        is_sum, scaled = len(loss.shape) > 0, own(loss)
        if has_weighted(optimizer):
            return scaled * (share.once(loss.dtype) if is_sum else share.weight(loss.dtype))
        if not is_sum:
            return scaled
        value = tf.stop_gradient(scaled)  # which the step may show; `apply` weights the gradient as that of a mean
        return value + (scaled - value) / share.fraction(loss.dtype)

    return scale_loss


def _result(metric: keras.metrics.Metric) -> Callable[[], Any]:
    own = metric.result

    def result() -> Any:
        found = own()
        if (share := current_shard()) is not None:
            parts = found.items() if isinstance(found, dict) else [(None, found)]
            share.results += [(part, metric, key) for key, part in parts]
        return found

    return result


def _update(metric: keras.metrics.Metric) -> Callable[..., Any]:
    """For the metric of one output's loss: in a graph Keras counts each batch as 1; a shard counts as its fraction."""
    own = metric.update_state

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        share = current_shard()
        return own(values, sample_weight=sample_weight if share is None else share.fraction())

    return update_state


def _weighted(grad: Any, share: Any) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_weighted(grad.values, share), grad.indices, grad.dense_shape)
    return grad * share.weight(grad.dtype)
