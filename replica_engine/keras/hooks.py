"""What of a Keras model behaves as a replica's does, while the model runs on replicas.

Keras' own `train_step` and `test_step`, or the model's, run unchanged on each replica. What they compute for a batch
they then compute for a share of it; these are the places where that makes a difference:

- an optimizer's `apply` reduces gradients over replicas first;
- its `scale_loss`, which Keras calls before it takes the gradient, weighs the loss by the share. Where a step does not
  call it, the gradients are weighed;
- the loss of one of several outputs counts as much as the share is of the batch;
- a metric notes what its `result` returned, so that in the logs the result of all replicas can stand for it.

They are attributes of the objects while a replicated method runs, and are taken away after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from replica_engine._compat import keras_model
from replica_engine.keras.cross_replica_optimizer import CrossReplicaOptimizer
from replica_engine.keras.optimizer import apply_across_replicas
from replica_engine.keras.share import current_share

_NOTHING = object()


class Hooks:
    """The hooks of one model's optimizers and metrics.

    Args:
        model: the model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._hooks: list[tuple[Any, str, Any]] = []
        self._before: list[Any] = []

    def put(self) -> None:
        """Puts them there."""
        for optimizer in keras_model.optimizers_of(self._model):
            self._hooks.append((optimizer, "apply", _apply(optimizer)))
            self._hooks.append((optimizer, "scale_loss", _scale_loss(optimizer)))
        of_outputs = keras_model.output_losses(self._model)
        for metric in keras_model.metrics_of(self._model):
            self._hooks.append((metric, "result", _result(metric)))
            if any(metric is each for each in of_outputs) and not self._model.run_eagerly:
                self._hooks.append((metric, "update_state", _update(metric)))
        self._before = [vars(target).get(name, _NOTHING) for target, name, _ in self._hooks]
        for target, name, hook in self._hooks:
            vars(target)[name] = hook

    def take_away(self) -> None:
        """Takes them away; what was there before is there again."""
        for (target, name, _), before in zip(self._hooks, self._before, strict=True):
            if before is _NOTHING:
                vars(target).pop(name, None)
            else:
                vars(target)[name] = before
        self._hooks.clear()
        self._before.clear()


def _apply(optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
    # One that reduces gradients itself, for loops of one's own, is not to do it again.
    updated = optimizer.inner_optimizer if isinstance(optimizer, CrossReplicaOptimizer) else optimizer
    own = updated.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        share = current_share()
        if share is None:
            own(grads, trainable_variables)
            return
        if id(optimizer) not in share.scaled:
            grads = [_weighted(grad, share) for grad in grads]
        if share.deferred is not None:
            share.deferred.append((apply_reduced, list(grads), trainable_variables or keras_model.trained_by(updated)))
        else:
            apply_reduced(grads, trainable_variables)

    def apply_reduced(grads: Any, trainable_variables: Any) -> None:
        apply_across_replicas(updated, own, grads, trainable_variables, "sum")

    return apply


def _scale_loss(optimizer: keras.optimizers.Optimizer) -> Callable[[Any], Any]:
    own = optimizer.scale_loss

    def scale_loss(loss: Any) -> Any:
        share = current_share()
        if share is None:
            return own(loss)
        share.scaled.add(id(optimizer))
        # The gradient of a vector is that of its sum: such a loss is a sum over samples, and no mean.
        return own(loss) * (share.weight(loss.dtype) if len(loss.shape) == 0 else share.once(loss.dtype))

    return scale_loss


def _result(metric: keras.metrics.Metric) -> Callable[[], Any]:
    own = metric.result

    def result() -> Any:
        found = own()
        if (share := current_share()) is not None:
            parts = found.items() if isinstance(found, dict) else [(None, found)]
            share.results += [(part, metric, key) for key, part in parts]
        return found

    return result


def _update(metric: keras.metrics.Metric) -> Callable[..., Any]:
    """Of the loss of one output, which Keras counts once a batch in a graph."""
    own = metric.update_state

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        share = current_share()
        return own(values, sample_weight=sample_weight if share is None else share.fraction())

    return update_state


def _weighted(grad: Any, share: Any) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_weighted(grad.values, share), grad.indices, grad.dense_shape)
    return grad * share.weight(grad.dtype)
