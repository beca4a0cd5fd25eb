"""Ops that TensorFlow lowers to XLA wrongly: other numbers than its kernels', a result of another dtype, or not at all.

- `InTopK` of a target that is not a class, or of a row with an infinity.
- The gradients of `sqrt`, `rsqrt` and `reciprocal`: where nothing comes back to a result, TensorFlow's kernels give 0.
  XLA multiplies that 0 by what is infinite at 0. And for complex numbers it leaves the conjugate out.
- The gradients of activations: that of `selu` differs at 0, which each number of a padded row is.
- The variance of `fused_batch_norm`: XLA subtracts the square of the mean from the mean of the squares, and loses all
  digits if the mean is large.
- The gradient of resizing an image of float64 has another dtype.
- `bincount` with limits that tell the number of places does not compile.
- The place of the largest or smallest element, of a row with a NaN: TensorFlow's kernels pass over a NaN.
- `top_k`, and what sorts by it: XLA ranks a NaN by its sign, which says nothing: that of 0 / 0 is another one than that
  of a constant. TensorFlow's rank depends on where the NaN stands in the row. Here a NaN is always the largest number,
  but for `k=1`, where TensorFlow passes over it.
- Places of a NaN among sorted numbers: TensorFlow's are behind all of them.

A replacement has the gradient that TensorFlow gives the op. Random ops are in `state/random_numbers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.upstream.graphs import graph_walk

Attribute = Callable[[str], Any]
"""Returns an attribute of an op by its name: a number, a text, a dtype."""

# The constants of TensorFlow's kernel.
_SELU_SCALE, _SELU_SCALE_ALPHA = 1.0507009873554804934193349852946, 1.7580993408473768599402175208123


def replacement(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor] | None:
    """TensorFlow's results of a new op, given its type, inputs and a getter of attributes; None if XLA's are right."""
    correct = _CORRECTED.get(kind)
    if correct is None or (kind in _RANKED and not any(each.dtype.is_floating for each in inputs)):
        return None
    return correct(kind, inputs, attribute)


def _in_top_k(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """Whether each target is among the k largest predictions of its row: float32 [rows, classes], int [rows].

    XLA takes 0 for the prediction of a target outside the classes, such as a label of -1 that a loss ignores. For
    TensorFlow, such a target is never among them, and nothing is in a row that has an infinity or a NaN.
    """
    predictions, targets = inputs[:2]
    k = inputs[2] if kind == "InTopKV2" else attribute("k")
    classes = tf.range(tf.shape(predictions)[1], dtype=targets.dtype)
    own = tf.where(classes == targets[:, tf.newaxis], predictions, tf.zeros_like(predictions))
    larger = tf.math.count_nonzero(predictions > tf.reduce_sum(own, axis=1, keepdims=True), axis=1)
    is_class = (targets >= 0) & (targets < tf.shape(predictions, out_type=targets.dtype)[1])
    return [is_class & (larger < tf.cast(k, larger.dtype)) & tf.reduce_all(tf.math.is_finite(predictions), axis=1)]


def _resize_bilinear_grad(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor] | None:
    """The gradient of resizing a float64 image. Resizing gives float32, and XLA gives the gradient so as well."""
    if attribute("T") != tf.float64:
        return None
    gradient, image = inputs
    narrow = tf.raw_ops.ResizeBilinearGrad(
        grads=gradient,
        original_image=tf.cast(image, tf.float32),
        align_corners=attribute("align_corners"),
        half_pixel_centers=attribute("half_pixel_centers"),
    )
    return [tf.cast(narrow, tf.float64)]


def _correct_root_gradient(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """The gradient of a root or of a reciprocal, of the result and the upstream gradient."""
    result, upstream = inputs
    name = "ReciprocalGrad" if kind == "InvGrad" else kind
    # XLA leaves the conjugate out. It changes no real number.
    gradient = getattr(tf.raw_ops, name)(y=tf.math.conj(result), dy=upstream)
    # XLA multiplies by a slope that is infinite at 0, and 0 times that is NaN.
    return [tf.where(upstream == 0, tf.zeros_like(gradient), gradient)]


def _correct_activation_gradient(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """The gradient of an activation, of the upstream gradient and the result."""
    upstream, result = inputs
    return [_ACTIVATIONS[kind](upstream, result)]


def _kept_where(condition: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    """The upstream gradient, times 0 where a condition fails: what is infinite or NaN there becomes NaN.

    XLA would turn a product with the condition as a number into a choice, and lose the NaN.
    """
    return tf.where(condition, upstream, upstream * 0)


_ACTIVATIONS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "ReluGrad": lambda upstream, result: _kept_where(result > 0, upstream),
    "Relu6Grad": lambda upstream, result: _kept_where((result > 0) & (result < 6), upstream),
    "EluGrad": lambda upstream, result: tf.where(result < 0, upstream * (result + 1), upstream),
    "SeluGrad": lambda upstream, result: tf.where(
        result < 0, upstream * (result + _SELU_SCALE_ALPHA), upstream * _SELU_SCALE
    ),
}


def _fused_batch_norm(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """A batch normalized: the result, the new mean and variance, and those that the gradient takes.

    It is computed in the dtype of the mean, float32, as in TensorFlow's kernel: the variance is the mean of squares of
    differences from the mean.
    """
    x, scale, offset, mean, variance = inputs
    wide = tf.cast(x, scale.dtype)
    dimensions = attribute("data_format").decode()  # "NHWC"; it says the rank also of a value that has none yet
    channel = dimensions.index("C")
    axes = [axis for axis in range(len(dimensions)) if axis != channel]
    along = [1] * len(dimensions)
    along[channel] = -1

    def spread(of_channels: tf.Tensor) -> tf.Tensor:
        return tf.reshape(of_channels, along)

    if attribute("is_training"):
        own_mean = tf.reduce_mean(wide, axes)
        centered = wide - spread(own_mean)
        own_variance = tf.reduce_mean(tf.square(centered), axes)
        count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), scale.dtype)
        # Only the running variance is divided by count - 1, as in TensorFlow's kernel.
        unbiased = own_variance * (count / tf.maximum(count - 1, 1))
        new = attribute("exponential_avg_factor")
        results = [own_mean, unbiased]
        if new != 1:
            results = [(1 - new) * mean + new * own_mean, (1 - new) * variance + new * unbiased]
    else:
        own_mean, own_variance = mean, variance
        centered = wide - spread(mean)
        results = [mean, variance]
    factor = tf.math.rsqrt(own_variance + attribute("epsilon")) * scale
    y = tf.cast(centered * spread(factor) + spread(offset), x.dtype)
    # What V3 returns for its gradient is memory of cuDNN, which no CPU or XLA kernel reads.
    unused = [tf.zeros([], scale.dtype)] if kind == "FusedBatchNormV3" else []
    return [y, *results, own_mean, own_variance, *unused]


def _correct_extreme_index(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """The index of the largest or smallest element along a dimension: the first one, 0 if all are NaN."""
    x, dimension = inputs
    find, none = (tf.raw_ops.ArgMax, -math.inf) if kind == "ArgMax" else (tf.raw_ops.ArgMin, math.inf)
    return [find(input=_without_nan(x, none), dimension=dimension, output_type=attribute("output_type"))]


def _top_k(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """The k largest elements of each row, and their indices."""
    x = inputs[0]
    k = inputs[1] if kind == "TopKV2" else attribute("k")
    passes_over = tf.get_static_value(k) == 1 and x.shape.rank is not None
    values, indices = tf.raw_ops.TopKV2(
        input=_without_nan(x, -math.inf if passes_over else math.nan),
        k=k,
        sorted=attribute("sorted"),
        index_type=attribute("index_type") if kind == "TopKV2" else tf.int32,
    )
    if passes_over:  # a row may have nothing else
        values = tf.gather(x, indices, batch_dims=x.shape.rank - 1)
    return [values, indices]


def _place(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """Where numbers lie among sorted ones, behind those that are equal: a NaN lies behind all."""
    numbers, values = inputs
    kept = _without_nan(values, math.inf)
    return [tf.raw_ops.UpperBound(sorted_inputs=numbers, values=kept, out_type=attribute("out_type"))]


def _bucket(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor]:
    """The number of boundaries up to a number: all for a NaN."""
    return [tf.raw_ops.Bucketize(input=_without_nan(inputs[0], math.inf), boundaries=attribute("boundaries"))]


def _without_nan(x: tf.Tensor, value: float) -> tf.Tensor:
    """A tensor with a value in the place of each NaN; a constant NaN has no sign bit."""
    return tf.where(tf.math.is_nan(x), tf.constant(value, x.dtype), x)


_RANKED: dict[str, Callable[..., list[tf.Tensor]]] = {
    "ArgMax": _correct_extreme_index,
    "ArgMin": _correct_extreme_index,
    "TopK": _top_k,
    "TopKV2": _top_k,
    "UpperBound": _place,
    "Bucketize": _bucket,
}
"""The ops in which XLA ranks a NaN differently. For integers its results are right."""

_CORRECTED: dict[str, Callable[..., list[tf.Tensor] | None]] = {
    **_RANKED,
    "InTopK": _in_top_k,
    "InTopKV2": _in_top_k,
    "ResizeBilinearGrad": _resize_bilinear_grad,
    **dict.fromkeys(("SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad"), _correct_root_gradient),
    **dict.fromkeys(_ACTIVATIONS, _correct_activation_gradient),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), _fused_batch_norm),
}

KINDS = frozenset(_CORRECTED)
"""The types of the ops that may have a replacement."""


def _know_places(op: tf.Operation) -> None:
    """Makes a new op that counts, `tf.math.bincount`, have as many places as `minlength` and `maxlength` both say.

    TensorFlow computes the number of places from the largest value too, and XLA does not see that it changes nothing.
    """
    places = op.inputs[1]
    least, most = bounds(places)
    if tf.get_static_value(places) is None and least is not None and least == most:
        graph_walk.set_input(op, 1, tf.constant(least, places.dtype))
        of_rows = op.type == "DenseBincount" and op.inputs[0].shape.rank == 2
        op.outputs[0].set_shape([*(op.inputs[0].shape[:1] if of_rows else ()), least])


def bounds(number: tf.Tensor, known: Callable[[tf.Tensor], Any] = tf.get_static_value) -> tuple[int | None, int | None]:
    """The least and the largest value that an integer can have, as far as the ops behind it tell.

    Args:
        number: the integer.
        known: the value of a tensor; None if it is not known.
    """
    value = known(number)
    if value is not None:
        return int(value), int(value)
    op = number.op
    if op.type in ("Cast", "Identity"):
        return bounds(op.inputs[0], known)
    if op.type not in ("Minimum", "Maximum"):
        return None, None
    both = [bounds(each, known) for each in op.inputs]
    least, most = ([end for end in ends if end is not None] for ends in zip(*both, strict=True))
    # One input is enough to limit a minimum from above; from below it takes both. A maximum is the reverse.
    if op.type == "Minimum":
        return (min(least) if len(least) == 2 else None), min(most, default=None)
    return max(least, default=None), (max(most) if len(most) == 2 else None)


CHANGED: Mapping[str, Callable[[tf.Operation], None]] = {"Bincount": _know_places, "DenseBincount": _know_places}
"""How new ops of some types are changed, so that XLA compiles them."""
