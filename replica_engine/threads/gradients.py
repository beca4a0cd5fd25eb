"""The gradient of an all-reduce in a graph: on a replica, an all-reduce of the upstream gradients.

That is for tapes of the replica, and for `tf.gradients` in it. Who differentiates the graph from outside, with a tape
around a `tf.function` say, has all replicas before them at once. There the gradient goes through the ops that the
all-reduce is made of, as it does through any others, and comes to what the replicas' gradients add up to.
"""

from __future__ import annotations

import functools
import itertools
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import gradients

_STRATEGIES = "_replica_engine_all_reduces"  # of a graph: whose an all-reduce is, by the name of an op, weakly
_names = map(f"ReplicaEngineAllReduce_{uuid.uuid4().hex}_{{}}".format, itertools.count())  # a reload registers anew


def differentiable(
    context: tf.distribute.ReplicaContext,
    operation: tf.distribute.ReduceOp,
    tensors: Sequence[tf.Tensor],
    reduced: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """The results of an all-reduce in a graph, with a gradient.

    Args:
        context: of the replica.
        operation: of the all-reduce.
        tensors: what it was of.
        reduced: what it came to.
    """
    name = _registered(operation, tuple((tensor.dtype, str(tensor.shape)) for tensor in tensors))
    known = gradients.with_gradient(
        reduced, tensors, name, lambda *upstream: context.all_reduce(operation, list(upstream))
    )
    graph = tf.compat.v1.get_default_graph()
    strategies = getattr(graph, _STRATEGIES, {})
    strategies[known[0].op.name] = weakref.ref(context.strategy)
    setattr(graph, _STRATEGIES, strategies)
    return known


@functools.cache
def _registered(operation: tf.distribute.ReduceOp, signature: tuple) -> str:
    """The name of the gradient for `tf.gradients`. One for each signature: a saved model has one function for each."""
    name = next(_names)
    count = len(signature)

    @tf.RegisterGradient(name)
    def gradient(op: tf.Operation | None, *upstream: Any) -> list[Any]:
        """Of an op whose results are the reduced values, and then what they are of."""
        wanted = upstream[:count]
        context = tf.distribute.get_replica_context()
        if op is None or context is None or context.strategy is not _strategy_of(op):
            return [*wanted] + [None] * count
        found = iter(context.all_reduce(operation, [each for each in wanted if each is not None]))
        return [None] * count + [None if each is None else next(found) for each in wanted]

    return name


def _strategy_of(op: tf.Operation) -> tf.distribute.Strategy | None:
    reference = getattr(op.graph, _STRATEGIES, {}).get(op.name)
    return None if reference is None else reference()
