"""Ops for which XLA computes another number than TensorFlow, without a word. A body has TensorFlow's numbers.

Random ops are in `state/philox.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def replacement(kind: str, inputs: Sequence[Any], attribute: Callable[[str], Any]) -> list[tf.Tensor] | None:
    """TensorFlow's results of a new op, given its type, inputs and a getter of attributes; None if XLA's are right."""
    if kind not in ("InTopK", "InTopKV2"):
        return None
    predictions, targets = inputs[:2]
    return [_in_top_k(predictions, targets, inputs[2] if kind == "InTopKV2" else attribute("k"))]


def _in_top_k(predictions: tf.Tensor, targets: tf.Tensor, k: Any) -> tf.Tensor:
    """Whether each target is among the k largest predictions of its row: float32 [rows, classes], int [rows].

    XLA takes 0 for the prediction of a target that is no class, such as a label of -1 that a loss ignores. For
    TensorFlow, such a target is never among them, and nothing is in a row that has an infinity or a NaN.
    """
    classes = tf.range(tf.shape(predictions)[1], dtype=targets.dtype)
    own = tf.where(classes == targets[:, tf.newaxis], predictions, tf.zeros_like(predictions))
    larger = tf.math.count_nonzero(predictions > tf.reduce_sum(own, axis=1, keepdims=True), axis=1)
    is_class = (targets >= 0) & (targets < tf.shape(predictions, out_type=targets.dtype)[1])
    return is_class & (larger < tf.cast(k, larger.dtype)) & tf.reduce_all(tf.math.is_finite(predictions), axis=1)
