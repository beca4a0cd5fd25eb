"""Ops that TensorFlow lowers to XLA wrongly: other numbers than its own, a result of another dtype, or not at all.

Random ops are in `state/philox.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import made_ops


def replacement(kind: str, inputs: Sequence[Any], attribute: Callable[[str], Any]) -> list[tf.Tensor] | None:
    """TensorFlow's results of a new op, given its type, inputs and a getter of attributes; None if XLA's are right."""
    if kind in ("InTopK", "InTopKV2"):
        predictions, targets = inputs[:2]
        return [_in_top_k(predictions, targets, inputs[2] if kind == "InTopKV2" else attribute("k"))]
    if kind == "ResizeBilinearGrad" and attribute("T") == tf.float64:
        gradient, image = inputs
        return [_resize_bilinear_grad(gradient, image, attribute("align_corners"), attribute("half_pixel_centers"))]
    return None


def _in_top_k(predictions: tf.Tensor, targets: tf.Tensor, k: Any) -> tf.Tensor:
    """Whether each target is among the k largest predictions of its row: float32 [rows, classes], int [rows].

    XLA takes 0 for the prediction of a target outside the classes, such as a label of -1 that a loss ignores. For
    TensorFlow, such a target is never among them, and nothing is in a row that has an infinity or a NaN.
    """
    classes = tf.range(tf.shape(predictions)[1], dtype=targets.dtype)
    own = tf.where(classes == targets[:, tf.newaxis], predictions, tf.zeros_like(predictions))
    larger = tf.math.count_nonzero(predictions > tf.reduce_sum(own, axis=1, keepdims=True), axis=1)
    is_class = (targets >= 0) & (targets < tf.shape(predictions, out_type=targets.dtype)[1])
    return is_class & (larger < tf.cast(k, larger.dtype)) & tf.reduce_all(tf.math.is_finite(predictions), axis=1)


def _resize_bilinear_grad(
    gradient: tf.Tensor, image: tf.Tensor, align_corners: bool, half_pixel_centers: bool
) -> tf.Tensor:
    """The gradient of resizing a float64 image. Resizing gives float32, and XLA gives the gradient so as well."""
    narrow = tf.raw_ops.ResizeBilinearGrad(
        grads=gradient,
        original_image=tf.cast(image, tf.float32),
        align_corners=align_corners,
        half_pixel_centers=half_pixel_centers,
    )
    return tf.cast(narrow, tf.float64)


def _know_places(op: tf.Operation) -> None:
    """Makes a new op that counts, `tf.math.bincount`, have as many places as `minlength` and `maxlength` both say.

    TensorFlow computes the number of places from the largest value too, and XLA does not see that it changes nothing.
    """
    places = op.inputs[1]
    least, most = _bounds(places)
    if tf.get_static_value(places) is None and least is not None and least == most:
        made_ops.set_input(op, 1, tf.constant(least, places.dtype))
        of_rows = op.type == "DenseBincount" and op.inputs[0].shape.rank == 2
        op.outputs[0].set_shape([*(op.inputs[0].shape[:1] if of_rows else ()), least])


def _bounds(number: tf.Tensor) -> tuple[int | None, int | None]:
    """The least and the largest value that an integer can have, as far as the ops behind it tell."""
    known = tf.get_static_value(number)
    if known is not None:
        return int(known), int(known)
    op = number.op
    if op.type in ("Cast", "Identity"):
        return _bounds(op.inputs[0])
    if op.type not in ("Minimum", "Maximum"):
        return None, None
    least, most = ([end for end in ends if end is not None] for ends in zip(*map(_bounds, op.inputs), strict=True))
    if op.type == "Minimum":
        return (min(least) if len(least) == 2 else None), min(most, default=None)
    return max(least, default=None), (max(most) if len(most) == 2 else None)


CHANGED: Mapping[str, Callable[[tf.Operation], None]] = {"Bincount": _know_places, "DenseBincount": _know_places}
"""How new ops of some types are changed, so that XLA compiles them."""
