"""The gradient of values in a graph, without a search for variables. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# record_operation: tells tapes the gradient of some tensors with respect to others.
from tensorflow.python.eager import record as _record


def with_gradient(
    results: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    registered: str,
    gradient: Callable[..., Sequence[Any]],
    in_order: Callable[..., tuple],
) -> list[tf.Tensor]:
    """Returns tensors equal to `results` whose gradient with respect to `inputs` tapes and `tf.gradients` know.

    Unlike `tf.custom_gradient`, this function does not search all ops behind the results for variables. All that the
    replicas have computed is behind a sum over replicas: for ResNet-50 with four replicas, that search took 10 s.

    Args:
        results: tensors of any ops.
        inputs: the tensors to differentiate with respect to.
        registered: the name under which `tf.RegisterGradient` registered the gradient, for `tf.gradients`: the gradient
            of an op whose results are `results`, followed by `inputs`.
        gradient: the same gradient for tapes: takes the upstream gradient of each result, and returns the gradient of
            each input.
        in_order: adds tokens to the outputs, inputs and gradient that tapes see; see `ReplicaContext.in_order`.
    """
    originals = [*results, *inputs]
    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": registered}):
        known = tf.identity_n(originals)

    def of_tape(*upstream: Any) -> list[Any]:
        return [None] * len(results) + list(gradient(*upstream[: len(results)]))

    _record.record_operation(registered, *in_order(known, originals, of_tape))
    return known[: len(results)]
