"""Hooks that change the behaviour of a Keras model while the model runs on replicas.

The `train_step` and `test_step` of Keras, or of the model, run unchanged on each replica. They are written for a batch
and run here on a shard of it. In these places the difference matters:

- an optimizer's `apply` first reduces gradients over replicas, and updates variables through their strategy;
- each gradient counts with the weight of the shard, once. In Keras' own `train_step`, `scale_loss` multiplies the loss
  by the weight: it is called once, and nobody sees its result. In a `train_step` of the user's own, `apply` multiplies
  the gradients: the step may scale one loss for two optimizers, or one of two losses, or show the scaled loss;
- Keras divides the sum of the losses of a shard by their number, so that the result is the mean over the shard, which
  counts n_r / n. With masked values, or with weights in one of the reductions, Keras divides by another number; with
  the reduction "sum" it does not divide. Shards have different divisors, so the divisors are summed over the replicas;
- the loss of one of several outputs, and a `Mean` metric that gets a single number for a batch, count with the shard's
  fraction of the batch;
- a metric records the results of its `result`, so that the logs can show the result over all replicas instead;
- a metric of the user's own is looked at where its `update_state` is traced, in the first step. The values of its
  variables are added up over replicas. That is right where each update adds something to each variable: then a sum over
  shards is the sum over the batch. It is wrong for a maximum, for the last value, for a running mean. Then that trace
  is given up, and the steps of the model compute whole batches from then on, of which the result of replica 0 counts.
  A step that runs eagerly cannot be given up: it has updated weights before it comes to the metrics. So a model with
  metrics of the user's own computes whole batches there at once.

Between steps, a callback may change the model. These changes are noticed at once:

- an optimizer that a callback builds gets plain variables, which are then shared with the replicas;
- `compile` brings another optimizer and other metrics, which get their hooks;
- before weights are saved or read, the replicas agree on moving statistics. So training continues from exactly what was
  saved, and a second process that loads the weights continues from the same values.

The hooks on losses and on `Mean` metrics are functions of Keras, put in place once. All others are attributes of the
model, optimizers and metrics; they exist only while a replicated method runs. The functions stay when the last
replicated model is gone: another library may have wrapped ours or kept a reference to it meanwhile, and what it put
there would be lost. Outside shards they only call Keras' own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras import ops

from replica_engine.diagnostics import misuse, user_frames
from replica_engine.errors.value_errors import warn_metric_not_a_sum
from replica_engine.keras import replica_optimizer, shard
from replica_engine.keras.replica_optimizer import Gradient, Weights
from replica_engine.keras.shard import Shard
from replica_engine.process.interrupts import held_off_once
from replica_engine.upstream import distribute
from replica_engine.upstream.hook import Hook
from replica_engine.upstream.keras import keras_hooks, keras_models, keras_training, metric_updates

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_NOTHING, _HELD = object(), object()
HasWeighted = Callable[[keras.optimizers.Optimizer], bool]
_logger = logging.getLogger("replica_engine")
_lock = threading.Lock()
_losses: dict[int, list[Any]] = {}  # with a hook, by their ids: the loss, for how many models, what it had before
_found: weakref.WeakValueDictionary[int, keras.metrics.Metric] = weakref.WeakValueDictionary()  # no sums, by their ids
_looked: weakref.WeakValueDictionary[int, keras.metrics.Metric] = weakref.WeakValueDictionary()  # by `_warn_of_no_sum`
_READING = ("save", "save_weights", "export", "get_weights")


def extend_losses_and_gradients() -> None:
    """Makes losses, means and gradients of Keras and TensorFlow treat a shard as described above, once."""
    of_shards: dict[Hook, Callable[..., object]] = {
        keras_hooks.REDUCE_LOSSES: _reduce,
        keras_hooks.MEAN: _mean,
        keras_hooks.AVERAGE_LOSS: shard.average_loss,
        keras_hooks.REGULARIZATION: shard.regularization,
        keras_hooks.MOMENTS_OF_WHOLE: shard.moments,
        keras_hooks.TAPE_GRADIENT: shard.tape_gradient,
        keras_hooks.GRADIENTS: shard.graph_gradients,
    }
    for hook, of_shard in of_shards.items():
        hook.around(functools.partial(_in_shard, of_shard))
    keras_hooks.scale_losses_once(shard.current_shard)


def _in_shard(of_shard: Callable[..., object], own: Callable[..., object], *args: object, **kwargs: object) -> object:
    """What a function gives: outside shards the function itself, and in a shard one of ours that gets it."""
    share = shard.current_shard()
    return own(*args, **kwargs) if share is None else of_shard(share, own, *args, **kwargs)


def has_no_sum(model: keras.Model) -> bool:
    """Whether a metric of the model was found whose values do not add up over parts of a batch."""
    return bool(_found) and any(id(metric) in _found for metric in keras_models.list_metrics(model))


class Lender(Protocol):
    """Who lends the variables of a model."""

    def build(self, optimizer: keras.optimizers.Optimizer, build: Callable[[], None]) -> None:
        """Called when an optimizer builds its variables, with the optimizer's own method."""

    def changed(self) -> None:
        """Called when the model may have other variables, optimizers or metrics than before."""

    def reconcile(self) -> None:
        """Called before variables are read."""


@dataclasses.dataclass(eq=False)
class Hooks:
    """The hooks of one model, its optimizers and metrics.

    Args:
        model: the model.
        strategy: the strategy through which its optimizers update variables.
        lender: who lends the variables of the model to the replicas; None if they are the replicas' own.
    """

    model: keras.Model
    strategy: tf.distribute.Strategy
    lender: Lender | None
    _there: dict[tuple[int, str], tuple[object, object]] = dataclasses.field(default_factory=dict, init=False)
    _found: list[tuple[object, str, Callable[[Any], object]]] | None = dataclasses.field(default=None, init=False)

    def find(self) -> None:
        """Finds the hooks that the model needs now, which `put` then installs; without, each `put` does so."""
        self._found = [*self._wanted()]

    def put(self) -> None:
        """Installs the hooks that the model needs now, and removes those on objects that the model no longer has."""
        found = self._wanted() if self._found is None else self._found
        wanted = {(id(target), name): (target, make) for target, name, make in found}
        for key in [key for key in self._there if key not in wanted]:
            self._take(key)
        for key, (target, make) in wanted.items():
            if key in self._there:
                continue
            if make is _called_loss:
                _hold(target)
                self._there[key] = target, _HELD
                continue
            self._there[key] = target, vars(target).get(key[1], _NOTHING)
            vars(target)[key[1]] = make(target)

    def take_away(self) -> None:
        """Removes all hooks, and restores the attributes that they replaced."""
        for key in list(self._there):
            self._take(key)

    def _take(self, key: tuple[int, str]) -> None:
        target, before = self._there.pop(key)
        if before is _HELD:
            _release(target)
            return
        if before is self.strategy and self.lender is not None:  # it was made under the scope, and has plain variables
            before = distribute.default_strategy()
        # An attribute that was not there must go: the class may get another one of that name.
        if before is _NOTHING:
            vars(target).pop(key[1], None)
        else:
            vars(target)[key[1]] = before

    def _wanted(self) -> Iterator[tuple[object, str, Callable[[Any], object]]]:
        """Yields each hook as its target object, its attribute name, and the function that makes it."""
        lender = self.lender
        if lender is not None:
            yield self.model, "compile", functools.partial(_around, name="compile", after=lender.changed)
            for name in _READING:
                yield self.model, name, functools.partial(_around, name=name, before=lender.reconcile)
        for optimizer in keras_models.list_optimizers(self.model):
            yield optimizer, "apply", functools.partial(_apply, has_weighted=self._has_weighted)
            yield optimizer, "scale_loss", functools.partial(_scale_loss, has_weighted=self._has_weighted)
            for each in keras_models.with_inner_optimizers(optimizer):
                if lender is not None:
                    yield each, "build", functools.partial(_build, lender=lender)
                yield each, keras_models.STRATEGY, lambda _: self.strategy
        of_outputs = keras_models.output_losses(self.model)
        for metric in keras_models.list_metrics(self.model):
            yield metric, "result", _result
            if any(metric is each for each in of_outputs) and not self.model.run_eagerly:
                yield metric, "update_state", _update
            elif metric_updates.has_own_update(metric):
                yield metric, "update_state", _looked_at
        if (compiled := keras_models.compiled_loss(self.model)) is not None:
            yield compiled, "call", _compiled_loss
            for loss in keras_models.losses_in(compiled):
                yield loss, "call", _called_loss

    def _has_weighted(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether gradients that reach the optimizer have the weight of the shard, because their loss had it."""
        is_main = optimizer is getattr(self.model, "optimizer", None)
        return is_main and keras_training.has_keras_step(self.model, "train_step")


def _build(optimizer: keras.optimizers.Optimizer, lender: Lender) -> Callable[[Sequence[keras.Variable]], None]:
    own = optimizer.build
    return lambda variables: lender.build(optimizer, lambda: own(variables))


def _nothing() -> None:
    pass


def _around(
    model: keras.Model, name: str, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing
) -> Callable[..., object]:
    own = getattr(model, name)

    @functools.wraps(own)
    def method(*args: object, **kwargs: object) -> object:
        before()
        result = own(*args, **kwargs)
        after()
        return result

    return method


def _apply(optimizer: keras.optimizers.Optimizer, has_weighted: HasWeighted) -> Callable[..., None]:
    # A CrossReplicaOptimizer reduces gradients itself. It must not do so a second time.
    updated = optimizer.inner_optimizer if isinstance(optimizer, replica_optimizer.CrossReplicaOptimizer) else optimizer
    plain, own = optimizer.apply, updated.apply

    def apply(grads: Iterable[Gradient], trainable_variables: Weights | None = None) -> None:
        share = shard.current_shard()
        if share is None:
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
                replica_optimizer.build_across_replicas(optimizer, trainable_variables)
            plain(grads, trainable_variables)
            return

        def weighted(values: tf.Tensor) -> tf.Tensor:
            return values * share.weight(values.dtype)

        grads = list(grads)
        shard.check_gradients(grads, share)
        if not has_weighted(optimizer):
            known = list(trainable_variables or keras_models.trained_by(updated))
            if trainable_variables is None and len(grads) > len(known):
                own(grads)  # Keras says how many there are
            grads = [
                grad if keras_models.is_overwritten(variable) else distribute.changed(grad, weighted)
                for grad, variable in zip(grads, known, strict=False)
            ]
        if share.whole:
            grads = replica_optimizer.move_rows_to_first(grads)
        # Only some replicas take this branch, so it must have no collective: `_Branch.finish` updates after it.
        if share.deferred is not None:
            share.deferred.append((apply_reduced, list(grads), trainable_variables or keras_models.trained_by(updated)))
        else:
            apply_reduced(grads, trainable_variables)

    def apply_reduced(grads: Sequence[Gradient], trainable_variables: Weights | None) -> None:
        replica_optimizer.apply_across_replicas(updated, own, grads, trainable_variables, "sum")

    return apply


def _scale_loss(optimizer: keras.optimizers.Optimizer, has_weighted: HasWeighted) -> Callable[[object], tf.Tensor]:
    own = optimizer.scale_loss

    def scale_loss(loss: object) -> tf.Tensor:
        share = shard.current_shard()
        if share is None:
            return own(loss)
        is_number = not tf.is_tensor(loss)
        loss = tf.convert_to_tensor(loss, dtype=keras.config.floatx() if is_number else None)
        shard.check_sum(loss, share)
        return shard.like_sum(scale_share(loss, own(loss), share), loss, share)

    def scale_share(loss: tf.Tensor, scaled: tf.Tensor, share: Shard) -> tf.Tensor:
        # The gradient of a vector is the gradient of its sum: such a loss is a sum over samples, not a mean.
        is_sum = len(loss.shape) > 0
        if has_weighted(optimizer):
            return scaled * (share.once(loss.dtype) if is_sum else share.weight(loss.dtype))
        if not is_sum:
            return scaled
        value = tf.stop_gradient(scaled)  # which the step may show; `apply` weights the gradient as that of a mean
        return value + (scaled - value) / share.fraction(loss.dtype)

    return scale_loss


def _result(metric: keras.metrics.Metric) -> Callable[[], object]:
    own = metric.result

    def result() -> object:
        found = own()
        if (share := shard.noted_shard()) is not None:
            parts = found.items() if isinstance(found, dict) else [(None, found)]
            share.results += [(part, metric, key) for key, part in parts]
        return found

    return result


def _update(metric: keras.metrics.Metric) -> Callable[..., object]:
    """For the metric of one output's loss: in a graph Keras counts each batch as 1; a shard counts as its fraction."""
    own = metric.update_state

    def update_state(values: object, sample_weight: object = None) -> object:
        share = shard.current_shard()
        return own(values, sample_weight=sample_weight if share is None else share.fraction())

    return update_state


def _compiled_loss(compiled: keras.losses.Loss) -> Callable[..., tf.Tensor]:
    """The losses of `compile` together, which call each of them: Keras reduces what its `call` returns, and adds it up.

    A loss with a `__call__` of its own may do anything with such a sum. So the sums of all are looked at then.
    """
    losses = keras_models.losses_in(compiled)
    is_known = bool(losses) and all(type(loss).__call__ is keras.losses.Loss.__call__ for loss in losses)
    return _called(shard.COMPILED if is_known else compiled, compiled)


def _called(what: object, loss: keras.losses.Loss) -> Callable[..., tf.Tensor]:
    own = loss.call

    @functools.wraps(own)
    def call(*args: object, **kwargs: object) -> tf.Tensor:
        with shard.called(what):
            return own(*args, **kwargs)

    return call


def _called_loss(loss: keras.losses.Loss) -> Callable[..., tf.Tensor]:
    return _called(loss, loss)


def _hold(loss: Any) -> None:
    """Puts the hook on a loss for one more model: several may have it, in steps on several threads at once."""
    with _lock:
        held = _losses.setdefault(id(loss), [loss, 0, vars(loss).get("call", _NOTHING)])
        if not held[1]:
            vars(loss)["call"] = _called_loss(loss)
        held[1] += 1


def _release(loss: Any) -> None:
    """Takes the hook from a loss with the last model that needs it."""
    with _lock:
        held = _losses[id(loss)]
        held[1] -= 1
        if held[1]:
            return
        del _losses[id(loss)]
        if held[2] is _NOTHING:
            vars(loss).pop("call", None)
        else:
            vars(loss)["call"] = held[2]


def _looked_at(metric: keras.metrics.Metric) -> Callable[..., object]:
    """The `update_state` of a metric of the user's own; it gives up a step of a shard whose values do not add up.

    A step with the rule of `tf.distribute` has no other way. There is a warning if the values surely do not.
    """
    own = metric.update_state

    def update_state(*args: object, **kwargs: object) -> object:
        share = shard.current_shard()
        if share is None and (noted := shard.noted_shard()) is not None:
            result = own(*args, **kwargs)
            held_off_once().around(lambda: _warn_of_no_sum(metric, functools.partial(own, *args, **kwargs), noted))
            return result
        for each in tf.nest.flatten((args, kwargs)):
            shard.check_sum(each, share)
        update = functools.partial(own, *args, **kwargs)
        # A sum of losses that the metric calls is its own affair, and none of the step's loss.
        looked_at = shard.InMetric()
        with shard.called(looked_at):
            result = update()  # the first call may make variables
            if share is None or share.whole or share.replicas == 1 or metric_updates.is_looking():
                return result
            look = metric_updates.adds_over_samples if looked_at.has_sum else metric_updates.only_adds
            # Ctrl-C waits: while the update is looked at, the metric has attributes of a graph that is thrown away.
            is_sum = held_off_once().around(lambda: look(metric, update))
        if not is_sum:
            with _lock:
                if id(metric) not in _found:
                    _found[id(metric)] = metric
                    _logger.info(
                        "Every replica computes whole batches, and a step takes as long as on one device, because "
                        "`update_state` of the metric %r does not only add to its variables, as far as its operations "
                        "show. Write it with sums, as in `self.total.assign_add(...)`, or leave it out of `compile` "
                        "and compute it from `predict`.",
                        metric.name,
                    )
            raise shard.NotASum  # without a reason: that is told above, and concerns all steps
        return result

    return update_state


def _warn_of_no_sum(metric: keras.metrics.Metric, update: metric_updates.UpdateCall, share: Shard) -> None:
    """Looks at the first update of a metric."""
    if share.replicas == 1 or metric_updates.is_looking() or id(metric) in _looked:
        return
    _looked[id(metric)] = metric
    found = metric_updates.list_updates(metric, update, user_frames.here)
    if (wrong := next((each for each in found if each.kind == metric_updates.OTHER), None)) is not None:
        text = warn_metric_not_a_sum(metric.name, type(metric).__name__, wrong.variable, wrong.place, share.replicas)
        misuse.warn_once(tf.distribute.get_strategy(), ("metric", metric.name, wrong.place), text)


def _reduce(
    share: Shard,
    own: Callable[..., tf.Tensor],
    values: object,
    sample_weight: object = None,
    mask: object = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: object = None,
) -> tf.Tensor:
    loss = own(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if share.whole or share.replicas == 1 or _are_numbers(values):
        return loss
    if reduction == "sum":
        return shard.summed(loss, share)
    if reduction not in _MEANS:
        return loss
    divisor = _divisor(sample_weight, mask, reduction, loss.dtype)
    return loss if divisor is None else loss * _correction(divisor, share)


def _are_numbers(values: object) -> bool:
    """Whether losses are a number, or numbers that a function lists: they have no row for each sample."""
    parts = values if isinstance(values, (list, tuple)) else [values]
    return all(len(getattr(each, "shape", ())) == 0 for each in parts)


def _mean(
    share: Shard, own: Callable[..., object], values: object, weight: object, reduce_fn: object, dtype: object
) -> object:
    """What a metric makes of its values. A `Mean` counts a single number with the shard's fraction of the batch."""
    if reduce_fn is ops.mean:
        shard.check_sum(values, share)
        if weight is None and len(tf.convert_to_tensor(values).shape) == 0:
            weight = share.fraction()
    return own(values, weight, reduce_fn=reduce_fn, dtype=dtype)


def _divisor(sample_weight: object, mask: object, reduction: str, dtype: tf.DType) -> tf.Tensor | None:
    """The divisor of a shard's losses; None if it is the number of samples or a multiple of that number."""
    if reduction == "mean_with_sample_weight":
        if sample_weight is None and mask is None:
            return None
        return ops.sum(ops.cast(keras_models.masked(sample_weight, mask, dtype, reduction), dtype))
    return None if mask is None else ops.sum(ops.cast(mask, dtype))


def _correction(divisor: tf.Tensor, share: Shard) -> tf.Tensor:
    """The factor from the shard's mean to its part of the global mean; a later weight by samples is divided out."""
    context = tf.distribute.get_replica_context()
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(divisor))
    return tf.math.divide_no_nan(divisor, total) / share.weight(divisor.dtype)
