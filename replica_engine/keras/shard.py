"""The shard: what one replica computes of a batch, and what a step may do to its sums and gradients.

One device computes the mean over its batch of n samples. Replica r has n_r of these samples and computes the mean over
them. The sum over the replicas of `n_r / n` times these means is the mean over the batch. So a loss, a gradient or a
mean of replica r counts with `weight = n_r / n`, and the replicas together compute what one device computes, whatever
the sizes of their shards are.

Some batches cannot be split, for example a batch with fewer samples than replicas. Then every replica computes the
*whole* batch, and only the result of replica 0 counts.

The sums of losses of the shards are added up in the end, and so are their gradients. That gives the numbers of one
device if what the step does to them in between is linear:

- what reaches the reduction of a compiled loss is the step's loss. In a step of Keras nobody else sees it;
- a sum of losses that another call makes, or that a method of the user's own gets, may be the loss itself. Or it is
  divided by the samples that the step was given, in which case it is a mean. A shard has fewer samples than the batch,
  so the two count differently. The ops from the sum to the loss, a metric or the logs show which it is;
- a gradient that was clipped, normalized or rounded before the optimizer gets it is that of a shard.

Where the ops do not show that the numbers are those of one device, the step is given up (`NotASum`), and every replica
computes the whole batch. An eager step has no ops. There such a sum is enough, and so is another object than the
gradient of a tape.

A metric of the user's own has samples of a shard and adds up what it makes of them: there a sum is just a sum.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from replica_engine.diagnostics.user_frames import here, user_line
from replica_engine.process import interrupts
from replica_engine.upstream import eager
from replica_engine.upstream.keras import keras_hooks, keras_models
from replica_engine.values import linear, replica_weights

Update = tuple[Callable[..., None], list[Any], Sequence[keras.Variable]]
"""An update of weights by an optimizer: what makes it, its gradients, and the weights."""


@dataclasses.dataclass
class Shard:
    """The part of a batch that one replica computes.

    Attributes:
        rows: the number of samples of this replica.
        total: the number of samples of all replicas.
        replicas: the number of replicas.
        whole: whether every replica has all samples.
        results: the metric results of this step, each as (result, metric, key); the key is None unless the metric
            returned a dictionary.
        deferred: optimizer updates, with their gradients, that wait for the end of a branch; None where updates need
            not wait.
        is_own: whether a method of the user's own uses the loss of `compile`: the step, or `compute_loss`.
        sums: whether this step has a sum of losses whose use must be looked at.
        gradients: the gradients that tapes have given in an eager step.
        updates: whether an optimizer has got gradients.
        is_plain: whether the step follows the rule of `tf.distribute`: only the results of its metrics are noted.
        averages: whether all else in its logs is a mean over replicas, whatever it is.
    """

    rows: int | tf.Tensor
    total: int | tf.Tensor
    replicas: int
    whole: bool = False
    results: list[tuple[object, keras.metrics.Metric, str | None]] = dataclasses.field(default_factory=list)
    deferred: list[Update] | None = None
    is_own: bool = False
    sums: bool = False
    gradients: list[tf.Tensor] = dataclasses.field(default_factory=list)
    updates: bool = False
    is_plain: bool = False
    averages: bool = False

    def fraction(self, dtype: str | tf.DType = "float32") -> tf.Tensor:
        """The fraction of the batch that this replica has, as a scalar of `dtype`."""
        if self.whole:
            return tf.ones([], dtype)
        return tf.cast(self.rows, dtype) / tf.cast(self.total, dtype)

    def weight(self, dtype: str | tf.DType = "float32") -> tf.Tensor:
        """The weight of a mean over this replica's samples in the mean over all samples, as a scalar of `dtype`."""
        return self.once(dtype) if self.whole else self.fraction(dtype)

    def once(self, dtype: str | tf.DType = "float32") -> tf.Tensor:
        """The weight of a sum over this replica's samples in the sum over all samples, as a scalar of `dtype`."""
        if not self.whole:
            return tf.ones([], dtype)
        return tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), dtype)

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Makes this shard the current one for the code inside the `with` block."""
        return interrupts.variable_for_block(_current, self)


def current_shard() -> Shard | None:
    """The shard that is being computed; None outside of steps that have the numbers of one device."""
    share = _current.get()
    return None if share is None or share.is_plain else share


def noted_shard() -> Shard | None:
    """The shard that is being computed by any step."""
    return _current.get()


_current: contextvars.ContextVar[Shard | None] = contextvars.ContextVar("replica_engine_share", default=None)


_calls: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("replica_engine_losses", default=())
COMPILED = "the losses of compile"
"""Stands among the calls for what `compile` made of the losses of all outputs, which adds their sums up."""


class NotASum(BaseException):
    """A step is given up while it is traced: its shards would not add up. The step of the whole batch takes its place.

    No user sees it, and no `except Exception` on its way takes it for an error, neither of the user's nor of ours.

    Attributes:
        why: what the step does, for a warning; "" if a metric is the reason, which is told where it is found.
        instead: what a divided step has there.
        where: the user's line.
    """

    def __init__(self, why: str = "", instead: str = "", where: str = ""):
        super().__init__(why)
        self.why, self.instead, self.where = why, instead, where


_WRITE_MEAN = (
    "A loss with reduction='sum_over_batch_size', or tf.reduce_mean of what reduction=None returns, is a mean and is "
    "computed in parts."
)
_WRITE_CLIP = (
    "The optimizer does it to the gradient of the whole batch, in parts: clipnorm=, clipvalue= or global_clipnorm= of "
    "the optimizer, or an optimizer class of your own that changes gradients in update_step."
)

_WRITE_UPDATE = (
    "An optimizer adds up the gradients of all parts: optimizer.apply_gradients(zip(gradients, weights)), with "
    "keras.optimizers.SGD(rate) for weight - rate * gradient."
)


def called(call: object) -> contextlib.AbstractContextManager[object]:
    """Notes that `COMPILED`, the method `call` of a loss in it, or a metric is being called."""
    return interrupts.variable_for_block(_calls, (*_calls.get(), call))


class InMetric:
    """Stands among the calls for a metric of the user's own that is being updated.

    Attributes:
        has_sum: whether it has called a loss that is a sum.
    """

    has_sum = False


def metric_of_sums() -> InMetric | None:
    """The innermost metric of the user's own that is being updated, in which `has_sum` may be set; None outside."""
    return next((each for each in reversed(_calls.get()) if isinstance(each, InMetric)), None)


def summed(loss: tf.Tensor, share: Shard) -> tf.Tensor:
    """A sum of losses over the samples of a shard, as a part of the step's loss, which counts by its samples.

    Raises:
        NotASum: the step is eager, and may use the sum in any way.
    """
    metric = metric_of_sums()
    if metric is not None:
        metric.has_sum = True
        return loss
    # The step's loss is weighted later, as a mean is. A sum over the shard must come out of that as it is.
    value = loss / share.weight(loss.dtype)
    # Else the loss of an output, on its way into the sum that Keras itself makes of all: nobody sees it before.
    if share.is_own or _calls.get() != (COMPILED,):
        if not tf.is_symbolic_tensor(value):
            raise NotASum("a loss with reduction='sum' is called", _WRITE_MEAN, here())
        share.sums = True
        linear.tag([value], linear.SUMS)
    return value


def check_sum(value: object, share: Shard | None) -> None:
    """Looks at a value that counts as a mean over the samples of a shard.

    Raises:
        NotASum: it was made of a sum of losses in a way that may depend on the number of samples.
    """
    if share is None or not share.sums or share.whole or not tf.is_symbolic_tensor(value):
        return
    ways = linear.Ways(linear.SUMS, of_lengths=True, rows=share.rows)
    if ways.to(value) == linear.OTHER:
        line = user_line(ways.bent) if ways.bent is not None else ""
        raise NotASum(
            "a sum of losses (reduction='sum') is used in a way that may depend on the number of samples",
            _WRITE_MEAN,
            line or here(),
        )


def like_sum(new: tf.Tensor, old: tf.Tensor, share: Shard) -> tf.Tensor:
    """A value that this library has made of a checked one: it counts as that one does."""
    if share.sums and linear.Ways(linear.SUMS).to(old) == linear.LINEAR:
        linear.tag([new], linear.SUMS)
    return new


def tape_gradient(
    share: Shard, own: Callable[..., object], tape: tf.GradientTape, *args: object, **kwargs: object
) -> object:
    """`tf.GradientTape.gradient` in a shard: what it gives is known as gradients."""
    return _gradients(share, functools.partial(own, tape), *args, **kwargs)


def graph_gradients(
    share: Shard, own: Callable[..., object], ys: object, xs: object, *args: object, **kwargs: object
) -> object:
    """The same for `tf.gradients`."""
    noted = own if keras_hooks.is_of_graph(*args, **kwargs) else functools.partial(_gradients, share, own)
    return noted(ys, xs, *args, **kwargs)


def _gradients(
    share: Shard, own: Callable[..., object], target: object, sources: object, *args: object, **kwargs: object
) -> object:
    if share.whole or share.replicas == 1:
        return own(target, sources, *args, **kwargs)
    for each in tf.nest.flatten(target):
        if isinstance(each, tf.Tensor):
            check_sum(each, share)
            _check_gradient(each, share, "the gradient of a loss that depends on gradients of the weights is taken", "")
    gradients = own(target, sources, *args, **kwargs)
    if gradients is None:
        return None
    of_inputs = linear.Ways(linear.GRADIENTS)
    leaves = tf.nest.flatten(gradients)  # rows of a table are one
    found = [
        gradient
        for source, gradient in zip(tf.nest.flatten(sources), leaves, strict=False)
        if gradient is not None and of_inputs.to(source) == linear.APART  # else that of samples: each has its own
    ]
    linear.tag(found, linear.GRADIENTS)
    if tf.executing_eagerly():
        share.gradients += leaves
    return gradients


def check_gradients(gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], share: Shard) -> None:
    """Looks at the gradients that an optimizer gets in a shard.

    Raises:
        NotASum: they were changed on the way from the tape, and not in a linear way, as far as is known.
    """
    share.updates = True
    if share.whole or share.replicas == 1:
        return
    if tf.executing_eagerly():
        # By identity: an eager tensor has no op that tells how it was made.
        known = {id(each) for each in share.gradients}
        if known and any(each is not None and id(each) not in known for each in gradients):
            raise NotASum("gradients are changed in an eager step", _WRITE_CLIP, here())
        return
    for gradient in gradients:
        _check_gradient(
            gradient, share, "gradients are changed before the optimizer gets them, not linearly", _WRITE_CLIP
        )


def check_weights(model: keras.Model, share: Shard) -> None:
    """Looks, at the end of a step of a shard, whether it has changed weights by gradients of its own samples.

    An optimizer reduces its gradients before it changes weights. A step that assigns weights itself has those of a
    shard.

    Raises:
        NotASum: it has, or, in an eager step, no optimizer got the gradients that the step made.
    """
    if share.whole or share.replicas == 1:
        return
    why = "weights are changed by gradients without an optimizer"
    if tf.executing_eagerly():
        if share.gradients and not share.updates:
            raise NotASum(why, _WRITE_UPDATE, here())
        return
    weights = [eager.parts(keras_models.underlying(each)) for each in model.trainable_weights]
    # A replica writes to its component. A plain variable has none, and is written itself.
    handles = [eager.raw_handle(part) for weight in weights for part in weight[1:] or weight]
    ways = linear.Ways(linear.GRADIENTS)
    if ways.into(handles) >= linear.LINEAR:
        raise NotASum(why, _WRITE_UPDATE, "" if ways.bent is None else user_line(ways.bent))


def _check_gradient(value: tf.Tensor | tf.IndexedSlices | None, share: Shard, why: str, instead: str) -> None:
    ways = linear.Ways(linear.GRADIENTS, of_lengths=share.sums, rows=share.rows)
    if ways.to(value) == linear.OTHER:
        kind, line = ("", "") if ways.bent is None else (f" (by the op {ways.bent.type})", user_line(ways.bent))
        raise NotASum(f"{why}{kind}", instead, line or here())


def average_loss(
    share: Shard,
    own: Callable[..., tf.Tensor],
    per_example_loss: object,
    sample_weight: object = None,
    global_batch_size: int | tf.Tensor | None = None,
) -> tf.Tensor:
    """What `tf.nn.compute_average_loss` is in a shard: there, one device has one replica and the whole batch.

    Raises:
        NotASum: the size of the batch may be that of the shard.
    """
    losses = tf.convert_to_tensor(per_example_loss)
    if global_batch_size is None:
        # TensorFlow would multiply the rows by the number of replicas. A scalar is left to its error.
        size = None if losses.shape.rank == 0 else tf.shape(losses)[0]
        return own(losses, sample_weight, size)
    value = own(losses, sample_weight, global_batch_size)
    if share.whole or share.replicas == 1 or metric_of_sums() is not None:
        return value
    if not _is_of_all(global_batch_size, share):
        raise NotASum("tf.nn.compute_average_loss gets a batch size that may be that of a part", "", here())
    # As in `summed`: the step's loss is weighted later, and this value is divided by the whole batch already.
    value = value / share.weight(value.dtype)
    if tf.is_symbolic_tensor(value):
        share.sums = True
        linear.tag([value], linear.SUMS)
    return value


def _is_of_all(size: int | tf.Tensor, share: Shard) -> bool:
    """Whether a size of a batch is known to be the same for a shard as for the batch."""
    if linear.Ways(linear.SUMS, of_lengths=True).to(size) != linear.APART:
        return False
    number, own, total = (tf.get_static_value(tf.convert_to_tensor(each)) for each in (size, share.rows, share.total))
    # A graph for any number of rows. A size made of them would come from a length, which is ruled out above.
    if number is None or own is None:
        return own is None
    # A multiple of the shard's rows may be made of them; the number of the whole batch cannot.
    return bool(number % own) or (total is not None and number == total)


def regularization(share: Shard, own: Callable[..., tf.Tensor], regularization_loss: object) -> tf.Tensor:
    """What `tf.nn.scale_regularization_loss` is in a shard: the weight of the shard divides it already."""
    return tf.reduce_sum(regularization_loss)


def moments(share: Shard, own: Callable[..., object], layer: object, inputs: tf.Tensor, mask: object) -> object:
    """The mean and the variance of a normalization; where every replica has the whole batch, each takes its own.

    A synchronized one would add up N equal sums, and send its gradient to all replicas, whose gradients the optimizer
    adds up. That is the same but for rounding. After the normalization of a single row, the gradient of one device is
    exactly 0: what rounding leaves there, Adam makes a step of.
    """
    with replica_weights.alone(share.whole):
        return own(layer, inputs, mask)
