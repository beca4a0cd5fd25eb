"""Ops that TensorFlow lowers to XLA wrongly: other numbers than its own, or a result of another dtype.

Random ops are in `state/philox.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


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
