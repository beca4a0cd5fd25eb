"""The gradient of an all-reduce in a graph: on a replica, an all-reduce of the upstream gradients.

This gradient is for tapes inside a replica, and for `tf.gradients` inside it. A tape outside the replicas, for example
around a `tf.function`, sees all replicas at once. Such a tape differentiates through the ops that the all-reduce
consists of, as through any other ops. Its result is the sum of the gradients of the replicas.
"""

from __future__ import annotations

import functools
import itertools
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import gradients

_STRATEGIES = "_replica_engine_all_reduces"  # of a graph: op name -> weak reference to the all-reduce's strategy
_names = map(f"ReplicaEngineAllReduce_{uuid.uuid4().hex}_{{}}".format, itertools.count())  # unique also after a reload


def differentiable(
    context: Any, operation: tf.distribute.ReduceOp, tensors: Sequence[tf.Tensor], reduced: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the results of an all-reduce in a graph as tensors that have a gradient.

    Args:
        context: the replica's context.
        operation: the operation of the all-reduce.
        tensors: the inputs of the all-reduce.
        reduced: the results of the all-reduce.
    """
    name = _registered(operation, tuple((tensor.dtype, str(tensor.shape)) for tensor in tensors))
    known = gradients.with_gradient(
        reduced, tensors, name, lambda *upstream: context.all_reduce(operation, list(upstream)), context.in_order
    )
    graph = tf.compat.v1.get_default_graph()
    strategies = getattr(graph, _STRATEGIES, {})
    strategies[known[0].op.name] = weakref.ref(context.strategy)
    setattr(graph, _STRATEGIES, strategies)
    return known


@functools.cache
def _registered(operation: tf.distribute.ReduceOp, signature: tuple) -> str:
    """The name of the gradient for `tf.gradients`: one per signature, as a saved model has one function for each."""
    name = next(_names)
    count = len(signature)

    @tf.RegisterGradient(name)
    def gradient(op: tf.Operation | None, *upstream: Any) -> list[Any]:
        """The gradient of an op that passes on the reduced values, followed by the tensors that were reduced."""
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
